"""Messages of set-up: describe, seal, extract, check; statistics and encoders."""

from enum import StrEnum
from typing import Annotated, ClassVar, Final

import msgspec

from tp_flower.arrays import MOST_BINS, AnyArray
from tp_flower.folds import MOST_FOLDS
from tp_flower.protocol import fields as f
from tp_flower.protocol.fields import Body, Discloses, PartBody, Reply, Request
from tp_flower.protocol.proposal import Proposal
from tp_flower.protocol.text_readings import TextColumn, TextReading
from tp_flower.splits import BY_HASH, BY_ORDER, BY_VALUE

Hexadecimal = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{2})*\Z")]
PublicKey = f.Digest
KeyGroup = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9-]{1,64}\Z")]
GroupName = Annotated[
    str, msgspec.Meta(pattern=r"^(run|(join|table|label)-[0-9]{1,4})\Z")
]
"""Sites that share a key: all of the run, those of a join's sides, of a table, or of a
table and the label's."""
Number = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,20}\Z")]
"""A number as a key of a JSON object."""

TYPE_NAME: Final = r"^[A-Z]+( [A-Z]+)*(_[A-Z]+)?(\([0-9]{1,2}, ?[0-9]{1,2}\))?\Z"
TypeName = Annotated[str, msgspec.Meta(pattern=TYPE_NAME)]
"""A DuckDB type without values, such as DOUBLE, DECIMAL(10,2) or TIMESTAMP WITH TIME
ZONE."""
MOST_WIDTH: Final = 1 << 20  # length of a vector
SealedText = Annotated[AnyArray, f.sealed("sealed")]  # nonce and ciphertext
KeySourceName = Annotated[str, f.one_of("pinned", "agreed")]


class DescribeRequest(Request, frozen=True):
    """Describe the shards of the query's tables.

    Attributes:
        compared: columns, in lower case, that the query may join or group by; "*" for
            all.
    """

    tables: list[f.Name]
    compared: list[f.Name] = []

    discloses = (
        Discloses(
            "the names of the query's tables and columns", fields=("tables", "compared")
        ),
    )


class ShardDescription(Body, frozen=True, kw_only=True):
    """One shard as its site describes it.

    Attributes:
        rows: their number before any filter; None where a policy has ``approved-runs``,
            because no run is approved yet when it is described.
        all_null: columns without a value; for such a policy the ``absent`` alone.
        index: position among the table's shards at the organisation.
        position: position among the shards that the node hosts.
        columns: types by name, for the columns that a policy shows.
        unlisted: those of them that the policy keeps from features.
        absent: those that the shard lacks, and that are missing in its rows.
        texts: of the columns of a text file, which readings fit all texts.
        unread: why queries cannot read other columns that a policy shows, and what to
            write.
        ranks: whether its policy limits scores by the rank of its rows, or by others'
            tables.
        regions: by how many regions its policy lets rows be told apart; 0 for none.
        sees_regions: whether its rows may have a score for each region of another
            table.
        bins: into how many bins of a column its policy lets rows be sorted without
            being asked for by their number; 0 for none.
    """

    table: f.Name
    site: f.Name
    index: f.Count
    position: f.Count
    columns: dict[f.Name, f.Name]
    rows: f.TableRowCount | None
    all_null: list[f.Name]
    unlisted: list[f.Name] = []
    absent: list[f.Name] = []
    texts: dict[f.Name, TextColumn] = {}
    unread: dict[f.Name, f.Name] = {}
    ranks: bool = False
    regions: f.Count = 0
    sees_regions: bool = False
    bins: Annotated[int, f.between(0, MOST_BINS)] = 0


class DescribeReply(Reply, frozen=True, kw_only=True):
    """The tables and shards of a node, and its keys for the run.

    Attributes:
        partitions: number of nodes of a simulation; 0 if the node knows none.
        keys: where it takes the key of the hashes from.
        public_key: its X25519 key for the run.
        site_key: its long-term key, if sites pin each other's.
    """

    shards: list[ShardDescription]
    tables: list[f.Name]
    partitions: f.Count
    keys: KeySourceName
    public_key: PublicKey
    site_key: PublicKey | None = None
    simulated: bool

    discloses = (
        Discloses(
            "names of the hosted tables; columns, types and rows of the query's; "
            "which formats of days fit all texts of a column, whether their days "
            "differ, and whether texts that differ are equal values; which columns "
            "have no value or are absent, which a policy keeps from features, and why "
            "some cannot be read; where the owner approves runs, no number of rows "
            "and no column without a value",
            fields=("shards", "tables"),
        ),
    )
    schedule = ("partitions", "keys", "public_key", "site_key", "simulated")


class SealRequest(Request, frozen=True, kw_only=True):
    """Make the secrets of some groups and seal each to the sites of its group.

    Attributes:
        public_keys: of the run, by node.
        site_keys: long-term, by node, if sites pin each other's; otherwise "".
        groups: the nodes of each group that the node makes the secret for.
        simulated: whether secrets may be a simulation's, which depend on the seed.
    """

    keys: KeySourceName
    public_keys: dict[Number, PublicKey]
    site_keys: dict[Number, Hexadecimal]
    groups: dict[GroupName, list[Number]]
    simulated: bool
    seed: f.Seed

    schedule = ("keys", "public_keys", "site_keys", "groups", "simulated", "seed")


class SealReply(Reply, frozen=True):
    """The secrets, by group sealed to each of its nodes (X25519)."""

    sealed: dict[GroupName, dict[Number, Hexadecimal]]

    discloses = (
        Discloses(
            "the keys of hashes and masks, by way of the server",
            fields=("sealed",),
            covered_by="sealed",
            reader=f.SITES,
        ),
    )


class SealedSecret(Body, frozen=True, kw_only=True):
    """A group's secret, sealed to one of its nodes.

    Attributes:
        members: the nodes of the group; the first made the secret.
    """

    members: Annotated[list[Number], msgspec.Meta(min_length=1)]
    text: Hexadecimal


class LabelTerms(Body, frozen=True):
    """The mechanism that a run requests for labels; ``LabelPlan`` has the ranges.

    ``limits`` are the bounds, low and high, that numbers are clipped to.
    """

    mechanism: Annotated[str, f.one_of(f.LAPLACE, f.RANDOMISED_RESPONSE)]
    epsilon: f.Positive
    classes: tuple[str, ...]
    limits: tuple[f.Finite, ...]


class SplitTerms(Body, frozen=True, kw_only=True):
    """How a table's last key, which no join compares, decides what is held out.

    Attributes:
        by: "hash" holds out whole values; "order" and "value" let the server hold out
            the last joined rows, by the ranks of values in the table's only shard, or
            by the values themselves.
        test: share of the values to test on; ``validation`` of the others.
        folds: of a search, into which the values are divided by their hash; 0 without.
    """

    by: Annotated[str, f.one_of(BY_HASH, BY_ORDER, BY_VALUE)]
    seed: f.Seed
    test: f.Share
    validation: f.Share
    folds: Annotated[int, f.between(0, MOST_FOLDS)] = 0


class ExtractPart(PartBody, frozen=True, kw_only=True):
    """The part of the query that a shard runs.

    Attributes:
        groups: whether a sub-query's groups are split over shards.
        key_groups: names of the groups of columns that joins compare, one per key.
        label_privacy: noise on labels; None for labels in the clear.
        local_label: the task, if labels stay at the site.
        row_key: names of the last keys, whose hashes name the rows of predictions.
        readings: of the columns of a text file, how all shards of the table read them.
        types: of columns without a value in the shard, those that other shards have.
        cutoffs: for LATERAL sub-queries of this site, the pairs of keys and cutoffs
            that other sites have sealed for it; they come with the first that takes
            them.
        sealed_keys: of a sub-query's table in several shards, the keys of shards before
            this one, sealed for it.
        sealed_partials: what shards after it add to the answers about its keys.
    """

    shard: f.Count
    fragment: f.Document
    groups: bool
    key_groups: list[KeyGroup]
    label_privacy: LabelTerms | None = None
    local_label: (
        Annotated[str, f.one_of("auto", "regression", "classification")] | None
    ) = None
    row_key: list[f.Name] = []
    split: SplitTerms | None = None
    readings: dict[f.Name, TextReading] = {}
    types: dict[f.Name, TypeName] = {}
    cutoffs: dict[str, Annotated[AnyArray, f.sealed("sealed-{}")]] = {}
    sealed_keys: dict[str, Annotated[AnyArray, f.sealed("keys-{}")]] = {}
    sealed_partials: dict[str, Annotated[AnyArray, f.sealed("partials-{}")]] = {}


class ProposedRun(Body, frozen=True, kw_only=True):
    """A run as it is proposed, with the secrets that sites share in it.

    Attributes:
        public_keys: of the run, by node, of all its nodes.
        site_keys: long-term, by node, if sites pin each other's; otherwise "".
        sealed: the secrets of the groups that the node is in.
        proposal: of the whole run, the same at every site.
    """

    keys: KeySourceName
    public_keys: dict[Number, PublicKey]
    site_keys: dict[Number, Hexadecimal]
    sealed: dict[GroupName, SealedSecret]
    proposal: Proposal
    parts: dict[int, ExtractPart]

    discloses: ClassVar[tuple[Discloses, ...]] = (
        Discloses(
            "the run as it is proposed to all sites: the query with its expressions "
            "over every table, the sites by name, the run's settings; and the types "
            "of columns that have no value there",
            fields=("proposal", "fragment", "key_groups", "row_key", "types"),
        ),
    )
    # the message in which the secret was sealed discloses it
    schedule: ClassVar[tuple[str, ...]] = (
        *("keys", "public_keys", "site_keys", "sealed"),
        *("shard", "groups", "label_privacy", "local_label", "split", "readings"),
        # likewise
        *("cutoffs", "sealed_keys", "sealed_partials"),
    )


class ExtractRequest(ProposedRun, Request, frozen=True, kw_only=True):
    """Run the query's fragments."""


class LabelFacts(Body, frozen=True):
    """A label's type: categories of a text that leaves, classes of one that stays.

    ``magnitude`` is that of numbers that stay, where several shards add up their
    moments: the power of two above their root mean square.
    """

    kind: Annotated[str, f.one_of("number", "boolean", "time", "text")]
    categories: list[str] | None = None
    classes: list[str | f.Finite] | None = None
    magnitude: Annotated[int, f.between(-128, 128)] | None = None


class ExtractedPart(PartBody, frozen=True, kw_only=True):
    """A shard's join keys and label, for the rows after the fragment's filters.

    Attributes:
        pushed: the filters that its database applies, in words.
        codes: by key, the position of each row's hash; -1 for NULL.
        hashes: by key, keyed hashes of its distinct values.
        group_hashes: keyed hashes of a sub-query's groups, before its filters.
        label_values: one per row; classes are positions in the categories.
        event: whether a row's label is the time of an event, 1, or of its end, 0.
        entry: from when on a row is observed.
        strata: rows of different numbers have different baselines.
        row_hashes: hashes that name the rows in predictions.
        subset: what a value's rows are for, where whole values are held out.
        folds: which fold of a search a value's rows are in, where these are of values.
        times: where the last rows are: ranks, or values; NaN for NULL.
    """

    rows: f.TableRowCount
    keys: list[str]
    engine: str
    pushed: list[str]
    label: LabelFacts | None = None
    codes: dict[str, Annotated[AnyArray, f.nullable_positions("rows")]] = {}
    hashes: dict[str, Annotated[AnyArray, f.hash_pairs("distinct-{}")]] = {}
    group_hashes: Annotated[AnyArray, f.hash_pairs("groups")] | None = None
    label_values: Annotated[AnyArray, f.column_values("rows")] | None = None
    weight: Annotated[AnyArray, f.column_values("rows")] | None = None
    offset: Annotated[AnyArray, f.column_values("rows")] | None = None
    event: Annotated[AnyArray, f.column_values("rows")] | None = None
    entry: Annotated[AnyArray, f.column_values("rows")] | None = None
    strata: Annotated[AnyArray, f.column_values("rows")] | None = None
    row_hashes: Annotated[AnyArray, f.hash_pairs("rows")] | None = None
    subset: Annotated[AnyArray, f.subsets("rows")] | None = None
    folds: Annotated[AnyArray, f.fold_numbers("rows")] | None = None
    times: Annotated[AnyArray, f.column_values("rows")] | None = None


class ExtractReply(Reply, frozen=True):
    """The shards' join keys and labels."""

    parts: dict[int, ExtractedPart]

    discloses = (
        Discloses(
            "join keys: which rows share one, how often, and across tables",
            fields=("codes", "hashes", "keys"),
            covered_by="hashes",
            kinds=("keys",),
            when="has_joins",
        ),
        Discloses(
            "the order of every shard's rows (keys, labels and scores follow it)",
            fields=("rows",),
            kinds=("counts",),
            when="has_joins",
        ),
        Discloses(
            "how many rows of {label_table} each site has, and the names of the "
            "label's classes; no label leaves",
            fields=("rows", "label"),
            kinds=("counts",),
            when="keeps_labels",
        ),
        Discloses(
            "the power of two above the root mean square of the label in each shard of "
            "{label_table}, if it is a number",
            fields=("label",),
            kinds=("label-magnitude",),
            policy="moments",
            when="shares_scale",
        ),
        Discloses(
            "the label of every row of {label_table}",
            fields=("label", "label_values"),
            covered_by="labels",
            kinds=("labels",),
            policy="labels",
            when="has_label",
        ),
        Discloses(
            "the weight of every row of {weight}",
            fields=("weight",),
            kinds=("weights",),
            policy="weights",
            when="weight",
        ),
        Discloses(
            "the offset of every row of {label_table}",
            fields=("offset",),
            kinds=("offsets",),
            policy="weights",
            when="has_offset",
        ),
        Discloses(
            "whether the label of each row of {label_table} is the time of an event, "
            "and the row's entry and stratum, where the query names them",
            fields=("event", "entry", "strata"),
            kinds=("labels",),
            policy="labels",
            when="has_event",
        ),
        Discloses(
            "rows held out by {split_groups}",
            fields=("subset", "folds"),
            covered_by="hashes",
            kinds=("keys",),
            when="split_groups",
        ),
        Discloses(
            "{split_times} in every row",
            fields=("times",),
            kinds=("times",),
            policy="weights",
            when="split_times",
        ),
        Discloses(
            "the row key of each row of {label_table}",
            fields=("row_hashes",),
            covered_by="hashes",
            kinds=("keys",),
            when="has_row_key",
        ),
        Discloses(
            "group keys of {grouped}: which are in several shards",
            fields=("group_hashes",),
            covered_by="hashes",
            kinds=("keys",),
            when="grouped",
        ),
    )
    schedule = ("engine", "pushed")


class TableShards(Body, frozen=True):
    """The numbers of a table's shards, and the group that has the table's key."""

    group: Annotated[str, msgspec.Meta(pattern=r"^table-[0-9]{1,4}\Z")]
    numbers: Annotated[list[f.Count], msgspec.Meta(min_length=2)]


class StatisticsPart(PartBody, frozen=True, kw_only=True):
    """The encoders of a shard's features, and the rows to fit them to.

    ``shards`` are those of its table; None if it is the only one. With ``describes``
    the reply describes the features.
    """

    encoders: f.Document
    shards: TableShards | None = None
    trained: Annotated[AnyArray, f.bits("rows")] | None = None
    multiplicity: Annotated[AnyArray, f.positive_counts("trained")] | None = None
    describes: bool = False


class StatisticsRequest(Request, frozen=True):
    """Fit the encoder of a table in one shard; seal a shard's statistics."""

    parts: dict[int, StatisticsPart]

    discloses = (
        Discloses(
            "which rows of the site are joined for training, and {counted}",
            fields=("trained", "multiplicity"),
        ),
    )
    schedule = ("encoders", "shards", "describes")


class FeatureStatistics(Body, frozen=True, kw_only=True):
    """One feature's statistics; None for those that its encoder does not need.

    Attributes:
        kind: kind of its values; "" if only a declaration could tell.
        rows: joined rows, of which ``count`` have a value.
        m2: sum of squared deviations from the mean.
        tail: number of rows in categories that are too rare to leave.
    """

    name: str
    kind: str
    rows: f.TableRowCount | None = None
    count: f.TableRowCount | None = None
    width: f.Count | None = None
    mean: f.Finite | None = None
    m2: f.NonNegative | None = None
    low: f.Finite | None = None
    high: f.Finite | None = None
    tail: f.TableRowCount | None = None


class Detail(StrEnum):
    """The detail in which a table's features may be described.

    Shares are in whole percents, or in steps.
    """

    PERCENT = "percent"
    STEPS = "steps"


class StatisticsOfPart(PartBody, frozen=True, kw_only=True):
    """A shard's statistics, for each feature in the query's order.

    Categories are by the feature's position: hashes, the joined rows that have them,
    and hashes that rank those of one count. ``describes`` allows the reply to describe
    them, and how.
    """

    statistics: list[FeatureStatistics]
    category_hashes: dict[str, Annotated[AnyArray, f.hash_pairs("categories-{}")]] = {}
    category_counts: dict[str, Annotated[AnyArray, f.counts("categories-{}")]] = {}
    category_ties: dict[str, Annotated[AnyArray, f.unsigned("categories-{}")]] = {}
    describes: Detail | None = None


class ShardStatistics(Reply, frozen=True):
    """The statistics of one shard: they travel sealed, in a StatisticsReply."""

    parts: dict[int, StatisticsOfPart]


class EncodedColumns(Body, frozen=True):
    """All that leaves the sites of a table's encoder.

    Attributes:
        features: of each feature the number of encoded columns; 0 if it is constant.
        is_fitted: whether some encoder is fitted to rows, not only declared.
    """

    features: dict[f.Name, Annotated[int, f.between(0, 1 + MOST_WIDTH)]]
    is_fitted: bool

    def with_feature(self, name: str) -> "EncodedColumns":
        """Return the columns and one more, of a feature that no encoder makes."""
        return EncodedColumns({**self.features, name: 1}, self.is_fitted)

    @property
    def width(self) -> int:
        """Number of encoded columns, d."""
        return sum(self.features.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each encoded column, d in all.

        >>> EncodedColumns({"age": 1, "same": 0, "region": 2}, True).names
        ('age', 'region[0]', 'region[1]')
        """
        return tuple(
            name if count == 1 else f"{name}[{output}]"
            for name, count in self.features.items()
            for output in range(count)
        )

    @property
    def dropped(self) -> tuple[str, ...]:
        """The features without an encoded column: constant or empty."""
        return tuple(name for name, count in self.features.items() if not count)


class FeatureSummary(Body, frozen=True, kw_only=True):
    """A feature and its encoder; shares are percents of the joined training rows.

    Attributes:
        missing: share without a value, rounded up to a whole percent, or to the nearest
            2 %; ``other`` in the column of all other categories; None where the encoder
            tells neither.
        categories: how many, of at least min-count rows each; ``listed`` have a column.
        nearly_numbers: whether most texts are numbers or dates, and not all plain
            digits.
    """

    column: f.Name
    type: str
    encoder: str
    missing: f.Percent | None = None
    categories: f.Count | None = None
    listed: f.Count | None = None
    other: f.Percent | None = None
    nearly_numbers: bool = False


class FittedPart(PartBody, frozen=True, kw_only=True):
    """A table's encoder, or a shard's statistics, which only its shards can open."""

    columns: EncodedColumns | None = None
    features: list[FeatureSummary] = []
    sealed: SealedText | None = None


_COLUMNS = Discloses(
    "each feature's number of encoded columns (0 if it is constant)",
    fields=("columns",),
    kinds=("counts",),
)
_FEATURES = Discloses(
    "a summary of each feature of tables without a budget, unless its encoder was "
    "declared: the kind of value; the share of missing values and of categories in "
    "(other), in steps of 2 % and of at least 500 rows, unless min-rows is 1; how "
    "many categories there are; and whether most texts are numbers or dates",
    fields=("features",),
    kinds=("features",),
    policy="statistics",
    when="describes",
)
_KINDS = Discloses(
    "to the other shards of {sharded}, per feature: the kind of value, and the length "
    "of vectors",
    fields=("sealed",),
    covered_by="shards",
    when="sharded",
    reader=f.SITES,
)
_STATISTICS = _KINDS._replace(
    carries="to the other shards of {fitted}, per feature, unless its encoder was "
    "declared: count, mean, deviation of the joined rows; range if it needs one; how "
    "many have each category or whole number, rare ones aside (min-count)",
    kinds=("statistics",),
    policy="statistics",
    when="fitted",
)


class StatisticsReply(Reply, frozen=True):
    """The columns of encoders, and the sealed statistics of shards."""

    parts: dict[int, FittedPart]

    discloses = (_COLUMNS, _FEATURES, _KINDS, _STATISTICS)


class OtherShard(Body, frozen=True):
    """The site of a shard of the table, and the joined rows that its rows are in."""

    site: f.Name
    rows: f.TableRowCount


class FitPart(PartBody, frozen=True, kw_only=True):
    """The shards of a table, by number, and their sealed statistics."""

    shards: dict[Number, OtherShard]
    statistics: dict[str, Annotated[AnyArray, f.sealed("sealed-{}")]] = {}


class FitRequest(Request, frozen=True):
    """As a sharded table's leading shard: fit the encoder, seal it for the others."""

    parts: dict[int, FitPart]

    discloses = (
        Discloses(
            "to the first shard of {sharded}: how many joined rows the others' are in",
            fields=("shards",),
        ),
    )
    # the message in which the statistics were sealed discloses them
    schedule = ("statistics",)


class FitReply(Reply, frozen=True):
    """The encoders of sharded tables, sealed for their shards."""

    parts: dict[int, FittedPart]

    discloses = (
        _COLUMNS,
        _FEATURES,
        _KINDS._replace(
            carries="to the other shards of {sharded}: the encoder of what they told"
        ),
    )
