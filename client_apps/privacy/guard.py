"""Checks of requests against the policies of a site's tables.

Every handler calls these checks before it reads, and again before its results leave.
The rules themselves are in ``tp_flower/sources/policy.py``.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

from sqlglot import exp

from client_apps.privacy import approval
from client_apps.privacy.accounts import check_account
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray
from tp_flower.errors import PolicyError, ProposalError, SiteError, SourceError
from tp_flower.learning.models.local_model import LINEAR, ModelSpec, count_parameters
from tp_flower.privacy.mechanisms import GIVEN_FILTERS, GIVEN_KEYS, Budget
from tp_flower.protocol.training_messages import PrivacyTerms
from tp_flower.query.expressions import parse_expression
from tp_flower.query.fragment import NUMBERS, SURVIVAL, Fragment, Role
from tp_flower.query.lateral_tables import check_no_cutoffs, pair_names
from tp_flower.query.reads import Read, reads, reads_by_conditions, reads_of_pairs
from tp_flower.sources.derived.accounts import share_rows, source_id
from tp_flower.sources.policy import INSPECTION, LABELS, MODELS, SCORES, WEIGHTS
from tp_flower.sources.shards import ShardSchema, ShardSource
from tp_flower.terms.cutoffs import SealedPairs
from tp_flower.terms.fragment_text import fragment_text, text_digest
from tp_flower.terms.groups import compared_keys

KEY_ROLES: Final = frozenset({Role.KEY, Role.GROUP})


def visible_schema(site: Site, source: ShardSource) -> ShardSchema:
    """Return the part of a shard's schema that the server may see."""
    schema = site.tables.describe(source)
    try:
        source.policy.check_names({**schema.columns, **schema.unread})
    except SourceError as error:
        raise SourceError(f"{source}: {error}") from None
    visible = source.policy.visible(schema.columns)
    return replace(
        schema,
        columns={name: schema.columns[name] for name in visible},
        all_null=tuple(name for name in schema.all_null if name in visible),
        texts={name: texts for name, texts in schema.texts.items() if name in visible},
        unread={
            name: schema.unread[name] for name in source.policy.visible(schema.unread)
        },
    )


def check_fragment(site: Site, source: ShardSource, fragment: Fragment) -> None:
    """Refuse a fragment that reads forbidden columns, before reading any row."""
    if fragment.numbers.keys() - SURVIVAL:
        source.policy.check_release(WEIGHTS, is_private=False)
    if fragment.numbers.keys() & SURVIVAL:
        source.policy.check_release(LABELS, is_private=False)
    if not source.policy.is_about_columns:
        return
    visible_schema(site, source)
    source.policy.check_reads(reads(fragment))


def check_pairs(
    source: ShardSource, fragment: Fragment, columns: Mapping[str, str]
) -> None:
    """Refuse what a LATERAL sub-query tells of a table around it that may not be told.

    ``columns`` are the expressions of that table, ``source``, by the sub-query's names.
    A join key may be compared with them; their values are as the table's own.
    """
    if not source.policy.is_about_columns:
        return
    for read in (*reads_of_pairs(fragment), *reads_by_conditions(fragment)):
        tree = parse_expression(columns[read.column], "join key")
        for column in tree.find_all(exp.Column):
            source.policy.check_read(replace(read, column=column.name))


def check_cutoffs(site: Site, number: int, taken: Iterable[SealedPairs]) -> None:
    """Refuse to seal a part's keys and cutoffs for LATERAL sub-queries elsewhere.

    Or to tell these of them what the part's policy keeps, or a noisy label, or beside
    noise that no epsilon would be true of.
    """
    terms = site.terms
    source = site.source(number)
    source.policy.check_cutoffs()
    privacy = terms.settings.privacy
    if privacy.covers_features or privacy.covers_predictions:
        check_no_cutoffs(terms.fragments.values())
    around = terms.fragments[number]
    if around.subquery is not None and around.subquery.cutoffs is not None:
        raise ProposalError(
            f"cutoffs are taken of table {around.table!r}, which is a LATERAL "
            "sub-query itself"
        )
    for pairs in taken:
        outer = around.keys[pairs.key]
        # as it is, where the key beside it is hashed
        in_the_clear = replace(around, keys=((outer[pairs.cutoff],),))
        for read in reads(in_the_clear):
            if read.role is Role.KEY:
                source.policy.check_told(read, "a cutoff that is sealed")
        for other, fragment in terms.fragments.items():
            if pairs in terms.sealed_pairs.get(other, ()):
                key, _ = compared_keys(terms.proposal, fragment.table, around.table)
                columns = dict(zip(pair_names(fragment, key), outer, strict=True))
                check_pairs(source, fragment, columns)
        _check_noisy_cutoffs(site, number, f"{Role.KEY} {pairs.key}")


def check_partials(site: Site, number: int) -> None:
    """Refuse to seal a part's keys or partial answers for its table's other shards.

    Partial answers are values, whatever the query does with them: of columns that
    features may read. Or beside noise that no epsilon would be true of.
    """
    terms = site.terms
    policy = site.source(number).policy
    policy.check_partials()
    privacy = terms.settings.privacy
    # of the filters, what rows are sorted by is sent, and conditions on rows are not
    fragment = terms.fragments[number]
    subquery = fragment.subquery and replace(fragment.subquery, filters=())
    sent = [
        replace(read, role=Role.FEATURE, element=f"a partial answer, {read.element},")
        for read in reads(replace(fragment, filters=(), subquery=subquery))
        if read.role in (Role.INNER, Role.HAVING, Role.FILTER)
    ]
    policy.check_reads(sent)
    if privacy.covers_labels:
        policy.check_unlabelled(sent)
    if privacy.covers_features or privacy.covers_predictions:
        check_no_cutoffs(terms.fragments.values())


def check_inspection(site: Site, source: ShardSource, fragment: Fragment) -> None:
    """Refuse a run that tells other sites scores, which this table's are part of.

    And to group rows for metrics by a key of this table whose values may not be told.
    """
    terms = site.terms
    if not terms.settings.inspects:
        return
    source.policy.check_release(INSPECTION, is_private=False)
    if terms.proposal.split_table != fragment.table:
        return
    for read in reads(replace(fragment, keys=fragment.keys[-1:])):
        if read.role is Role.KEY:
            source.policy.check_told(read, "metrics by group")


def _check_noisy_cutoffs(site: Site, number: int, element: str) -> None:
    """Refuse to seal a join key of the columns that a noisy label is made of."""
    parts = site.terms.extract_parts
    proposed = site.terms.proposal.parts
    at_site = [n for n in parts if proposed[n].node == proposed[number].node]
    alone = RowsOfParts.of(site, [number])
    for other in at_site:
        if parts[other].label_privacy is None:
            continue
        columns = _label_columns(site.fragment(other))
        for read in _reads_of_values(site, other, alone, columns):
            if read.role is Role.KEY and read.element == element:
                raise SiteError(
                    f"table {site.fragment(number).table!r}: a label leaves with noise "
                    f"only, but a cutoff that is sealed, or the key beside it, reads "
                    f"column {read.column!r}, which the label is made of"
                )


def _label_columns(fragment: Fragment) -> set[str]:
    """Return the columns that a label is made of, in lower case."""
    return {read.column.lower() for read in reads(fragment) if read.role is Role.LABEL}


def check_selections(site: Site, numbers: Iterable[int]) -> None:
    """Refuse two selections of a table's rows in a run: they may differ in one row."""
    selected: dict[str, set[str]] = {}
    for number in numbers:
        source = site.source(number)
        fragment = site.fragment(number)
        chosen = selected.setdefault(source_id(source), set())
        subquery = fragment.subquery
        # the rows of a grouped sub-query are no rows of the table, but groups
        conditions = fragment.conditions
        if subquery is not None and not subquery.is_windowed:
            conditions = subquery.filters
        chosen.add(" AND ".join(sorted(conditions)))
        if len(chosen) > 1:
            source.policy.check_rows(1, "the difference of two of the run's conditions")


@dataclass(frozen=True)
class RowsOfParts:
    """Which parts of a site read the same rows.

    Attributes:
        by_rows: the parts by the identifier of their rows.
        derived: the parts whose rows are derived from those of other tables.
        around: the parts of LATERAL sub-queries with cutoffs, by the table around them.
    """

    by_rows: Mapping[str, Sequence[int]]
    derived: Sequence[int]
    around: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, site: Site, numbers: Iterable[int]) -> "RowsOfParts":
        """Return it of some parts, which the site has bound to shards."""
        by_rows: defaultdict[str, list[int]] = defaultdict(list)
        around: defaultdict[str, list[int]] = defaultdict(list)
        derived = []
        for number in numbers:
            source = site.source(number)
            by_rows[source_id(source)].append(number)
            if source.derived is not None:
                derived.append(number)
            subquery = site.fragment(number).subquery
            if subquery is not None and subquery.cutoffs is not None:
                around[subquery.cutoffs.table].append(number)
        return cls(by_rows, derived, around)

    def beside(self, source: ShardSource) -> list[int]:
        """Return the parts that may have rows of a shard, in ascending order.

        They have its identifier, or one of the two is derived.
        """
        if source.derived is not None:
            parts = chain.from_iterable(self.by_rows.values())
        else:
            parts = chain(self.by_rows.get(source_id(source), ()), self.derived)
        return sorted(set(parts))


def check_noisy_label(site: Site, number: int, parts: RowsOfParts) -> None:
    """Refuse what reads the columns that a noisy label is made of.

    The scores would tell the label, whatever noise it has.
    """
    fragment = site.fragment(number)
    if fragment.event is not None:
        raise SiteError(
            f"table {fragment.table}: its label is the time of an event, for which "
            "there is no noise"
        )
    columns = _label_columns(fragment)
    read_values = _reads_of_values(site, number, parts, columns)
    for read in (*read_values, *_reads_at_cutoffs(site, number, parts, columns)):
        if read.role in (Role.FEATURE, *NUMBERS):
            raise SiteError(
                f"table {fragment.table}: its label leaves with noise only, but "
                f"{read.element} reads column {read.column!r}, which the label is made "
                "of: no feature, weight or offset may read it"
            )


def are_features_keys(site: Site, number: int, parts: RowsOfParts) -> bool:
    """Return whether a join or group key is a column that a feature of a part reads."""
    return bool(_roles_beside(site, number, parts, {Role.FEATURE}) & KEY_ROLES)


def given_values(site: Site, number: int, parts: RowsOfParts) -> list[str]:
    """Return the conditions of a guarantee of a part's features and its label.

    Keys leave as hashes, and which rows there are tells what filters read.
    """
    roles = _roles_beside(site, number, parts, {Role.FEATURE, Role.LABEL})
    conditions = {
        GIVEN_KEYS: KEY_ROLES,
        GIVEN_FILTERS: {Role.FILTER, Role.HAVING, Role.QUALIFY},
    }
    return [name for name, telling in conditions.items() if roles & telling]


def _roles_beside(
    site: Site, number: int, parts: RowsOfParts, covered: Collection[Role]
) -> set[Role]:
    """Return the roles in which a part's rows are read, of the covered columns."""
    columns = {
        read.column.lower()
        for read in reads(site.fragment(number))
        if read.role in covered
    }
    return {read.role for read in _reads_of_values(site, number, parts, columns)}


def _reads_of_values(
    site: Site, number: int, parts: RowsOfParts, columns: Collection[str]
) -> Iterator[Read]:
    """Yield what reads columns of a part's rows, in some parts.

    Of tables of which one is derived from the other's rows, any column may hold them.
    """
    source = site.source(number)
    identifier = source_id(source)
    for other in parts.beside(source):
        shard = site.source(other)
        is_derived = shard is not source and (source.derived or shard.derived)
        has_any = bool(is_derived) and share_rows(source, shard)
        if not has_any and source_id(shard) != identifier:
            continue
        for read in reads(site.fragment(other)):
            if has_any or read.column.lower() in columns:
                yield read


def _reads_at_cutoffs(
    site: Site, number: int, parts: RowsOfParts, columns: Collection[str]
) -> Iterator[Read]:
    """Yield what LATERAL sub-queries tell of their keys and cutoffs in a part's rows.

    Only those of a join key that reads some of the columns.
    """
    around = site.fragment(number)
    for other in parts.around.get(around.table, ()):
        fragment = site.fragment(other)
        key, _ = compared_keys(site.terms.proposal, around.table, fragment.table)
        trees = [parse_expression(sql, "join key") for sql in around.keys[key]]
        names = {c.name.lower() for tree in trees for c in tree.find_all(exp.Column)}
        if names & {*columns}:
            for read in reads_of_pairs(fragment):
                yield replace(read, column=", ".join(sorted(names & {*columns})))


def list_query(
    site: Site, number: int, source: ShardSource, fragment: Fragment
) -> None:
    """List a part's fragment for the site's ledger, whatever becomes of it."""
    text = site.kept(f"text-{number}", lambda: fragment_text(fragment))
    site.queries[number] = {
        "part": number,
        "table": source.table,
        "site": source.site,
        "query": text,
        "digest": text_digest(text),
        "policy": source.policy.digest,
        approval.PROPOSAL: site.terms.digest,
    }


def admit_query(site: Site, number: int, source: ShardSource) -> None:
    """Refuse a query that is not approved, or beyond the quota, or of a new account.

    Any other query goes on to read rows.
    """
    query = site.queries[number]
    try:
        source.policy.check_approved(query[approval.PROPOSAL])
    except PolicyError:
        # for the owner, who may approve it
        query[approval.DOCUMENT] = approval.document_of(site.terms.proposal)
        raise
    # simulations of one process, of any tables, keep one ledger in its memory
    if site.state_folder is not None and not site.is_simulated:
        # it reads the whole ledger
        site.kept(
            f"account-{number}",
            lambda: check_account(site.ledger, source, site.shards),
        )
    name = source_id(source)
    if name in site.quotas_by_rows:
        site.quotas[name] = site.quotas_by_rows[name]
        site.ledger.check_quota(source.table, name, site.quotas)
    query["source"] = name


def check_extracted(source: ShardSource, fragment: Fragment, rows: int) -> None:
    """Refuse a fragment that yields too few rows.

    An empty shard may pass, but not a condition that no row meets: that reveals as much
    as one that a single row meets. A row with windows is a row of the table, of values
    that an answer with each of the rows could have.
    """
    subquery = fragment.subquery
    is_grouped = subquery is not None and not subquery.is_windowed
    if subquery is not None and is_grouped:
        group = "a group of the sub-query, without HAVING COUNT(*) >= n,"
        source.policy.check_rows(subquery.least_rows, group)
        is_told = fragment.label is not None or fragment.numbers
        if is_told and subquery.cutoffs is not None:
            source.policy.check_rows(
                1, "the difference of two cutoffs' labels, weights or offsets"
            )
    if rows or fragment.conditions or is_grouped:
        source.policy.check_rows(rows, f"the answer of table {fragment.table!r}")


def check_noise(site: Site, source: ShardSource, fragment: Fragment) -> None:
    """Refuse noise of the run that would be for single rows where none holds."""
    privacy = site.terms.settings.privacy
    has_noise = privacy.covers_features or privacy.covers_predictions
    if has_noise or (privacy.covers_labels and fragment.label is not None):
        check_single_rows(source, fragment)


def check_single_rows(source: ShardSource, fragment: Fragment) -> None:
    """Refuse noise for single rows where one row changes others, or many answers.

    With a unit of privacy, all rows of a window are of one unit, and leave with it.

    Raises:
        QueryError: a row is in the answers for all later cutoffs.
        PolicyError: a row may change the values of any number of rows.
    """
    check_no_cutoffs([fragment])
    subquery = fragment.subquery
    if source.policy.privacy_unit or subquery is None or not subquery.is_windowed:
        return
    raise PolicyError(
        f"the windows of sub-query {fragment.table!r} let one row change the values of "
        "others, and the noise is for one row: the table's owner sets privacy-unit in "
        "its policy to columns that every window has in PARTITION BY, or leave the "
        "windows out"
    )


def check_rows(source: ShardSource, rows: int, purpose: str) -> None:
    """Refuse to compute ``purpose`` of too few rows; the server has chosen the rows."""
    if rows:
        source.policy.check_rows(rows, purpose)


def counts_evenly(counts: AnyArray, fewest: int) -> bool:
    """Return whether each row has at most a share of 1 / ``fewest`` in the counts.

    ``counts`` (n,) are the server's: in how many joined rows each row is, or their
    weights. A sum over rows of which one counts for nearly all tells that row.
    """
    # Python's numbers: a product of 32 bits might wrap around
    return bool(counts.max(initial=0).item() * fewest <= counts.sum().item())


def check_plan(
    source: ShardSource,
    kinds: Collection[str],
    privacy: PrivacyTerms | None = None,
    *,
    is_masked: bool = False,
    is_sealed: bool = False,
) -> None:
    """Refuse a run whose mechanisms cover less than the policy demands.

    ``kinds`` are the releases planned for this shard: "labels", "models" (gradients,
    Gram, moments, parameters, curvatures), "scores", "statistics", "rows"; scores may
    be masked, models sealed.
    """
    hidden = {MODELS: is_sealed, SCORES: is_masked}
    covered = privacy and {
        MODELS: privacy.covers_features,
        SCORES: privacy.covers_predictions,
    }
    for kind in kinds:
        is_private = bool(covered and covered.get(kind))
        source.policy.check_release(
            kind, is_private=is_private, is_masked=hidden.get(kind, False)
        )


def check_model(source: ShardSource, spec: ModelSpec, features: int) -> None:
    """Refuse a model of a forbidden kind, or too large a one, before it is built."""
    policy = source.policy
    policy.check_model(spec.kind)
    if policy.most_parameters is not None:
        smaller = "smaller hidden-sizes, or encoders of fewer columns"
        policy.check_size(count_parameters(spec, features), "parameters", smaller)


def check_shown(source: ShardSource, spec: ModelSpec, features: int, rows: int) -> None:
    """Refuse a linear model of too few rows for coefficients that it would show."""
    policy = source.policy
    if policy.coefficients and spec.kind == LINEAR:
        policy.check_freedom(count_parameters(spec, features), rows)


def budgets(site: Site) -> dict[str, Budget]:
    """Return the budgets of the site's rows, by source.

    If several entries of the tables file share rows, their smallest budget applies.
    """
    smallest: dict[str, Budget] = {}
    for source in site.shards:
        policy = source.policy
        name = source_id(source)
        if policy.epsilon is not None:
            per_run = policy.epsilon_per_run or policy.epsilon
            limits = Budget(policy.epsilon, policy.delta, per_run=per_run)
            smaller = smallest.get(name, limits)
            smallest[name] = Budget(
                min(limits.epsilon, smaller.epsilon),
                min(limits.delta, smaller.delta),
                per_run=min(limits.per_run, smaller.per_run),
            )
    return smallest
