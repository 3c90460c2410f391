"""Statistics that leave a site with noise only: reserved, drawn, paid for, sent.

A part's statistics leave once in a run: the second request finds them used up. What
they cost is on the disk before anything is computed, and spent before the reply leaves.

A row of a shard that has several roles in the query (a self-join) is in the statistics
of each: the noise is such that together they cost the epsilon that was asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from client_apps.costs import STATISTICS, Shard
from client_apps.guard import Guard
from client_apps.site import Site
from tp_flower.encoding.choice import TableChoice
from tp_flower.encoding.noisy_statistics import noisy_to_wire
from tp_flower.encoding.private_statistics import Noise, private_statistics
from tp_flower.encoding.ranges import choose_ranges
from tp_flower.encoding.row_sums import FeaturePlan, plan_features, sensitivity
from tp_flower.encoding.statistics import Sample
from tp_flower.errors import SettingsError
from tp_flower.privacy.accounting import noise_multiplier
from tp_flower.privacy.mechanisms import Chance, Gaussian, Mechanism
from tp_flower.privacy.releases import Planned, Release
from tp_flower.protocol import Action, AnyArray, ArrayKey, Packet
from tp_flower.settings import PrivacySettings
from tp_flower.sources.shards import ShardSource

RARE: Final = "rare categories"
RARE_SHARE: Final = 0.01
"""Of delta: the probability that a category which only one row has is listed.

It adds up over runs, until nothing is left of a budget's delta; a smaller share costs a
threshold that is hardly higher.
"""

_SCOPE: Final = (
    "one Gaussian over the sums of all features, each value within its declared range; "
    "not: the number of rows, types, the length of vectors"
)
_RARE_SCOPE: Final = (
    "that a category which no other row has is listed; others are listed where their "
    "noisy count is above a threshold"
)


@dataclass(frozen=True)
class Asked:
    """A part whose statistics are asked for.

    Attributes:
        number: of the part.
        source: its shard.
        choice: the encoders that the server asks for.
        sample: of its rows.
        rows: how many of them.
    """

    number: int
    source: ShardSource
    choice: TableChoice
    sample: Sample
    rows: int


@dataclass(frozen=True)
class _Planned:
    """A part, and what is summed of its features."""

    asked: Asked
    plans: tuple[FeaturePlan, ...]

    @property
    def is_empty(self) -> bool:
        """Whether nothing of any row leaves."""
        return not (self.asked.rows and sensitivity(self.plans))

    @property
    def is_listed(self) -> bool:
        """Whether categories are counted."""
        return any(plan.is_listed for plan in self.plans)


@dataclass(frozen=True)
class _Price:
    """What a part's statistics cost.

    Attributes:
        multiplier: of the Gaussian noise.
        chance: that a category which only one row has is listed.
    """

    multiplier: float
    chance: float


def noisy_reply(
    site: Site, guard: Guard, privacy: PrivacySettings, asked: Sequence[Asked]
) -> Packet:
    """Return the statistics of all parts, paid for.

    Args:
        site: in the run.
        guard: of its policies.
        privacy: of the run.
        asked: every part, as its policy allows it.

    Raises:
        SettingsError: a feature has no range, an encoder takes quantiles, or no noise
            is of the size that epsilon asks for.
        BudgetError: a budget does not suffice, or the run has had a part's statistics.
        SiteError: the ledger cannot be written.
        SchemaError: a column is of another kind than its encoder takes.
    """
    parts = [_planned(site, own, privacy) for own in asked]
    prices = _prices(guard, privacy, parts)
    planned = [
        Planned(release, limit=1)
        for part in parts
        if not part.is_empty
        for release in _releases(site, part, prices[part.asked.number])
    ]
    site.reserve(planned, guard.budgets([own.source for own in asked]))
    facts: list[dict[str, Any]] = []
    arrays: dict[ArrayKey, AnyArray] = {}
    for part in parts:
        told, named = _drawn(site, part, prices[part.asked.number])
        facts.append(told)
        arrays.update({(part.asked.number, name): own for name, own in named.items()})
    site.current_part = None
    site.uses += [(*each.release.name, 0) for each in planned]
    return Packet({"parts": facts}, arrays)


def _planned(site: Site, asked: Asked, privacy: PrivacySettings) -> _Planned:
    site.current_part = asked.number
    choice = asked.choice
    kinds = {info.name: info.kind for info in site.extracted(asked.number).features}
    table = choice.table.lower()
    entries = [entry for entry in privacy.ranges if entry[0].lower() == table]
    ranges = choose_ranges(entries, {choice.table: list(kinds)})
    return _Planned(asked, plan_features(choice, kinds, ranges[choice.table]))


def _prices(
    guard: Guard, privacy: PrivacySettings, parts: Sequence[_Planned]
) -> dict[int, _Price]:
    """Return what each part costs: those of one source have epsilon together."""
    together: dict[str, list[_Planned]] = {}
    for part in parts:
        source = guard.source_id(part.asked.source)
        together.setdefault(source, []).append(part)
    prices = {}
    for own in together.values():
        share = RARE_SHARE if any(part.is_listed for part in own) else 0.0
        multiplier = _multiplier(privacy, 1 - share, len(own))
        price = _Price(multiplier, privacy.delta * share / len(own))
        prices.update({part.asked.number: price for part in own})
    return prices


def _multiplier(privacy: PrivacySettings, share: float, count: int) -> float:
    """Return the noise of that many uses, for a share of delta."""
    try:
        return noise_multiplier(privacy.statistics, privacy.delta * share, count=count)
    except ValueError as error:
        raise SettingsError(
            f"privacy.statistics = {privacy.statistics:g} with privacy.delta = "
            f"{privacy.delta:g}: {error}"
        ) from None


def _releases(site: Site, part: _Planned, price: _Price) -> list[Release]:
    """Return what leaves of a part, with what covers it."""
    shard = Shard.of(site, part.asked.number, part.asked.source)
    costs: list[tuple[str, str, Mechanism]] = [
        (STATISTICS, _SCOPE, Gaussian(price.multiplier))
    ]
    if part.is_listed:
        costs.append((RARE, _RARE_SCOPE, Chance(price.chance)))
    return [
        shard.release(Action.STATISTICS, what, scope, mechanism)
        for what, scope, mechanism in costs
    ]


def _drawn(
    site: Site, part: _Planned, price: _Price
) -> tuple[dict[str, Any], dict[str, AnyArray]]:
    """Return what the server is told of a part; not before it is reserved."""
    number = site.current_part = part.asked.number
    extracted = site.extracted(number)
    # of nobody there is nothing to hide
    multiplier = 0.0 if part.is_empty else price.multiplier
    noise = Noise(multiplier, price.chance, site.noise)
    found = private_statistics(
        part.plans, extracted.column, part.asked.sample, extracted.table, noise
    )
    told, arrays = noisy_to_wire(found)
    deviation = multiplier * sensitivity(part.plans)
    return {"id": number, "statistics": told, "deviation": deviation}, arrays
