"""Extraction: join keys, labels, weights and offsets of a query's rows, in two rounds.

One site seals the run's secret for the others (``seal``), and every site runs its
fragment of the query (``extract``). The replies have keyed hashes of join keys with row
positions; labels, weights and offsets, if the query has them; and keyed hashes of row
keys, if the rows are to be predicted.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from strategies.run.exchange import Part, Replies, Requests, ask
from strategies.run.replies import array_of, read_key, read_label
from strategies.run.seals import relay_seals, sealed_bytes
from strategies.run.sites import Inventory
from strategies.setup.absent_columns import check_absent, describe_absent, missing_types
from strategies.setup.columns import Columns
from strategies.setup.row_weights import (
    query_offsets,
    query_survival,
    query_weights,
)
from tp_flower.arrays import FloatArray
from tp_flower.duckdb_engine import quote_name
from tp_flower.errors import QueryError, SchemaError
from tp_flower.extraction.extracted import KeyColumn, LabelColumn
from tp_flower.joins.mapping import TableRows
from tp_flower.keyed_hash import HashArray
from tp_flower.protocol import setup_messages
from tp_flower.protocol.proposal import FILE, Proposal, ProposedJoin, ProposedPart
from tp_flower.query import BoundQuery, Fragment
from tp_flower.query.fragment import SURVIVAL, Role, spell
from tp_flower.query.reads import reads
from tp_flower.reports.records import write_whole
from tp_flower.settings import Settings
from tp_flower.sources.tables_file import DUCKDB, OWN_SQL
from tp_flower.terms.cutoffs import (
    answering_tables,
)
from tp_flower.terms.extraction import extract_parts
from tp_flower.terms.partials import parts_with_groups


@dataclass(frozen=True)
class Extracted:
    """The sites' replies to ``extract``.

    Parts are by table in shard order, none for a table whose sites are all missing; row
    counts, after the filters, by part; keys by (table, key number). ``weights`` are
    those of the rows of the weight's table, ``offsets`` those of the label's,
    ``row_hashes`` keyed hashes (n, 2) of the label table's row keys; None if the query
    or the run has none. ``survival`` are the columns beside labels that are times of
    events, by name; none beside others. ``public_keys`` are those of the run, by node;
     ``columns`` say how text files are read, ``filters`` by
    table which conditions have removed rows of it. The ``proposal`` is what the sites
    have agreed to; by join, ``answering`` is the table whose last row is that of all
    keys that it lacks. ``absent`` are sentences about columns that some shards lack.
    """

    parts: dict[str, tuple[Part, ...]]
    rows: dict[int, int]
    keys: dict[tuple[str, int], list[KeyColumn]]
    weights: FloatArray | None
    offsets: FloatArray | None
    survival: Mapping[str, FloatArray]
    row_hashes: HashArray | None
    public_keys: Mapping[int, str]
    columns: Columns
    absent: tuple[str, ...]
    filters: Mapping[str, str]
    sealed_bytes: Mapping[int, int]
    answering: Mapping[int, str]
    proposal: Proposal = field(repr=False)
    replies: Replies = field(repr=False)

    @property
    def table_rows(self) -> dict[str, int]:
        """Rows of each table after its filters, in the order of the query."""
        return {
            table: sum(self.rows[part.number] for part in parts)
            for table, parts in self.parts.items()
        }

    @property
    def all_parts(self) -> list[Part]:
        """The parts of all tables."""
        return [part for shards in self.parts.values() for part in shards]

    def shards_of(self, table: str) -> Iterator[tuple[Part, slice]]:
        """Yield the shards of a table, each with its slice of the table's rows."""
        start = 0
        for part in self.parts[table]:
            stop = start + self.rows[part.number]
            yield part, slice(start, stop)
            start = stop

    def offset_of(self, rows: TableRows) -> FloatArray | None:
        """Return the offset of joined rows, by their rows of the label's table."""
        return None if self.offsets is None else rows.expand(self.offsets)

    def label_columns(self, table: str) -> list[tuple[Part, LabelColumn]]:
        """Return the label of every shard with rows; others have labels of any type."""
        return [
            (part, read_label(self.replies, part, rows))
            for part in self.parts[table]
            if (rows := self.rows[part.number])
        ]


def extract(
    bound: BoundQuery, settings: Settings, inventory: Inventory, columns: Columns
) -> Generator[Requests, Replies, Extracted]:
    """Propose the run to the sites, and run the two rounds."""
    check_absent(bound, inventory)
    fragments: dict[Part, Fragment] = {}
    parts: dict[str, tuple[Part, ...]] = dict.fromkeys(bound.tables, ())
    for fragment in bound.fragments:
        table = fragment.table
        for shard in inventory.shards_of(fragment.name):
            part = Part(len(fragments), table, shard.site, shard.node, shard.position)
            fragments[part] = fragment
            parts[table] += (part,)
    by_number = {part.number: part for part in fragments}
    proposal = _propose(bound, settings, inventory, fragments)
    separate = parts_with_groups(proposal, settings)
    grouped = [[by_number[n] for n in numbers] for numbers in separate]
    _check_partitions(grouped, fragments)
    if settings.output_dir:
        # before the sites can refuse it: owners may want to read it
        text = msgspec.json.format(msgspec.json.encode(proposal)).decode()
        write_whole(Path(settings.output_dir) / FILE, f"{text}\n")
    proposed = extract_parts(proposal, settings)
    typed = _add_types(proposed, fragments, inventory, columns)
    by_node, bodies = yield from relay_seals(
        inventory, proposal, settings, by_number, typed
    )
    request = replace(next(iter(by_node.values())), parts=bodies)
    replies = yield ask(request, fragments, by_node)
    check_groups(grouped, replies, fragments)
    rows = {
        p.number: replies.body(p, setup_messages.ExtractedPart).rows for p in fragments
    }
    _check_filled(bound, parts, rows)
    weights, offsets, survival = _numbers(bound, parts, replies, rows)
    row_hashes = None
    if (
        bodies
        and (shards := parts[bound.label_table])
        and bodies[shards[0].number].row_key
    ):
        blocks = [
            array_of(replies, part, "row_hashes", (rows[part.number], 2))
            for part in shards
        ]
        row_hashes = np.concatenate(blocks)
    return Extracted(
        parts=parts,
        rows=rows,
        keys=_keys(bound, parts, replies, rows),
        weights=weights,
        offsets=offsets,
        survival=survival,
        row_hashes=row_hashes,
        public_keys={int(node): key for node, key in request.public_keys.items()},
        columns=columns,
        absent=tuple(
            describe_absent(bound, inventory, {p: rows[p.number] for p in fragments})
        ),
        filters=_removing_conditions(fragments, inventory, rows),
        sealed_bytes=sealed_bytes(bodies.values()),
        answering=answering_tables(
            proposal, {p.number: f for p, f in fragments.items()}, settings.privacy
        ),
        proposal=proposal,
        replies=replies,
    )


def _propose(
    bound: BoundQuery,
    settings: Settings,
    inventory: Inventory,
    fragments: Mapping[Part, Fragment],
) -> Proposal:
    """Return the run's request to the owners of all tables."""
    return Proposal(
        query=bound.sql,
        parts={
            part.number: ProposedPart(
                table=part.table,
                site=part.site,
                site_key=inventory.nodes[part.node].site_key or "",
                node=str(part.node),
                shard=part.shard,
                fragment=fragment.to_json(),
            )
            for part, fragment in fragments.items()
        },
        joins=[
            ProposedJoin(
                left=join.left,
                left_key=join.left_key,
                right=join.right,
                right_key=join.right_key,
            )
            for join in bound.joins
        ],
        outer=sorted(bound.outer),
        label_table=bound.label_table,
        split_table=bound.split_table,
        settings=settings.proposed(),
    )


def _add_types(
    bodies: Mapping[int, setup_messages.ExtractPart],
    fragments: Mapping[Part, Fragment],
    inventory: Inventory,
    columns: Columns,
) -> dict[int, setup_messages.ExtractPart]:
    """Return the requests with the types of the columns that have none of their own."""
    shards = inventory.by_place
    schemas = columns.schemas
    typed = {}
    for part, fragment in fragments.items():
        shard = shards[part.node, part.shard]
        schema = schemas[spell(shard.table, schemas) or shard.table]
        typed[part.number] = replace(
            bodies[part.number],
            readings=columns.readings_of(shard),
            types=missing_types(fragment, shard, schema),
        )
    return typed


def _check_filled(
    bound: BoundQuery, parts: Mapping[str, Sequence[Part]], rows: Mapping[int, int]
) -> None:
    """Refuse a table without rows, unless LEFT JOIN allows rows without a match."""
    for table, shards in parts.items():
        if table in bound.outer or any(rows[part.number] for part in shards):
            continue
        is_filtered = any(
            f.conditions or (f.subquery and not f.subquery.is_windowed)
            for f in bound.fragments_of(table)
        )
        condition = hint = ""
        if is_filtered:
            condition = " after the query's filters"
            hint = "; WHERE compares texts with their case"
        sites = ", ".join(dict.fromkeys(part.site for part in shards))
        raise SchemaError(
            f"table {table!r} is empty{condition}: none of its sites ({sites}) has a "
            f"row{hint}"
        )


def _removing_conditions(
    fragments: Mapping[Part, Fragment], inventory: Inventory, rows: Mapping[int, int]
) -> dict[str, str]:
    """Say by table which conditions have removed rows of it, for messages."""
    removing = {}
    for part, fragment in fragments.items():
        # of groups it is unknown how many there would be without the conditions
        subquery = fragment.subquery
        is_grouped = subquery is not None and not subquery.is_windowed
        hosted = inventory.by_place[part.node, part.shard].rows
        if rows[part.number] == hosted and not is_grouped:
            continue
        if fragment.conditions:
            texts = " AND ".join(dict.fromkeys(fragment.conditions))
            removing[part.table] = (
                f"of {fragment.name} the query takes only rows WHERE {texts}"
            )
    return removing


def _keys(
    bound: BoundQuery,
    parts: Mapping[str, Sequence[Part]],
    replies: Replies,
    rows: Mapping[int, int],
) -> dict[tuple[str, int], list[KeyColumn]]:
    """Return the keys that joins compare; for a table without parts, no values."""
    none = KeyColumn(np.zeros(0, np.int32), np.zeros((0, 2), np.uint64), "")
    keys = {}
    for table, shards in parts.items():
        for key in range(bound.joined_keys(table)):
            columns = [
                read_key(replies, part, key, rows[part.number]) for part in shards
            ]
            keys[table, key] = columns or [none]
    return keys


def _numbers(
    bound: BoundQuery,
    parts: Mapping[str, Sequence[Part]],
    replies: Replies,
    rows: Mapping[int, int],
) -> tuple[FloatArray | None, FloatArray | None, dict[str, FloatArray]]:
    """Return the weights and the offsets of rows, and what is beside times of events.

    Weights and offsets are None where the query has none.
    """

    def of_table(table: str, role: Role) -> dict[Part, FloatArray]:
        return {
            part: array_of(replies, part, role, (rows[part.number],))
            for part in parts[table]
        }

    weights = offsets = None
    if (weighed := bound.weight_table) is not None:
        weights = query_weights(
            list(of_table(weighed, Role.WEIGHT).values()),
            f"{weighed}: {bound.fragments_of(weighed)[0].weight}",
        )
    if bound.offset_sql:
        offsets = query_offsets(
            of_table(bound.label_table, Role.OFFSET), bound.offset_sql
        )
    survival = {
        str(role): query_survival(of_table(bound.label_table, role), role, sql)
        for role, sql in bound.fragments_of(bound.label_table)[0].numbers.items()
        if role in SURVIVAL
    }
    return weights, offsets, survival


def _check_partitions(
    split: Sequence[Sequence[Part]], fragments: Mapping[Part, Fragment]
) -> None:
    """Refuse windows without PARTITION BY over a table in several shards."""
    for parts in split:
        subquery = fragments[parts[0]].subquery
        if subquery is not None and () in subquery.partitions:
            sites = ", ".join(dict.fromkeys(repr(part.site) for part in parts))
            raise QueryError(
                f"a window of sub-query {parts[0].table!r} has no PARTITION BY, and "
                f"its rows are in several shards, of the sites {sites}: add PARTITION "
                "BY and columns that tell the sites apart"
            )


def check_groups(
    split: Sequence[Sequence[Part]],
    replies: Replies,
    fragments: Mapping[Part, Fragment],
) -> None:
    """Refuse a sub-query with a group whose rows are in two shards.

    A group of windows is a partition of one of them. The replies have the hashes of
    each part's group keys, uint64 (groups, 2).
    """
    for parts in split:
        hashes = [
            np.unique(array_of(replies, part, "group_hashes", (None, 2)), axis=0)
            for part in parts
        ]
        distinct, counts = np.unique(np.concatenate(hashes), axis=0, return_counts=True)
        if crossing := int(np.count_nonzero(counts > 1)):
            sites = ", ".join(dict.fromkeys(repr(part.site) for part in parts))
            raise QueryError(
                f"the sub-query {parts[0].table!r} aggregates groups that cross shards:"
                f" {crossing} of {len(distinct)} groups have rows at several of the "
                f"sites {sites}. Group by a column that tells the sites apart as well, "
                "or filter the sub-query so that every group is at one site; the "
                "groups of windows are those of PARTITION BY, and those of a LATERAL "
                "sub-query the keys that it compares; "
                f"{_whole_groups(parts, fragments)}"
            )


def _whole_groups(parts: Sequence[Part], fragments: Mapping[Part, Fragment]) -> str:
    """Return what makes whole groups of the rows of several shards."""
    names = list(dict.fromkeys(fragments[part].name for part in parts))
    if len({part.node for part in parts}) < len(parts):
        rows = " UNION ALL BY NAME ".join(f"SELECT * FROM {name}" for name in names)
        return (
            "shards at one site are one table where its tables file has another entry, "
            f'[tables.all_{names[0]}] with sql = "{rows}": write all_{names[0]} in '
            "the query"
        )
    subquery = fragments[parts[0]].subquery
    if subquery and subquery.cutoffs and subquery.cutoffs.makes_pairs:
        return (
            "shards of its table at several sites make one answer of partial ones: set "
            "sealed-partials = true"
        )
    return (
        "shards at several sites make one answer of partial ones in a LATERAL "
        "sub-query that compares a time of another site's rows, with sealed-partials = "
        "true (docs/how-to/look-back.md)"
    )


def describe_places(extracted: Extracted, table: str) -> tuple[str, ...]:
    """Describe where a table's work is done; sites with the same work share a line."""
    sites: dict[str, list[str]] = {}
    for part in extracted.parts[table]:
        body = extracted.replies.body(part, setup_messages.ExtractedPart)
        work = "all in DuckDB at the site"
        if body.engine == OWN_SQL:
            work = "over the answer to its owner's SQL, all in DuckDB at the site"
        elif body.engine != DUCKDB:
            pushed = "; ".join(body.pushed) or "the columns only"
            work = f"in {body.engine}: {pushed}. All else in DuckDB at the site"
        if sealed := extracted.sealed_bytes.get(part.number, 0):
            size = f"{sealed / 1000:.1f} KB"
            fragment = extracted.proposal.parts[part.number].fragment
            sealed_parts = "keys and cutoffs"
            if (fragment["subquery"] or {}).get("cutoffs"):
                sealed_parts = "keys and partial answers"
            work = f"{work}; it seals its {sealed_parts} for other sites: {size}"
        sites.setdefault(work, []).append(part.site)
    return tuple(
        f"{', '.join(dict.fromkeys(names))}: {work}" for work, names in sites.items()
    )


def describe_work(fragments: Sequence[Fragment]) -> tuple[str, ...]:
    r"""Describe the work of a table's sites, one line per task.

    >>> from tp_flower.query.fragment import Feature
    >>> day = Feature("weekday", 'DAYOFWEEK("day")')
    >>> own = Fragment("f", "flights", (Feature("hour", '"hour"'), day),
    ...                (('"plane"',),), '"delay" > 15', ('"delay" IS NOT NULL',))
    >>> print(*describe_work([own]), sep="\n")
    rows of flights WHERE "delay" IS NOT NULL
    features: hour, weekday = DAYOFWEEK("day")
    join keys: ("plane")
    label: "delay" > 15
    """
    first = fragments[0]
    lines = [_rows(fragment) for fragment in fragments]
    features = []
    for feature in first.features:
        is_column = feature.sql in (feature.name, quote_name(feature.name))
        definition = "" if is_column else f" = {feature.sql}"
        features.append(f"{feature.name}{definition}")
    lines.append(f"features: {', '.join(features) or 'none'}")
    if first.keys:
        keys = ", ".join(f"({', '.join(parts)})" for parts in first.keys)
        lines.append(f"join keys: {keys}")
    if first.label is not None:
        lines.append(f"label: {first.label}")
    for role, sql in first.numbers.items():
        lines.append(f"{role} of a joined row: {sql}")
    return tuple(lines)


def describe_formats(
    fragments: Sequence[Fragment], columns: Columns
) -> tuple[str, ...]:
    """Describe how the days in text files are read, where they are not ISO 8601."""
    names = dict.fromkeys(fragment.name for fragment in fragments)
    read = {
        (fragment.name, item.column)
        for fragment in fragments
        for item in reads(fragment)
    }
    return tuple(
        f"days of {column} in the texts of {name}: {day_format}"
        for name in names
        for column, day_format in columns.formats_of(name).items()
        if (name, column) in read
    )


def _rows(fragment: Fragment) -> str:
    filters = ""
    if fragment.filters:
        filters = f" WHERE {' AND '.join(fragment.filters)}"
    subquery = fragment.subquery
    if subquery is None:
        return f"rows of {fragment.name}{filters}"
    if subquery.cutoffs is None:
        return f"rows of ({subquery.to_sql(fragment.name)}){filters}"
    keys = ", ".join((*subquery.groups, "cutoff"))
    answer = subquery.answer_sql(fragment.name)
    late = ""
    if grid := subquery.cutoffs.grid:
        late = f", at or before a row's own, less than {grid.step} late"
    return (
        f"for each ({keys}), with cutoffs {subquery.cutoffs}{late}: {answer}{filters}"
    )
