"""Reading the policies of a tables file: what they say, and what they leave out."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from tp_flower.arrays import MOST_BINS
from tp_flower.errors import SourceError, closest
from tp_flower.sources import entries
from tp_flower.sources.policy import (
    ACCOUNT_DIGITS,
    ACCOUNT_PREFIX,
    ANY,
    BIN_COUNTS,
    BINS,
    BUDGETED,
    CLEAR,
    LEVELS,
    MISSING,
    MOST_REGIONS,
    NEVER,
    OPEN,
    PRIVATE,
    REGIONS,
    RUNS_PER_BUDGET,
    STRICT,
    UNBUDGETED,
    WEIGHTS,
    Policy,
    has_name,
)

_ACCOUNT_NAME: Final = re.compile(rf"{ACCOUNT_PREFIX}[0-9a-f]{{{ACCOUNT_DIGITS}}}")


def read_policy(
    common: Mapping[str, object], shard: Mapping[str, object], where: str
) -> Policy:
    """Return a shard's policy, from its table's entry in the file and its own."""
    where = f"the policy of {where}"
    policies = [entry["policy"] for entry in (common, shard) if "policy" in entry]
    if not policies:
        return MISSING
    if policies[-1] == OPEN:
        return Policy()
    if isinstance(policies[-1], str):
        raise SourceError(f"{where} is a string other than {OPEN!r}: write a table")
    merged: dict[str, object] = {}
    levels: dict[str, object] = {}
    for policy in policies:
        # the rules of a shard hold for it though those of its table are "open"
        rules = {} if policy == OPEN else entries.as_table(policy, where)
        merged |= rules
        levels |= _levels(rules, where)
    merged = {
        key: value for key, value in merged.items() if (key, value) != ("partners", ANY)
    }
    if isinstance(unit := merged.get("privacy-unit"), str):
        merged["privacy-unit"] = [unit]
    merged["releases"] = {
        **vars(BUDGETED if "epsilon" in merged else UNBUDGETED),
        **levels,
    }
    _refuse_removed(merged, where)
    policy = entries.read(Policy, {**STRICT, **merged}, where)
    _check_budget(policy, merged, levels, where)
    _check_budget_name(policy.budget_name, where)
    if bool(policy.privacy_unit) != ("rows-per-unit" in merged):
        raise SourceError(
            f"{where} must have both 'privacy-unit', the columns that say whose a row "
            "is, and 'rows-per-unit', how many rows of one take part"
        )
    _check_consistent(policy, where)
    if policy.epsilon is not None and policy.epsilon_per_run is None:
        policy = replace(policy, epsilon_per_run=policy.epsilon / RUNS_PER_BUDGET)
    return policy


def _refuse_removed(rules: Mapping[str, object], where: str) -> None:
    """Refuse rules that no longer exist, and name those that replace them."""
    if "min-features" in rules:
        raise SourceError(
            f"{where} has 'min-features', which no longer exists: leave it out, or "
            f"write in its place 'scores-per-rank = {STRICT['scores-per-rank']}' (how "
            "often scores may leave, in parts of the rank of the features) and 'cover "
            f"= {STRICT['cover']}' (how many tables of other sites must hide them), "
            "which are the rules if neither is written"
        )
    if "approved-queries" in rules:
        raise SourceError(
            f"{where} has 'approved-queries', which no longer exists: it approved a "
            "table's query, whatever else the run did. Write approved-runs = [] in its "
            "place, and approve whole runs by `tp-flower approve`"
        )


def _check_budget(
    policy: Policy,
    rules: Mapping[str, object],
    levels: Mapping[str, object],
    where: str,
) -> None:
    """Refuse rules about a budget that is missing or says nothing."""
    if policy.epsilon is None:
        for article, key in (("a", "delta"), ("an", "epsilon-per-run")):
            if key in rules:
                raise SourceError(f"{where} has {article} {key!r}, but no 'epsilon'")
        if PRIVATE in levels.values():
            raise SourceError(
                f"{where} has private releases but no 'epsilon': set one, or any "
                "amount of noise, however small, would be allowed"
            )
        return
    if (policy.epsilon_per_run or 0) > policy.epsilon:
        raise SourceError(f"{where}: 'epsilon-per-run' is above 'epsilon'")


def _check_budget_name(name: str, where: str) -> None:
    """Refuse a name that looks like one of an account so far, and is none."""
    if name.startswith(ACCOUNT_PREFIX) and not _ACCOUNT_NAME.fullmatch(name):
        raise SourceError(
            f"'budget-name' of {where} begins with {ACCOUNT_PREFIX!r}, but the "
            f"{ACCOUNT_DIGITS} digits of an account do not follow: `tp-flower account` "
            "prints them"
        )


def _levels(policy: Mapping[str, object], where: str) -> Mapping[str, object]:
    """Return the level of each kind of release that a policy names, or its number."""
    where = f"'releases' of {where}"
    levels = entries.as_table(policy.get("releases", {}), where)
    entries.refuse_unknown(levels, (*LEVELS, REGIONS, BINS), where)
    for kind, level in levels.items():
        if kind == REGIONS:
            _check_regions(level, where)
        elif kind == BINS:
            _check_bins(level, where)
        elif level not in LEVELS[kind]:
            hint = closest(str(level), LEVELS[kind])
            raise SourceError(
                f"{kind!r} in {where} is {level!r}{hint}: "
                f"valid levels are {', '.join(LEVELS[kind])}"
            )
    return dict(levels)


def _check_regions(number: object, where: str) -> None:
    """Refuse a number of regions that rows cannot be divided into."""
    is_number = isinstance(number, int) and not isinstance(number, bool)
    if not (is_number and number in (0, *range(2, MOST_REGIONS + 1))):
        raise SourceError(
            f"'regions' in {where} is {number!r}: it must be the number of regions "
            f"that rows may be told apart by, from 2 to {MOST_REGIONS}, or 0 for none"
        )


def _check_bins(number: object, where: str) -> None:
    """Refuse a number of bins that a column cannot be divided into."""
    if not (type(number) is int and 0 <= number <= MOST_BINS):
        raise SourceError(
            f"{BINS!r} in {where} must be {BIN_COUNTS.description}, not "
            f"{entries.form(number)}"
        )


def _check_consistent(policy: Policy, where: str) -> None:
    """Refuse rules of a policy that contradict each other."""
    for name in policy.join_only:
        for key in ("labels", "weights", "filters"):
            if has_name(getattr(policy, key) or (), name):
                raise SourceError(
                    f"{where}: column {name!r} is in 'join-only' and in {key!r}"
                )
    releases = policy.releases
    has_clear_weights = releases.level(WEIGHTS) == CLEAR and releases.labels != CLEAR
    if has_clear_weights and policy.weights is None:
        raise SourceError(
            f"{where} lets weights leave in the clear, but not labels: list in "
            "'weights' the columns that a weight or an offset may read, or it could "
            "read the label's"
        )
    if policy.coefficients and releases.models == NEVER:
        raise SourceError(
            f"{where} allows 'coefficients', but its 'releases' let nothing of models "
            "leave: change one of them"
        )
