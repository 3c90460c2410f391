"""The entries of a site's ledger: releases, their cost and the scope of a guarantee."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from msgspec.structs import replace

from client_apps.privacy.guard import Guard
from client_apps.rounds.site import Site
from tp_flower.methods import ADMM, CORESET, SERVER, SGD
from tp_flower.privacy.accounting import epsilon
from tp_flower.privacy.mechanisms import Gaussian, Mechanism, Release
from tp_flower.privacy.plan import (
    BATCH_SCORES,
    COEFFICIENTS,
    GRADIENTS,
    SCORES,
    PartPlan,
    Use,
)
from tp_flower.protocol.messages import EXCHANGES
from tp_flower.protocol.packet import Action
from tp_flower.sources.shards import ShardSource

if TYPE_CHECKING:
    from tp_flower.protocol.training_messages import PrivacyTerms

NEIGHBOURS: Final = "the row adds to what is released, or nothing does in its place"
OF_GROUPS: Final = (
    "a row is a group of the sub-query: a row of the table may change the values of "
    "its group, which tells as much as two groups"
)
OF_BASE_ROWS: Final = (
    "rows of the run are groups of a sub-query: a row of the table changes what its "
    "group adds, and is counted with that, twice what a group adds"
)
KEYS, COUNTS, STATISTICS, WEIGHTS = "keys", "counts", "statistics", "weights"
SENSITIVITIES, DRAWN, MASKED = "sensitivities", "drawn-rows", "masked-sensitivities"
_SCORES: Final = (SCORES, BATCH_SCORES)
_ROUNDS: Final = {
    ADMM: (Action.ADMM, Action.PREPARE),
    SGD: (Action.SGD, Action.PREPARE),
    CORESET: (Action.ROWS, Action.CONSENSUS, Action.PREPARE),
}
"""By family, the messages that carry the releases of a plan; else any may."""

_UNCOVERED: Final[Mapping[str, str]] = {
    COUNTS: "not covered: how many rows there are and how many the filters leave, "
    "which columns have no value, and the order of the rows, by which all of them go",
    KEYS: "keyed hashes, no differential privacy: which rows have the same key, here "
    "and in other tables, and how often; {}",
    WEIGHTS: "not covered: the weight of each row leaves as it is",
    STATISTICS: "not covered: counts, means and deviations of the features, ranges and "
    "quantiles (values of single rows) where an encoder needs them, and how many "
    "rows each category has, by its keyed hash",
    SENSITIVITIES: "not covered: {}",
    DRAWN: "not covered: which rows were drawn, the sensitive ones more often",
    MASKED: "masked (ChaCha20, no differential privacy): of a sampled joined row the "
    "server learns the sum of all tables' sensitivities, not a table's own",
    COEFFICIENTS: "not covered: the final coefficients of the table's features, which "
    "the table's policy allows to be shown",
}
"""The scope of what leaves without a plan, by kind: no noise covers it."""


@dataclass(frozen=True)
class Shard:
    """A shard as the ledger names it, with the number of its part in the run.

    Its budget is that of ``source``, the identifier of its rows; ``is_grouped`` says
    whether its rows in the run are groups of a sub-query.
    """

    number: int
    table: str
    site: str
    source: str
    is_grouped: bool = False

    @classmethod
    def of(cls, site: Site, number: int, source: ShardSource) -> Self:
        """Return the shard of a part of the run."""
        name = Guard(site).source_id(source)
        is_grouped = bool(site.extracted(number).contents.groups)
        return cls(number, source.table, source.site, name, is_grouped)

    def release(
        self,
        action: Action,
        what: str,
        scope: str,
        mechanism: Mechanism | None = None,
    ) -> Release:
        """Return a release of the shard's rows."""
        if self.is_grouped and mechanism is not None:
            counted = _of_base_row(mechanism)
            unit = OF_GROUPS if counted == mechanism else OF_BASE_ROWS
            mechanism, scope = counted, f"{scope}; {unit}" if scope else unit
        return Release(
            table=self.table,
            source=self.source,
            part=self.number,
            action=str(action),
            what=what,
            unit=f"a row of {self.table} at {self.site}",
            neighbours=NEIGHBOURS,
            adversary=SERVER,
            mechanism=mechanism,
            scope=scope,
            site=self.site,
        )

    def uncovered(self, what: str, detail: str = "") -> Release:
        """Return a release that no noise covers, of a kind that needs no plan."""
        return self.release(_action_of(what), what, _UNCOVERED[what].format(detail))


@dataclass(frozen=True)
class Run:
    """A run as the ledger names it, and the family of its method.

    ``fitted`` are the numbers of the parts whose statistics have left for encoders.
    """

    name: str
    family: str
    settings: "PrivacyTerms"
    fitted: Collection[int]


def _of_base_row(mechanism: Mechanism) -> Mechanism:
    """Return the cost for a row of the grouped table of a release of groups.

    It changes the values of its group: what the group adds to a sum moves by at most
    twice its norm. (Of sub-sampled sums no such step is known; the group stays the
    unit.)
    """
    if isinstance(mechanism, Gaussian) and mechanism.sample_rate == 1.0:
        return replace(mechanism, noise_multiplier=mechanism.noise_multiplier / 2.0)
    return mechanism


def releases_of(run: Run, shard: Shard, plan: PartPlan) -> list[tuple[Release, int]]:
    """Return the releases that a part's plan allows, covered or not, and how often."""
    return [
        (
            shard.release(
                _action_of(use.what, run.family),
                use.what,
                "; ".join(_scope(run, shard, plan, use)),
                use.mechanism,
            ),
            use.limit,
        )
        for use in plan.uses
    ]


def _action_of(what: str, family: str = "") -> Action:
    """Return the message that declares a kind of release."""
    return next(
        action
        for action in _ROUNDS.get(family, EXCHANGES)
        if any(what in each.kinds for each in EXCHANGES[action].reply.discloses)
    )


def scored(shard: Shard, plan: PartPlan) -> Release:
    """Return the scores of rows that are predicted, which leave once."""
    (use,) = plan.uses
    if use.mechanism is None:
        scope = "not covered: the score of every row that is joined leaves as it is"
    else:
        scope = "given the model and its encoder, which come from an earlier run"
    return shard.release(Action.SCORE, use.what, scope, use.mechanism)


def _scope(run: Run, shard: Shard, plan: PartPlan, use: Use) -> list[str]:
    """Return the conditions of a release's guarantee, in plain words."""
    if use.mechanism is None:
        return ["not covered: it leaves as it is"]
    conditions, settings = [], run.settings
    if shard.number in run.fitted:
        conditions.append("the encoder, whose statistics are not covered")
    if use.what not in _SCORES and not settings.covers_predictions:
        conditions.append(
            "the messages that the site received, which come from scores without noise"
        )
    scope = [f"given {' and '.join(conditions)}"] if conditions else []
    if use.what == GRADIENTS and plan.outsider is not None:
        amount = epsilon([plan.outsider], settings.delta, settings.accountant)
        scope.append(
            f"epsilon {amount:.4g} (delta {settings.delta:g}) against an outsider, who "
            f"sees the final model only: {plan.outsider.count} batches take a row with "
            f"probability {plan.outsider.sample_rate:.4g} each"
        )
    return scope
