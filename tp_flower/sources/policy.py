"""What may leave a table, and how: the rules that its owner sets for every run.

A policy stands in the site's tables file (``tp_flower/sources/policy.py`` reads
it) and is checked at the site, on what came over the wire. No setting of a run weakens
it. A refusal names the rule, what was asked and what is allowed; it quotes no value,
and says the same of a column that the policy hides as of one that does not exist.

What the rules are about, from what tells least to what tells most:

=========== ==========================================================================
release      levels, each allowing all before it
=========== ==========================================================================
labels       never, private (noise on each label), clear
weights      never, clear (of the rows that a query weighs joined rows by)
models       never, private (DP-SGD or noisy statistics), clear
scores       never, private (noise on each row's scores), clear
rows         never, clear (encoded features of the rows that a run has drawn); what
             is not said is never
statistics   never (encoders that need none, such as declared ranges, are left), moments
             (counts, means and deviations of columns, and how many rows each category
             has), clear (also ranges and quantiles, which are values of single rows)
=========== ==========================================================================

Columns and numbers of rows keep an honest server from asking for too much, and a
dishonest one from asking for a row by name. They are no bound on what it can work out:
two allowed answers over rows that differ in one tell of that one. Noise is the bound,
and ``epsilon`` says how much, over all runs.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final

from tp_flower.errors import PolicyError, SourceError
from tp_flower.features.choice import render_entries
from tp_flower.features.spec import EncoderSpec, Need, declared_encoders
from tp_flower.query.reads import Read, Role
from tp_flower.sources import entries

NEVER, PRIVATE, MOMENTS, CLEAR = "never", "private", "moments", "clear"
LABELS, STATISTICS, MODELS, SCORES = "labels", "statistics", "models", "scores"
WEIGHTS, ROWS = "weights", "rows"

LEVELS: Final = {
    LABELS: (NEVER, PRIVATE, CLEAR),
    STATISTICS: (NEVER, MOMENTS, CLEAR),
    MODELS: (NEVER, PRIVATE, CLEAR),
    SCORES: (NEVER, PRIVATE, CLEAR),
    WEIGHTS: (NEVER, CLEAR),
    ROWS: (NEVER, CLEAR),
}
"""Per kind of release its levels, the strictest first."""

DEFAULT_DELTA: Final = 1e-5
_OF_MOMENTS: Final = frozenset({Need.MOMENTS, Need.CATEGORIES})
_HOW: Final = {
    LABELS: "privacy.labels",
    MODELS: "privacy.features",
    SCORES: "privacy.predictions",
}


@dataclass(frozen=True)
class Releases:
    """The level of each kind of release.

    A weight is a value of a row that leaves as it is, as a label in the clear does:
    where nothing is said of weights, they may leave if such labels may. Rows leave
    where their owner says so, and nowhere else.
    """

    labels: str = CLEAR
    statistics: str = CLEAR
    models: str = CLEAR
    scores: str = CLEAR
    weights: str = ""
    rows: str = NEVER

    @classmethod
    def within_budget(cls) -> "Releases":
        """Return what holds of a table with a budget where its owner says nothing."""
        return cls(labels=PRIVATE, statistics=NEVER, models=PRIVATE, scores=PRIVATE)

    def level(self, kind: str) -> str:
        """Return the level of one kind of release."""
        if kind == WEIGHTS and not self.weights:
            return CLEAR if self.labels == CLEAR else NEVER
        return str(getattr(self, kind))


@dataclass(frozen=True)
class Policy:
    """The rules of one shard; the default allows everything.

    Columns are compared without case. A list that is None is no rule.

    Attributes:
        columns: what features may read, and every other piece that has no list of its
            own. Where it is given, columns in no list do not exist for the server.
        labels: what the label may read; also columns that nothing else may.
        weights: likewise of the weight; what labels may read, where it is not given.
        filters: likewise of WHERE and HAVING. The server sees which rows pass a filter.
        keys: likewise of join keys and groups, which must be plain columns then: of a
            condition on a column the keyed hashes tell who meets it.
        join_only: columns that leave as keyed hashes and are read for nothing else.
        expressions: whether pieces may be more than the column itself. Whether an
            expression fails on some value is an answer, which no noise covers.
        min_rows: a fragment, statistic or training on fewer rows is refused.
        releases: which may leave, and how.
        epsilon: of all runs ever, for each row; None for no budget.
        delta: likewise.
        budget_name: names the rows in the ledger; "" for the place they are at.
        coefficients: whether those of a linear model may leave when its run ends.
    """

    columns: tuple[str, ...] | None = None
    labels: tuple[str, ...] | None = None
    weights: tuple[str, ...] | None = None
    filters: tuple[str, ...] | None = None
    keys: tuple[str, ...] | None = None
    join_only: tuple[str, ...] = ()
    expressions: bool = True
    min_rows: int = 1
    releases: Releases = field(default_factory=Releases)
    epsilon: float | None = None
    delta: float = DEFAULT_DELTA
    budget_name: str = ""
    coefficients: bool = False

    @property
    def named(self) -> tuple[str, ...]:
        """Every column that some rule names."""
        lists = (*self._lists, self.join_only)
        return tuple(dict.fromkeys(name for names in lists for name in names or ()))

    @property
    def is_about_columns(self) -> bool:
        """Whether some rule restricts what may be read; an empty list does."""
        has_list = any(names is not None for names in self._lists)
        return has_list or bool(self.join_only) or not self.expressions

    @property
    def _lists(self) -> tuple[tuple[str, ...] | None, ...]:
        return (self.columns, self.labels, self.weights, self.filters, self.keys)

    def visible(self, columns: Iterable[str]) -> list[str]:
        """Return those of a table's columns that exist for the server, in order."""
        is_open = self.columns is None
        return [name for name in columns if is_open or _has(self.named, name)]

    def check_names(self, columns: Collection[str]) -> None:
        """Refuse to work with a rule about a column that the table does not have.

        Such a rule protects nothing, which its owner believes it does.

        Raises:
            SourceError: names the column; the others are not the server's to know.
        """
        for name in self.named:
            if not _has(columns, name):
                raise SourceError(f"its policy names column {name!r}: there is none")

    def check_read(self, read: Read) -> None:
        """Refuse a piece of a query that reads what it may not.

        Raises:
            PolicyError: names the rule, the piece and the column.
        """
        asked = f"{read.what} reads column {read.column!r}"
        is_key = read.role in (Role.KEY, Role.GROUP)
        if not self.expressions and not read.is_bare:
            allowed_form = "columns may be read as they are, without CAST"
            raise _refused("expressions", f"{asked} in an expression", allowed_form)
        if _has(self.join_only, read.column):
            if is_key and not read.is_plain:
                raise _refused("join-only", f"{asked} in an expression", _PLAIN)
            if not is_key and read.role is not Role.INNER:
                raise _refused("join-only", asked, "it may be joined on, as it is")
            return
        rule, allowed = self._allowed(read.role)
        if allowed is not None and not _has(allowed, read.column):
            shown = ", ".join(allowed) or "no column"
            raise _refused(rule, asked, f"it may read {shown}")
        if is_key and self.keys is not None and not read.is_plain:
            raise _refused("keys", f"{asked} in an expression", _PLAIN)

    def _allowed(self, role: Role) -> tuple[str, tuple[str, ...] | None]:
        """The rule for a role, and the columns that it allows beside join_only."""
        if role is Role.INNER:
            return "columns", None if self.columns is None else self.named
        of_labels, of_weights = ("labels", self.labels), ("weights", self.weights)
        own = {
            Role.LABEL: of_labels,
            Role.WEIGHT: of_labels if self.weights is None else of_weights,
            Role.FILTER: ("filters", self.filters),
            Role.KEY: ("keys", self.keys),
            Role.GROUP: ("keys", self.keys),
        }.get(role)
        if own is not None and own[1] is not None:
            return own
        return "columns", self.columns

    def check_rows(self, rows: int, what: str) -> None:
        """Refuse what would be computed from too few rows.

        Args:
            rows: how many; 0 is as few as 1: that nobody is in a group says something
                of everybody. Callers let pass what tells nothing that is not known.
            what: that is computed, for the message, which does not tell ``rows``.

        Raises:
            PolicyError: there are fewer than ``min_rows``.
        """
        # 1 is no rule: an empty shard is none's
        if rows < self.min_rows and self.min_rows > 1:
            raise _refused(
                "min-rows",
                f"{what} would be of too few rows",
                f"at least {self.min_rows} are needed",
            )

    def check_statistics(
        self, table: str, feature: str, kind: str, spec: EncoderSpec
    ) -> None:
        """Refuse an encoder that is fitted to finer statistics than may leave.

        How many values are missing leaves with the statistics of every such encoder.

        Args:
            table: alias in the query, as the setting ``encoders`` names it.
            feature: likewise.
            kind: of value.
            spec: of the encoder, in full.

        Raises:
            PolicyError: the encoder needs more; says which encoders need none.
        """
        level, needs = self.releases.statistics, spec.needs_of(kind)
        finer = needs - {NEVER: frozenset(), MOMENTS: _OF_MOMENTS, CLEAR: needs}[level]
        if not finer:
            return
        allowed = (
            "counts, means, deviations and categories may leave"
            if level == MOMENTS
            else "none may leave the site"
        )
        raise _refused(
            f"releases.{STATISTICS} = {level}",
            f"encoder {spec} of {table}.{feature} is fitted to "
            f"{' and '.join(sorted(finer))}",
            f"{allowed}; set encoders = "
            f"'{render_entries([(table, feature, '<encoder>')])}' with one that needs "
            f"no statistics: {declared_encoders(kind)}",
        )

    def check_release(self, kind: str, *, is_private: bool) -> None:
        """Refuse a kind of release that may not leave, or not without noise.

        Args:
            kind: a key of ``LEVELS``.
            is_private: whether the run's privacy settings put noise on it.

        Raises:
            PolicyError: it may not.
        """
        level = self.releases.level(kind)
        is_refused = level == NEVER or (level == PRIVATE and not is_private)
        if is_refused:
            raise _level_refused(kind, f"the run asks for {kind}", level)


OPEN: Final = Policy(releases=Releases(rows=CLEAR))
"""Of tables that whoever runs the server has, too."""

_PLAIN: Final = "the column itself may be joined on and grouped by"


def _has(names: Iterable[str], name: str) -> bool:
    return name.lower() in {other.lower() for other in names}


def _refused(rule: str, asked: str, allowed: str) -> PolicyError:
    return PolicyError(f"the table's policy ({rule}) refuses: {asked}; {allowed}")


def _level_refused(kind: str, asked: str, level: str) -> PolicyError:
    if level == NEVER:
        allowed = "none may leave the site"
    else:
        allowed = f"they may leave with noise only (run config {_HOW[kind]})"
    return _refused(f"releases.{kind} = {level}", asked, allowed)


POLICY: Final = "policy"
_LISTS: Final = ("columns", "labels", "weights", "filters", "keys", "join-only")
_KEYS: Final = (
    *_LISTS,
    *("expressions", "min-rows", "min-count", "releases"),
    *("epsilon", "delta", "budget-name", "coefficients"),
)


def read_policy(
    common: Mapping[str, Any], shard: Mapping[str, Any], where: str
) -> tuple[Policy, int]:
    """Return a shard's policy and the min-count that it says, 1 if it says none.

    Args:
        common: the table's entry in the tables file.
        shard: the shard's own, which may be the same.
        where: the shard, for messages.

    Raises:
        SourceError: a key is unknown, or a value is of the wrong kind.
    """
    where = f"the policy of {where}"
    of_table, own = _entry(common, where), _entry(shard, where)
    merged = {**of_table, **own}
    releases = {**_releases(of_table, where), **_releases(own, where)}
    epsilon = _epsilon(merged, where)
    lists = {key: _names(merged, key, where) for key in _LISTS}
    _check_apart(lists, where)
    if epsilon is None and PRIVATE in releases.values():
        raise SourceError(
            f"{where} has releases that are private, but no 'epsilon', which says how "
            "private: noise of any size would do"
        )
    defaults = Releases() if epsilon is None else Releases.within_budget()
    levels = Releases(**{**vars(defaults), **releases})
    _check_weights(lists, levels, where)
    policy = Policy(
        columns=lists["columns"],
        labels=lists["labels"],
        weights=lists["weights"],
        filters=lists["filters"],
        keys=lists["keys"],
        join_only=lists["join-only"] or (),
        expressions=entries.flag(merged, "expressions", where),
        min_rows=entries.count(merged, "min-rows", where, 1),
        releases=levels,
        epsilon=epsilon,
        delta=_delta(merged, where),
        budget_name=entries.text(merged, "budget-name", where),
        coefficients=entries.flag(merged, "coefficients", where, default=False),
    )
    _check_coefficients(policy, where)
    return policy, entries.count(merged, "min-count", where, 1)


def _entry(entry: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    policy = entry.get(POLICY, {})
    if not isinstance(policy, dict):
        raise SourceError(f"{where} must be a table, not {entries.form(policy)}")
    entries.refuse_unknown(policy, _KEYS, where)
    return policy


def _names(entry: Mapping[str, Any], key: str, where: str) -> tuple[str, ...] | None:
    return entries.texts(entry, key, where, ()) if key in entry else None


def _check_apart(lists: Mapping[str, tuple[str, ...] | None], where: str) -> None:
    """Refuse a join-only column that a list allows to be read for something else."""
    for name in lists["join-only"] or ():
        for key in ("labels", "weights", "filters"):
            if name.lower() in {other.lower() for other in lists[key] or ()}:
                raise SourceError(
                    f"{where}: column {name!r} is join-only, and {key!r} has it too"
                )


def _check_weights(
    lists: Mapping[str, tuple[str, ...] | None], levels: Releases, where: str
) -> None:
    """Refuse weights that may read labels, and leave as these may not."""
    may_leave = levels.level(WEIGHTS) == CLEAR
    if may_leave and levels.labels != CLEAR and lists["weights"] is None:
        raise SourceError(
            f"{where} lets weights leave as they are, and labels not: list in "
            "'weights' which columns a weight may read, or it may read the label's"
        )


def _check_coefficients(policy: Policy, where: str) -> None:
    """Refuse coefficients of models that may not leave."""
    if policy.coefficients and policy.releases.models == NEVER:
        raise SourceError(
            f"{where} lets coefficients be shown, and nothing of models leave: one of "
            "'coefficients' and 'releases' must change"
        )


def _releases(entry: Mapping[str, Any], where: str) -> dict[str, str]:
    given = entry.get("releases", {})
    where = f"'releases' of {where}"
    if not isinstance(given, dict):
        raise SourceError(f"{where} must be a table, not {entries.form(given)}")
    entries.refuse_unknown(given, tuple(LEVELS), where)
    for kind, level in given.items():
        if level not in LEVELS[kind]:
            close = get_close_matches(str(level), LEVELS[kind], n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise SourceError(
                f"{kind!r} in {where} is {level!r}{hint}: "
                f"valid levels are {', '.join(LEVELS[kind])}"
            )
    return dict(given)


def _epsilon(entry: Mapping[str, Any], where: str) -> float | None:
    if "epsilon" not in entry:
        if "delta" in entry:
            raise SourceError(f"{where} has a 'delta', but no 'epsilon'")
        return None
    value = entry["epsilon"]
    if not _is_number(value) or not 0 < value < math.inf:
        raise SourceError(
            f"'epsilon' of {where} must be a number above 0, not {entries.form(value)}"
        )
    return float(value)


def _delta(entry: Mapping[str, Any], where: str) -> float:
    value = entry.get("delta", DEFAULT_DELTA)
    if not _is_number(value) or not 0 < value < 1:
        raise SourceError(
            f"'delta' of {where} must be a number between 0 and 1, "
            f"not {entries.form(value)}"
        )
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
