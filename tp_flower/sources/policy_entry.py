"""The policy of a table, as the tables file writes it.

::

    [tables.payments.policy]
    columns = ["amount", "day"]               # what a query may read; absent: all
    labels = ["is_fraud"]                     # what a label may read, and no feature
    weights = ["amount"]                      # what a weight may read; absent: labels
    filters = ["day"]                         # what WHERE and HAVING may read
    keys = ["day"]                            # what may be joined on, as it is
    join-only = ["customer"]                  # leaves as a keyed hash, and only so
    expressions = false                       # columns are read as they are, only
    min-rows = 50                             # nothing is computed of fewer rows
    min-count = 10                            # no category of fewer rows is listed
    epsilon = 4.0                             # of each row, for all runs ever
    delta = 1e-5
    budget-name = "payments"                  # in the ledger, instead of the place
    coefficients = true                       # a linear model's may be shown
    releases = { labels = "private", statistics = "moments", scores = "never" }

A shard may have a policy of its own: its keys win over those of its table's. Columns
are compared as SQL does, without case.
"""

import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

from tp_flower.errors import SourceError
from tp_flower.sources import entries
from tp_flower.sources.policy import (
    CLEAR,
    DEFAULT_DELTA,
    LEVELS,
    NEVER,
    PRIVATE,
    WEIGHTS,
    Policy,
    Releases,
)

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
