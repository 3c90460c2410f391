"""The rules about what may leave a table, and how, which its owner sets for all runs.

A policy is part of the site's tables file (docs/reference/policies.md), and is checked
at the site, on requests as they arrive. A refusal names the rule, what was requested
and what is allowed; it quotes no value, and does not distinguish a hidden column from
one that does not exist.

The kinds of releases and their levels:

=========== ==========================================================================
release      levels, each allowing all before it
=========== ==========================================================================
labels       never, private (noise on each label), clear
weights      never, clear (values by which a query weights joined rows, or that it adds
             to their scores: its offset)
models       never, private (DP-SGD or noisy statistics), sealed (sums that the table's
             shards alone read; the default of a policy without a budget), clear
scores       never, private (noise on each row's scores), masked (the server reads their
             sums over joined rows; the default of a policy without a budget), clear
rows         never, clear (encoded features of the rows that a run has drawn); never
             by default
moments      never, clear (sums over the joined rows of the products of two columns, the
             label among them); never by default
regressions  never, clear (the same sums, which the site of the label's table reads in
             place of the server, and from which it makes the models of all tables, and
             tells the server how well these do); never by default
factors      never, clear (in predictions, the numbers of each row's key that a model
             multiplies with another table's); never by default
covariance   never, clear (for standard errors, sums as of moments, in which the server
             chooses how much each joined row weighs); never by default
categories   never, clear (beside coefficients, the texts of categories that have
             ``min_count`` rows, and the ends of bins where that is 1); never by default
inspection   never, clear (to evaluate, scores and labels of the joined rows, to the
             sites of all their tables, which reply how much features and groups of rows
             matter to them); never by default
cutoffs      never, partner (the keys and cutoffs of the rows, sealed for the sites of a
             LATERAL sub-query: keyed hashes, and the cutoffs as they are); never by
             default
partials     never, partner (what the rows of each key add to the answers of a LATERAL
             sub-query, sealed for the sites of the table's other shards that have rows
             of it); never by default
statistics   to the table's other shards: never (encoders that need none, such as
             declared ranges, are left), moments (counts, means and deviations of
             columns, and how many rows each category has), clear (also ranges,
             whose ends are values of single rows)
regions      to the server and the other tables' sites: the number of regions that rows
             may be told apart by, the leaves of one tree on their features; 0 by
             default
=========== ==========================================================================

Besides, ``bins`` says into how many bins at most each encoded column may be divided,
whose numbers leave for every row: 0 for none, which is the default.

The rules bound what is asked, not what two allowed answers tell together: noise does.
"""

import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from tp_flower.arrays import MOST_BINS
from tp_flower.errors import PolicyError, SourceError, join_problems
from tp_flower.features.choice import render_entries
from tp_flower.features.ranks import LEAST_RANK
from tp_flower.features.spec import DECLARED_ENCODERS, EncoderSpec, Need
from tp_flower.query.fragment import NUMBERS, SURVIVAL, Role
from tp_flower.query.reads import Read
from tp_flower.sources.entries import Count, Flag, Text, Texts, WholeNumber

NEVER = "never"
PRIVATE = "private"
MOMENTS = "moments"
CLEAR = "clear"
MASKED = "masked"
SEALED = "sealed"
PARTNER = "partner"
LABELS = "labels"
STATISTICS = "statistics"
MODELS = "models"
SCORES = "scores"
WEIGHTS = "weights"
ROWS = "rows"
FACTORS = "factors"
COVARIANCE = "covariance"
CATEGORIES = "categories"
CUTOFFS = "cutoffs"
PARTIALS = "partials"
INSPECTION = "inspection"
SECOND_MOMENTS = "moments"
REGRESSIONS = "regressions"
BINS = "bins"

LEVELS: Final = {
    LABELS: (NEVER, PRIVATE, CLEAR),
    STATISTICS: (NEVER, MOMENTS, CLEAR),
    MODELS: (NEVER, PRIVATE, SEALED, CLEAR),
    SCORES: (NEVER, PRIVATE, MASKED, CLEAR),
    WEIGHTS: (NEVER, CLEAR),
    ROWS: (NEVER, CLEAR),
    SECOND_MOMENTS: (NEVER, PRIVATE, CLEAR),
    REGRESSIONS: (NEVER, CLEAR),
    FACTORS: (NEVER, CLEAR),
    COVARIANCE: (NEVER, CLEAR),
    CATEGORIES: (NEVER, CLEAR),
    CUTOFFS: (NEVER, PARTNER),
    PARTIALS: (NEVER, PARTNER),
    INSPECTION: (NEVER, CLEAR),
}
"""By kind of release, its levels, the strictest first."""
REGIONS: Final = "regions"
MOST_REGIONS: Final = 32
"""A release by number, and the largest: of five bits."""

DEFAULT_DELTA: Final = 1e-5
_ABOVE_OR_0: Final = Meta(
    ge=0, le=sys.float_info.max, description='a number of at least 0, or "any"'
)
_AT_LEAST_0: Final = Meta(
    ge=0, le=sys.float_info.max, description="a number of at least 0"
)
_ABOVE_0: Final = Meta(gt=0, le=sys.float_info.max, description="a number above 0")
_SHARE: Final = Meta(ge=0, le=1, description="a share from 0 to 1")
BIN_COUNTS: Final = Meta(ge=0, le=MOST_BINS, description="a whole number from 0 to 255")
_BELOW_1: Final = Meta(gt=0, lt=1, description="a number between 0 and 1")
_MOMENT_NEEDS: Final = frozenset({Need.MOMENTS, Need.CATEGORIES})
_HOW: Final = {
    LABELS: "privacy.labels",
    MODELS: "privacy.features",
    SCORES: "privacy.predictions",
    SECOND_MOMENTS: "privacy.features",
}


@dataclass(frozen=True)
class Releases:
    """The level of each kind of release.

    A weight is a value of a row that leaves in the clear, as a label may: where nothing
    is said of weights, they may leave if such labels may. So is an offset, by the same
    rule: either tells what it reads.

    Attributes:
        bins: of a column, at most, whose numbers may leave; None for as many as a run
            asks for by their number.
    """

    labels: str = CLEAR
    statistics: str = CLEAR
    models: str = CLEAR
    scores: str = CLEAR
    weights: str = ""
    rows: str = NEVER
    moments: str = CLEAR
    regressions: str = CLEAR
    regions: int = MOST_REGIONS
    factors: str = CLEAR
    covariance: str = CLEAR
    categories: str = CLEAR
    cutoffs: str = NEVER
    partials: str = NEVER
    inspection: str = NEVER
    bins: Annotated[int, BIN_COUNTS] | None = None

    @property
    def named_bins(self) -> int:
        """The bins of a column that a policy names, which a run need not ask for."""
        return self.bins or 0

    def level(self, kind: str) -> str:
        """Return the level of one kind of release."""
        if kind == WEIGHTS and not self.weights:
            return CLEAR if self.labels == CLEAR else NEVER
        return str(getattr(self, kind))


@dataclass(frozen=True)
class Policy:
    """The rules of one shard; docs/reference/policies.md says what each is for.

    The default allows all but rows, cutoffs, partials and inspections. Columns are
    compared without case. A list that is None sets no rule. Of a policy in a tables
    file, ``STRICT`` has the rules that it does not mention.

    Attributes:
        columns: what features may read, and every other piece without a list of its
            own. If given, columns in no list do not exist for the server.
        keys: what join keys and groups may read, which must then be plain columns: the
            keyed hashes of a condition would reveal which rows meet it.
        min_cell: the rows or events of a cell that a description shows, at least; as
            many as a category needs by ``min_count``, if that is more.
        scores_per_rank: how many score vectors without noise leave of a table's rows,
            over all runs, in parts of the rows' effective rank
            (:mod:`tp_flower.features.ranks`); None for any number.
        cover: how many other tables of a query must vary enough to hide the scores in.
        sees_regions: whether scores of its rows may depend on regions of another
            table's rows: a row has a score for each.
        min_rows_per_parameter: of a linear model whose coefficients leave, and of the
            columns of second moments; 0 for any number.
        most_parameters: of a model, or leaves of a round's trees; None for any size.
        privacy_unit: () if each row counts.
        rows_per_unit: how many rows of a unit take part, always the same ones.
        epsilon: of all that leaves with noise; None for no budget. It bounds what is
            told of features only if they leave with noise alone, scores too.
        budget_name: "" to use the location of the rows; with ``ACCOUNT_PREFIX`` an
            account that the ledger has.
        approved_runs: digests of proposals; None if no run needs an approval.
        partners: the sites that may take part in a run besides the table's own, by the
            names that its owner has given their keys; None for all whose keys are
            pinned.
    """

    columns: Texts | None = None
    labels: Texts | None = None
    weights: Texts | None = None
    filters: Texts | None = None
    keys: Texts | None = None
    join_only: Texts = ()
    expressions: Flag = True
    min_rows: Count = 1
    min_count: Count = 1
    min_cell: Count = 1
    scores_per_rank: Annotated[float, _ABOVE_OR_0] | Literal["any"] | None = None
    cover: WholeNumber = 0
    sees_regions: Flag = True
    models: Texts | None = None
    min_rows_per_parameter: Annotated[float, _AT_LEAST_0] = 0.0
    most_parameters: Count | None = None
    releases: Releases = field(default_factory=Releases)
    privacy_unit: Texts = ()
    rows_per_unit: Count = 1
    epsilon: Annotated[float, _ABOVE_0] | None = None
    epsilon_per_run: Annotated[float, _ABOVE_0] | None = None
    delta: Annotated[float, _BELOW_1] = DEFAULT_DELTA
    budget_name: Text = ""
    coefficients: Flag = False
    most_unmatched: Annotated[float, _SHARE] = 1.0
    approved_runs: Texts | None = None
    partners: Texts | None = None
    queries_per_day: Count | None = None
    query_seconds: Count | None = None

    @property
    def is_open(self) -> bool:
        """Whether its owner consents to all but these releases."""
        return self == Policy()

    @property
    def per(self) -> str:
        """Whose an epsilon is: the columns of the unit, or "row"."""
        return ", ".join(self.privacy_unit) or "row"

    @property
    def digest(self) -> str:
        """The SHA-256 of all rules, which names the policy in the ledger."""
        return sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()

    @property
    def named(self) -> tuple[str, ...]:
        """Every column that some rule names."""
        lists = (*self._lists, self.join_only)
        return tuple(dict.fromkeys(name for names in lists for name in names or ()))

    @property
    def is_about_columns(self) -> bool:
        """Whether some rule (an empty list counts) restricts the columns to read."""
        has_list = any(names is not None for names in self._lists)
        return has_list or bool(self.join_only) or not self.expressions

    @property
    def _lists(self) -> tuple[tuple[str, ...] | None, ...]:
        return (self.columns, self.labels, self.weights, self.filters, self.keys)

    def visible(self, columns: Iterable[str]) -> list[str]:
        """Return the table's columns that the server may see, in order."""
        is_open = self.columns is None
        return [name for name in columns if is_open or has_name(self.named, name)]

    def unlisted(self, columns: Collection[str]) -> list[str]:
        """Return the columns that features may not read, in order."""
        listed = columns if self.columns is None else self.columns
        return [
            n for n in columns if has_name(self.join_only, n) or not has_name(listed, n)
        ]

    def check_names(self, columns: Collection[str]) -> None:
        """Refuse a rule about a missing column, because it would protect nothing."""
        for name in (*self.named, *self.privacy_unit):
            if not has_name(columns, name):
                raise SourceError(f"its policy names an unknown column {name!r}")

    def check_read(self, read: Read) -> None:
        """Raise PolicyError if a piece of a query reads forbidden columns."""
        reading = f"{read.element} reads column {read.column!r}"
        is_key = read.role in (Role.KEY, Role.GROUP)
        if not self.expressions and not read.is_bare:
            allowed_form = "columns may be read as they are, without CAST"
            raise _refusal("expressions", f"{reading} in an expression", allowed_form)
        if has_name(self.join_only, read.column):
            if is_key and not read.is_plain:
                raise _refusal("join-only", f"{reading} in an expression", _PLAIN)
            if not is_key and read.role is not Role.INNER:
                raise _refusal("join-only", reading, "it may only be a join key")
            return
        rule, allowed = self._allowed(read.role)
        if allowed is not None and not has_name(allowed, read.column):
            columns = ", ".join(allowed) or "no column"
            raise _refusal(rule, reading, f"it may read {columns}")
        if is_key and self.keys is not None and not read.is_plain:
            raise _refusal("keys", f"{reading} in an expression", _PLAIN)

    def check_reads(self, reads: Iterable[Read]) -> None:
        """Raise PolicyError that says of each piece what it may not read."""
        refusals = []
        for read in reads:
            try:
                self.check_read(read)
            except PolicyError as error:
                refusals.append(str(error))
        if refusals:
            raise PolicyError(join_problems(refusals))

    def check_told(self, read: Read, purpose: str) -> None:
        """Raise PolicyError for a join key that leaves as it is, and not as a hash."""
        if has_name(self.join_only, read.column):
            raise _refusal(
                "join-only",
                f"{purpose} reads column {read.column!r}",
                "it leaves as a keyed hash, and only so",
            )

    def _allowed(self, role: Role) -> tuple[str, tuple[str, ...] | None]:
        """Return a role's rule, and the columns that it allows besides join_only."""
        if role is Role.INNER:
            return "columns", None if self.columns is None else self.named
        label_rule = ("labels", self.labels)
        number_rule = label_rule if self.weights is None else ("weights", self.weights)
        specific = {
            Role.LABEL: label_rule,
            **dict.fromkeys(NUMBERS, number_rule),
            **dict.fromkeys(SURVIVAL, label_rule),
            Role.FILTER: ("filters", self.filters),
            Role.HAVING: ("filters", self.filters),
            Role.QUALIFY: ("filters", self.filters),
            Role.KEY: ("keys", self.keys),
            Role.GROUP: ("keys", self.keys),
        }.get(role)
        if specific is not None and specific[1] is not None:
            return specific
        return "columns", self.columns

    @property
    def most_scores(self) -> float | None:
        """How many score vectors may leave, as a multiple of the effective rank.

        None allows any number.
        """
        if isinstance(self.scores_per_rank, str):
            return None
        return self.scores_per_rank

    @property
    def asks_ranks(self) -> bool:
        """Whether the variation of rows, of this table or of others, limits scores."""
        return self.most_scores is not None or self.cover > 0

    def check_cover(self, table: str, covering: int) -> None:
        """Refuse scores of a table that too few other tables of the query hide."""
        if covering < self.cover:
            raise _refusal(
                f"cover = {self.cover}",
                f"the run asks for scores of table {table!r}, and {covering} tables "
                "of other sites have stated to this one that they vary in "
                f"{LEAST_RANK} directions or more",
                "the scores of a joined row are added up, and hide in each other's "
                "sum: join more tables with features; the owner may lower 'cover'",
            )

    def check_model(self, kind: str) -> None:
        """Raise PolicyError for a kind of model that is not allowed."""
        if self.models is not None and kind not in self.models:
            allowed = f"allowed: {', '.join(self.models) or 'none'}"
            raise _refusal("models", f"the run asks for a model {kind!r}", allowed)

    def check_size(self, size: int, unit: str, smaller: str) -> None:
        """Refuse a model of more parameters, or ``unit``, than ``most_parameters``."""
        if self.most_parameters is not None and size > self.most_parameters:
            raise _refusal(
                f"most-parameters = {self.most_parameters}",
                f"the run asks for a model of {size} {unit}",
                f"it may have so many: set {smaller}",
            )

    def check_freedom(self, parameters: int, rows: int) -> None:
        """Refuse to show a linear model of so many parameters, fitted to so few rows.

        With a parameter for each row, a model's coefficients are its rows' labels. As
        of other minima, no message contains ``rows``.
        """
        if rows < self.min_rows_per_parameter * parameters:
            raise _refusal(
                f"min-rows-per-parameter = {self.min_rows_per_parameter:g}",
                f"the run would show {parameters} parameters of a linear model of too "
                "few rows",
                "each needs so many: use encoders of fewer columns, or fewer features",
            )

    def check_approved(self, digest: str) -> None:
        """Refuse a run that the owner has not approved, by its proposal's digest."""
        if self.approved_runs is not None and digest not in self.approved_runs:
            raise _refusal(
                "approved-runs",
                f"the run {digest} is not approved",
                "its owner reads what it asks for, and approves it, by `tp-flower "
                "approve`; the ledger of the site has it, and proposal.json of the run",
            )

    def check_partner(self, name: str) -> None:
        """Refuse a run in which a site takes part that the owner has not named."""
        if self.partners is not None and name not in self.partners:
            raise _refusal(
                "partners",
                f"site {name!r} takes part in the run",
                f"its owner allows {', '.join(self.partners) or 'no other site'}",
            )

    def check_pinned(self, *, is_pinned: bool) -> None:
        """Refuse partners of whose keys nobody knows whose they are."""
        if self.partners is not None and not is_pinned:
            raise _refusal(
                "partners",
                "this site does not pin the keys of others, and cannot tell who they "
                "are",
                'its owner writes allowed-keys = "FILE" into the node config, with a '
                "line for each partner: its name and its public key (`tp-flower "
                "site-key` prints a site's)",
            )

    def check_rows(self, rows: int, purpose: str) -> None:
        """Raise PolicyError for a result from too few rows.

        0 rows are as few as 1: an empty group is a fact about everybody. Callers let
        pass what reveals nothing new. No message contains ``rows``.
        """
        # a minimum of 1 allows an empty shard, which has no row to protect
        if rows < self.min_rows and self.min_rows > 1:
            raise _refusal(
                "min-rows",
                f"{purpose} would be of too few rows",
                f"at least {self.min_rows} are needed",
            )

    def check_bins(self, bins: int) -> None:
        """Refuse to show rows by more bins of a column than may be told apart."""
        most = self.releases.bins
        if most is None or bins <= most:
            return
        allowed = f"at most {most} of a column may leave" if most else "none may leave"
        raise _refusal(
            f"releases.{BINS} = {most}",
            f"the run asks for the bin numbers of each row, of {bins} bins a column",
            f'{allowed}: set bins = "auto" to take what each policy names, or "none"',
        )

    def check_unmatched(self, rows: int, of: int) -> None:
        """Refuse scores without a mask of more rows than may be without a partner."""
        if rows > self.most_unmatched * of:
            raise _refusal(
                f"most-unmatched = {self.most_unmatched:g}",
                f"{rows} of {of} rows are said to have no partner in a LEFT JOIN, and "
                "their scores would leave without its mask",
                "it is a share of the rows",
            )

    def check_cutoffs(self) -> None:
        """Refuse to seal keys and cutoffs of the table's rows for another site."""
        if not self.lets_leave(CUTOFFS):
            raise _refusal(
                f"releases.{CUTOFFS} = {NEVER}",
                "the run asks for the keys and cutoffs of the table's rows, for the "
                "site of a LATERAL sub-query",
                "none may leave the site; set cutoff-grid in place of sealed-cutoffs",
            )

    def check_partials(self) -> None:
        """Refuse to seal keys and partial answers for the table's other shards."""
        if not self.lets_leave(PARTIALS):
            raise _refusal(
                f"releases.{PARTIALS} = {NEVER}",
                "the run asks for what the table's rows add to a LATERAL sub-query's "
                "answers, key by key, for the table's other shards",
                "none may leave the site; set sealed-partials = false, and have all "
                "rows of a key in one shard",
            )
        self.check_rows(1, "a partial answer of one key and cutoff")

    def check_unlabelled(self, reads: Iterable[Read]) -> None:
        """Refuse to tell values of columns that are labels with noise elsewhere."""
        for read in reads:
            if has_name(self.labels or (), read.column):
                raise _refusal(
                    "labels",
                    f"{read.element} reads column {read.column!r}",
                    "labels leave with noise in this run",
                )

    def check_seen_regions(self) -> None:
        """Refuse scores that depend on regions of another table's rows."""
        if not self.sees_regions:
            raise _refusal(
                "sees-regions",
                "the run asks for scores by the region of another table's row",
                "each row has one score; set regions = 'none'",
            )

    def check_regions(self) -> None:
        """Refuse to tell in which regions the table's rows are."""
        if not self.releases.regions:
            raise _refusal(
                f"releases.{REGIONS} = 0",
                "the run asks for the regions of the table's rows",
                "none may leave the site; set regions = 'none', or name another table",
            )

    def check_statistics(
        self, table: str, feature: str, kind: str, spec: EncoderSpec
    ) -> None:
        """Refuse an encoder that is fitted to finer statistics than may leave.

        The statistics of any such encoder include the number of missing values. With a
        budget the rule holds for a table in one shard, too, of which none leave: noise
        covers what rows do given the encoder, and not what they do through it.
        """
        level = self.releases.statistics
        needs = spec.needs_of(kind)
        finer = (
            needs - {NEVER: frozenset(), MOMENTS: _MOMENT_NEEDS, CLEAR: needs}[level]
        )
        if not finer:
            return
        if level == MOMENTS:
            allowed = "counts, means, deviations and categories may leave"
        else:
            allowed = "none may leave the site"
        raise _refusal(
            f"releases.{STATISTICS} = {level}",
            f"encoder {spec} of {table}.{feature} is fitted to "
            f"{' and '.join(sorted(finer))}",
            f"{allowed}; set encoders = "
            f"'{render_entries([(table, feature, '<encoder>')])}' with one that needs "
            f"no statistics: {DECLARED_ENCODERS[kind]}",
        )

    def lets_leave(self, kind: str) -> bool:
        """Whether releases of a kind may leave as they are, without noise or mask."""
        return self.releases.level(kind) in (MOMENTS, CLEAR, PARTNER)

    def check_release(
        self, kind: str, *, is_private: bool, is_masked: bool = False
    ) -> None:
        """Refuse a kind of release that may not leave, or not without noise or mask.

        ``is_masked`` says that the server cannot read it: masked scores, sealed sums.
        """
        level = self.releases.level(kind)
        if self.lets_leave(kind) or (level != NEVER and is_private):
            return
        if level in (MASKED, SEALED) and is_masked:
            return
        allowed = {
            NEVER: "none may leave the site",
            PRIVATE: f"they may leave with noise only (run config {_HOW.get(kind)})",
            MASKED: "they may leave masked only (run config privacy.scores), and a "
            "table that is not joined has nothing to mask them with",
            SEALED: "its shards may send sealed sums only (run config "
            "privacy.unions), which the strategies that the server or single sites "
            "solve do not have: use admm or sgd",
        }[level]
        rule = f"releases.{kind} = {level}"
        request = f"the run asks for {kind}"
        raise _refusal(rule, request, allowed)


ANY: Final = "any"  # as partners: all sites whose keys are pinned
OPEN: Final = "open"  # all but rows, cutoffs, partials and inspections
SIMULATED: Final = Policy(
    releases=Releases(rows=CLEAR, cutoffs=PARTNER, partials=PARTNER, inspection=CLEAR),
    coefficients=True,
)
"""The policy of tables that whoever runs the server has, too."""
WATCHED: Final = replace(SIMULATED, coefficients=False)
"""That of a Grid whose messages a program watches: as real sites, coefficients stay."""
STRICT: Final[Mapping[str, object]] = {
    "columns": (),
    "labels": (),
    "filters": (),
    "keys": (),
    "expressions": False,
    "min-rows": 50,
    "min-count": 10,
    "scores-per-rank": 0.5,
    "cover": 1,
    "sees-regions": False,
    "models": ("linear", "mlp"),
    "most-parameters": 1_000_000,
    "most-unmatched": 0.0,
    "queries-per-day": 100,
    "query-seconds": 600,
}
"""The rules of a policy that does not mention them; for releases, see ``Releases``."""
UNBUDGETED: Final = Releases(
    models=SEALED,
    scores=MASKED,
    moments=NEVER,
    regressions=NEVER,
    regions=0,
    factors=NEVER,
    bins=0,
    covariance=NEVER,
    categories=NEVER,
)
BUDGETED: Final = Releases(
    labels=PRIVATE,
    statistics=NEVER,
    models=PRIVATE,
    scores=PRIVATE,
    moments=PRIVATE,
    regressions=NEVER,
    regions=0,
    factors=NEVER,
    covariance=NEVER,
    categories=NEVER,
    bins=0,
)
"""What a policy without, and with, an ``epsilon`` lets leave if it does not say."""
MISSING: Final = Policy(
    columns=(),
    labels=(),
    releases=Releases(
        NEVER,
        NEVER,
        NEVER,
        NEVER,
        moments=NEVER,
        regressions=NEVER,
        regions=0,
        factors=NEVER,
        bins=0,
        covariance=NEVER,
        categories=NEVER,
    ),
    sees_regions=False,
)
"""The policy of a table that has none."""
ACCOUNT_PREFIX: Final = "account:"
ACCOUNT_DIGITS: Final = 32
RUNS_PER_BUDGET: Final = 4  # at least, to spend it, where the policy has no limit
_PLAIN: Final = "the column itself may be joined on and grouped by"


def has_name(names: Iterable[str], name: str) -> bool:
    """Return whether a column is among some names, in whatever case."""
    return name.lower() in {other.lower() for other in names}


def _refusal(rule: str, request: str, allowed: str) -> PolicyError:
    return PolicyError(f"the table's policy ({rule}) refuses: {request}; {allowed}")
