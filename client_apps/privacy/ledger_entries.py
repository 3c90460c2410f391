"""The entries of a site's ledger: releases, their cost and the scope of a guarantee."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from client_apps.privacy.guard import (
    RowsOfParts,
    are_features_keys,
    budgets,
    check_single_rows,
)
from client_apps.rounds.site import Site
from tp_flower.privacy import mechanisms
from tp_flower.privacy import plan as plans
from tp_flower.protocol.fields import SERVER
from tp_flower.protocol.messages import ACTIONS, Action
from tp_flower.query.fragment import Role
from tp_flower.sources.derived.accounts import source_id
from tp_flower.sources.policy import BINS, LEVELS, REGIONS

if TYPE_CHECKING:
    from client_apps.operator.participant import Participant
    from tp_flower.privacy.score_masks import ScoreMasks
    from tp_flower.protocol.training_messages import PrivacyTerms
    from tp_flower.sources.shards import ShardSource

NEIGHBOURS: Final = "the {} adds to what is released, or nothing does in its place"
GROUP_SCOPE: Final = (
    "a row is a group of the sub-query: a row of the table may change the values of "
    "its group, which tells as much as two groups"
)
KEYS = "keys"
COUNTS = "counts"
STATISTICS = "statistics"
WEIGHTS = "weights"
OFFSETS = "offsets"
NUMBERS: Final = {Role.WEIGHT: WEIGHTS, Role.OFFSET: OFFSETS}
TIMES = "times"
CUTOFFS = "cutoffs"
SHARD_KEYS = "shard-keys"
PARTIALS = "partials"
FEATURES = "features"
LABEL_MAGNITUDE = "label-magnitude"
UNMATCHED = "unmatched"
RANKS = "ranks"
INSPECTION = "inspection"
_SCORES: Final = (plans.SCORES, plans.BATCH_SCORES)
_SUMMED: Final = (
    plans.GRAM,
    plans.MOMENTS,
    plans.PARAMETERS,
    plans.MODEL,
    plans.GRADIENTS,
)
_SEALED: Final = (
    "sealed (SHAKE-256, no differential privacy): the sum over the shards is for the "
    "table's shards alone, and an honest server reads nothing"
)
_PRODUCTS: Final = (
    "masked (ChaCha20, no differential privacy): an honest server reads the sum over "
    "the tables alone"
)
_REGIONS: Final = (
    "not covered: in which of {} regions each row is, the leaf of a tree on its "
    "features, to the server and the sites of the other tables"
)
_BINNED: Final = (
    "not covered: in which of up to {} bins the value of each encoded column lies, of "
    "each row"
)
_CLEAR: Final = "not covered: it leaves in the clear"
_UNCOVERED: Final[Mapping[str, str]] = {
    COUNTS: "not covered: how many rows there are and how many the filters leave, "
    "which columns have no value or one, how many columns each feature is encoded as, "
    "and the order of the rows",
    KEYS: "keyed hashes, no differential privacy: which rows have the same key, here "
    "and in other tables, and how often; {}",
    LABEL_MAGNITUDE: "not covered: the power of two above the root mean square of the "
    "labels",
    UNMATCHED: "not covered: the scores of {} rows leave without the mask of a join, "
    "because the server says that they have no partner in it",
    RANKS: "not covered: how many more score vectors may leave, which tells the rank "
    "of the encoded rows",
    WEIGHTS: "not covered: the weight of each row leaves in the clear",
    OFFSETS: "not covered: the offset of each row leaves in the clear",
    TIMES: "not covered: the rank of each row in the order that rows are held out by, "
    "or its value where the table has several shards",
    CUTOFFS: "sealed to the sites {0}, no differential privacy: at which {1} each key "
    "has rows; the sites recognise the keys that they have or guess; {2}",
    SHARD_KEYS: "sealed to the sites {0}, no differential privacy: which of the keys "
    "that they have the shard has, too; {1}",
    PARTIALS: "sealed to the sites {0}, no differential privacy: of each key that both "
    "have, and each cutoff, the shard's own counts, sums, least and greatest values, "
    "or its last row, as the sub-query has them; {1}",
    STATISTICS: "not covered: counts, means and deviations of the features, ranges "
    "(values of single rows) where an encoder needs them, and how many rows each "
    "category has, by its keyed hash; sealed to the table's other shards",
    FEATURES: "not covered: the share of each feature's missing values and of its "
    "rarer categories, in steps of 2 % (whole percents where the policy has min-rows = "
    "1), how many categories there are, and whether most "
    "texts are numbers or dates",
    plans.COEFFICIENTS: "not covered: the final coefficients of the table's features, "
    "which the table's policy allows to be shown",
    plans.CATEGORIES: "not covered: the texts of categories, by which the report calls "
    "their columns, of min-count rows here each; where min-count is 1 the ends of bins "
    "too, of which the outer ones tell the smallest and the largest value",
    INSPECTION: "not covered: of the table and each feature, how far it moves the "
    "scores and how well the model does with its values permuted; of the groups of a "
    "column, their values and how well it does in each",
    plans.FACTORS: "not covered: the factors of each row's key, which the server has "
    "made: it knows the key again wherever the model scores it",
}
"""The scope of releases that need no plan and are no method's, by kind."""


def release(
    site: Site,
    number: int,
    action: Action,
    what: str,
    scope: str,
    mechanism: mechanisms.Mechanism | None = None,
) -> mechanisms.Release:
    """Return a release of a participant's rows, charged to their source."""
    source = site.source(number)
    policy = source.policy
    if mechanism:
        check_single_rows(source, site.fragment(number))
    # a unit's groups are its own, and vanish with it
    if mechanism and not policy.privacy_unit and site.extracted(number).contents.groups:
        mechanism, unit = group_cost(mechanism)
        scope = f"{scope}; {unit}" if scope else unit
    return mechanisms.Release(
        table=source.table,
        source=source_id(source),
        part=number,
        action=str(action),
        what=what,
        unit=unit_text(source, f"{source.table} at {source.site}"),
        neighbours=NEIGHBOURS.format(policy.per),
        adversary=SERVER,
        mechanism=mechanism,
        scope=scope,
        site=source.site,
        per=policy.per,
    )


def unit_text(source: "ShardSource", table: str) -> str:
    """Return the unit of privacy of a release, as text."""
    policy = source.policy
    most = ""
    if policy.privacy_unit:
        most = f", at most {policy.rows_per_unit} rows"
    return f"a {policy.per} of {table}{most}"


def group_cost(mechanism: mechanisms.Mechanism) -> tuple[mechanisms.Mechanism, str]:
    """Return the cost of a release of groups per row below them, and its unit.

    A row of the grouped table changes the values of its group: the group's contribution
    to a sum moves by at most twice its norm. (No such bound is known for sub-sampled
    sums; there the group remains the unit.)
    """
    if isinstance(mechanism, mechanisms.Gaussian) and mechanism.sample_rate == 1.0:
        return replace(
            mechanism, noise_multiplier=mechanism.noise_multiplier / 2.0
        ), mechanisms.BASE_ROW_SCOPE
    return mechanism, GROUP_SCOPE


def note(site: Site, number: int, kind: str, *details: str) -> None:
    """Note a release of a kind that needs no plan and that no noise covers."""
    note_scope(site, number, kind, _UNCOVERED[kind].format(*details))


def note_scope(site: Site, number: int, kind: str, scope: str) -> None:
    """Note a release without plan and noise, of a kind that is a method's.

    The table's policy must let it leave in the clear, or masked; if the rule depends on
    the run, the handler has checked it.
    """
    action = action_of(kind, ACTIONS.values())
    policy = site.source(number).policy
    for declared in action.reply.discloses:
        if kind in declared.kinds and declared.policy in LEVELS and not declared.when:
            # of masked sensitivities the server reads sums, as it does of scores
            policy.check_release(declared.policy, is_private=False, is_masked=True)
    uncovered = release(site, number, action, kind, scope)
    site.ledger.note(site.store.run, [uncovered])


def note_regions(site: Site, number: int, action: Action, regions: int) -> None:
    """Note that the regions of a part's rows leave, of so many."""
    scope = _REGIONS.format(regions)
    site.ledger.note(site.store.run, [release(site, number, action, REGIONS, scope)])


def note_bins(site: Site, number: int, action: Action, bins: int) -> None:
    """Note that the bin numbers of rows leave, of so many bins a column."""
    uncovered = release(site, number, action, BINS, _BINNED.format(bins))
    site.ledger.note(site.store.run, [uncovered])


def note_unmatched(site: Site, number: int, masks: "ScoreMasks | None") -> None:
    """Note how many rows leave without a mask; the table's policy bounds them."""
    unmatched, rows = masks.unmatched if masks else (0, 0)
    if unmatched:
        site.source(number).policy.check_unmatched(unmatched, rows)
        note(site, number, UNMATCHED, f"{unmatched} of {rows}")


def set_aside(site: Site, planned: Iterable[tuple[mechanisms.Release, int]]) -> None:
    """Reserve the covered releases, each with its limit, and note the others.

    If a budget is too small, the commit of the round is refused.
    """
    covered = []
    uncovered = []
    for planned_release, limit in planned:
        if planned_release.mechanism is None:
            uncovered.append(planned_release)
        else:
            covered.append(mechanisms.Reservation(planned_release, limit))
    if covered:
        site.ledger.reserve(site.store.run, covered, budgets(site), site.round.payment)
    if uncovered:
        site.ledger.note(site.store.run, uncovered)


def planned_releases(
    site: Site,
    parts: "Mapping[int, Participant[Any]]",
    carriers: Collection[Action],
    privacy: "PrivacyTerms",
    fitted: Collection[int],
) -> Iterator[tuple[mechanisms.Release, int]]:
    """Yield the releases that the plans allow, and how often each may happen.

    The messages that carry them are ``carriers``. The encoders of the parts in
    ``fitted`` are fitted to rows.
    """
    rows = RowsOfParts.of(site, parts)
    for number, part in parts.items():
        plan = part.data.plan
        union = part.data.union
        masks = part.data.masks
        conditions = []
        if are_features_keys(site, number, rows):
            conditions = [mechanisms.GIVEN_KEYS]
        conditions += [mechanisms.GIVEN_ENCODER] if number in fitted else []
        for use in plan.uses:
            scope = _scope(
                use, privacy, [*conditions, *_model_condition(use, plan)], masks
            )
            if union is not None and union.is_sealed and use.what in _SUMMED:
                scope = f"{_SEALED}; {scope}" if use.mechanism else _SEALED
            action = action_of(use.what, carriers)
            yield (
                release(site, number, action, use.what, scope, use.mechanism),
                use.limit,
            )


def score_scope(masks: "ScoreMasks | None") -> str:
    """Return the scope of scores without noise; masks by no join hide none."""
    if masks and masks.joins:
        return mechanisms.SCORE_SUMS
    return mechanisms.SCORES_TELL


def action_of(kind: str, carriers: Iterable[Action]) -> Action:
    """Return the first of some messages that a kind of release leaves with.

    LookupError if none declares it: the room of a method lacks a message.
    """
    for action in carriers:
        if any(kind in item.kinds for item in action.reply.discloses):
            return action
    raise LookupError(f"none of {', '.join(map(str, carriers))} declares {kind!r}")


def _model_condition(use: plans.Use, plan: plans.PartPlan) -> list[str]:
    """Return the condition that noisy scores are of a noiseless model, if they are."""
    is_given = use.what in _SCORES and not plan.is_private
    if not is_given:
        return []
    return [mechanisms.GIVEN_NOISELESS_MODEL]


def _scope(
    use: plans.Use,
    privacy: "PrivacyTerms",
    conditions: list[str],
    masks: "ScoreMasks | None",
) -> str:
    """Return the conditions of a release's guarantee, in plain words."""
    if use.mechanism is None:
        if use.what in _SCORES:
            return score_scope(masks)
        return _PRODUCTS if use.what == plans.PRODUCTS else _CLEAR
    if use.what in _SCORES or privacy.covers_predictions:
        if not conditions:
            return ""
        return f"given {' and '.join(conditions)}"
    conditions.append(mechanisms.GIVEN_MESSAGES)
    covered = "covers what a row adds to the model, not its features"
    return f"{covered}: given {' and '.join(conditions)}"
