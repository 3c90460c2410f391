"""Which sites have which part of a saved model, and which of its sites are gone.

A shard is scored with the part that was trained on it: of the same table, at the same
site. All shards of a table share one model, so that a shard that is new at a site is
scored with the part of another one there.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from strategies.inference.manifest import Manifest, ModelPart, ModelTable, feature_texts
from strategies.run.exchange import Part
from strategies.run.sites import Inventory
from tp_flower.errors import ModelError, QueryError
from tp_flower.query import BoundQuery
from tp_flower.settings import MEAN

Schemas = dict[str, dict[str, str]]


@dataclass(frozen=True)
class Missing:
    """The sites of a model that do not host its tables now.

    Attributes:
        sites: by table, those that are gone.
        gone: tables that no site hosts.
    """

    sites: Mapping[str, tuple[str, ...]]
    gone: frozenset[str]

    @property
    def tables(self) -> frozenset[str]:
        """The tables that some or all rows are missing of."""
        return frozenset(self.sites)

    def __str__(self) -> str:
        """Say which sites of which tables are gone."""
        return "; ".join(
            f"{', '.join(map(repr, sites))} of table {table!r}"
            for table, sites in self.sites.items()
        )


def find_missing(manifest: Manifest, inventory: Inventory) -> Missing:
    """Return which sites of a model are gone.

    How many shards a site has of a table does not matter: rows may have been put
    together, or apart.
    """
    there = {(shard.table.lower(), shard.site) for shard in inventory.shards}
    sites: dict[str, tuple[str, ...]] = {}
    gone = set()
    for table in manifest.tables:
        wanted = [(part.name.lower(), part.site) for part in table.parts]
        missing = [site for name, site in wanted if (name, site) not in there]
        if missing:
            sites[table.table] = tuple(dict.fromkeys(missing))
        if not any(inventory.hosts(part.name) for part in table.parts):
            gone.add(table.table)
    return Missing(sites, frozenset(gone))


def schemas_of(manifest: Manifest, inventory: Inventory) -> Schemas:
    """Return the columns of every table; of one that is gone, those in training."""
    known: Schemas = {
        name: dict(columns)
        for table in manifest.tables
        for name, columns in table.columns.items()
        if not inventory.hosts(name)
    }
    return {**known, **inventory.schemas()}


def check_query(manifest: Manifest, bound: BoundQuery) -> None:
    """Refuse a query whose rows are not made as those of the model are.

    Raises:
        QueryError: names the tables or features that are missing, too many, or in
            another order.
    """
    own, asked = [table.table for table in manifest.tables], list(bound.tables)
    if set(own) != set(asked):
        raise QueryError(
            f"model {manifest.model} is of other tables than the query"
            + _difference(own, asked)
        )
    if bound.label_table != manifest.label_table:
        raise QueryError(
            f"the label of model {manifest.model} is of table "
            f"{manifest.label_table!r}, that of the query of {bound.label_table!r}"
        )
    for table in manifest.tables:
        _check_names(manifest, table, bound)
        found = feature_texts(bound.fragments_of(table.table))
        if found == table.features:
            continue
        difference = _difference(table.features, found)
        raise QueryError(
            f"table {table.table!r}: the features of the query are not those of model "
            f"{manifest.model}" + (difference or ": they are in another order")
        )


def _check_names(manifest: Manifest, table: ModelTable, bound: BoundQuery) -> None:
    """Refuse an alias that stands for other tables than in training.

    A site scores no other table with its part.
    """
    asked = [own.name for own in bound.fragments_of(table.table)]
    own = {name.lower() for name in table.columns}
    if {name.lower() for name in asked} != own:
        raise QueryError(
            f"table {table.table!r} is {' + '.join(map(repr, asked))} in the query, "
            f"but {' + '.join(map(repr, table.columns))} in model {manifest.model}"
        )


def _difference(own: Sequence[str], asked: Sequence[str]) -> str:
    missing = [item for item in own if item not in asked]
    extra = [item for item in asked if item not in own]
    told = [
        f"{what} {', '.join(items)}"
        for what, items in (("missing", missing), ("not in the model", extra))
        if items
    ]
    return f": {'; '.join(told)}" if told else ""


def without_missing(
    manifest: Manifest, bound: BoundQuery, missing: Missing, policy: str
) -> BoundQuery:
    """Return the query as it can be answered without the sites that are gone.

    The tables that rows are missing of are LEFT JOINed: rows without a match there take
    the table's mean score.

    Args:
        manifest: of the model.
        bound: the query.
        missing: sites that are gone.
        policy: the setting ``on-missing``.

    Raises:
        ModelError: sites are gone, and the policy is to stop; or no joined row can be
            made without them.
    """
    if not missing.sites:
        return bound
    if policy != MEAN:
        raise ModelError(
            f"sites of model {manifest.model} are not there: {missing}; start them, or "
            f"set on-missing = {MEAN!r} to predict with the mean score of their tables"
        )
    lacking = missing.tables - {bound.label_table}
    if bound.label_table in missing.gone:
        raise ModelError(
            f"table {bound.label_table!r}, whose rows are to be predicted, is not "
            f"there: no site hosts it (it was at {missing.sites[bound.label_table]})"
        )
    for table in sorted(lacking):
        if behind := _behind(bound, table):
            raise ModelError(
                f"table {table!r} is not there (missing: {missing}), and "
                f"{', '.join(map(repr, behind))} can only be joined through it: no "
                "mean stands for that"
            )
    return replace(bound, outer=bound.outer | lacking)


def _behind(bound: BoundQuery, removed: str) -> list[str]:
    """Return the tables that no chain of joins without one ties to the label table."""
    reached = {bound.label_table}
    for _ in bound.tables:
        for join in bound.joins:
            ends = {join.left, join.right}
            if removed not in ends and ends & reached:
                reached |= ends
    return [t for t in bound.tables if t != removed and t not in reached]


def model_parts(
    manifest: Manifest, parts: Sequence[Part], inventory: Inventory
) -> dict[int, ModelPart]:
    """Return with which part of the model each part of the run is scored, by number.

    Raises:
        ModelError: a site has no part for a shard of its.
    """
    shards = {(shard.node, shard.position): shard for shard in inventory.shards}
    taken: defaultdict[tuple[str, str, str, int], int] = defaultdict(int)
    found = {}
    for part in parts:
        shard = shards[part.node, part.shard]
        # a UNION ALL may name one shard twice: its parts are in the same order
        place = (part.table, part.site, shard.table.lower(), shard.index)
        candidates = _candidates(manifest.table(part.table), shard.table, part.site)
        exact = [own for own in candidates if own.index == shard.index]
        choice = exact[taken[place] :] or exact or candidates
        taken[place] += 1
        if not choice:
            raise ModelError(
                f"site {part.site!r} hosts shard {shard.index} of table "
                f"{part.table!r}, but no part of model {manifest.model} for it: it was "
                "not there when the model was trained. Train again, or leave it out"
            )
        if not choice[0].digest:
            raise ModelError(
                f"site {part.site!r} has kept no part of model {manifest.model} (table "
                f"{part.table!r}): its state-dir was ':memory:'"
            )
        found[part.number] = choice[0]
    return found


def _candidates(table: ModelTable, name: str, site: str) -> list[ModelPart]:
    return [
        part
        for part in table.parts
        if part.name.lower() == name.lower() and part.site == site
    ]
