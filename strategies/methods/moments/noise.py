"""How much noise the epsilons of a run put on its moments, and what that costs.

The noise of a table on a moment, sigma, is told beside the moments that it hides in by
r = sigma sqrt(D) / N, D columns of all tables: about its spectral norm per joined row.
On flights, store and MovieLens r up to 0.01 cost at most a tenth of what the table adds
to the model, 0.03 a fifth to a half, and from 0.045 on some models were no better than
without the table (scripts/bench/suites/moments.py).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from strategies.methods.moments.join_counts import JoinCounts
from strategies.setup.encoding import TableEncoding
from tp_flower.errors import SettingsError
from tp_flower.methods.moments.noise import planned_noise
from tp_flower.methods.moments.solve import JoinedMoments, Solution
from tp_flower.methods.moments.terms import (
    PASS_NAMES,
    TRAINED,
    norms_of,
    private_tables,
)
from tp_flower.protocol.training_messages import PrivacyTerms
from tp_flower.settings import Settings

LITTLE: Final = 0.01
MOST: Final = 0.05
DRAWS: Final = 100
MOST_WIDTH: Final = 2.0
"""An interval whose ends have this ratio, or more, says little."""
Interval = tuple[float, float]


@dataclass(frozen=True)
class TableNoise:
    """The noise that a table's epsilon needs.

    Attributes:
        multiplicity: of its row in most joined rows.
        ratio: r.
    """

    table: str
    multiplicity: int
    ratio: float

    @property
    def is_cheap(self) -> bool:
        """Whether the model loses little by it."""
        return self.ratio <= LITTLE

    def __str__(self) -> str:
        effect = "costs a part of what the table adds"
        if self.is_cheap:
            effect = "costs little"
        if self.ratio > MOST:
            effect = "more than many tables add"
        rows = f"a row is in up to {self.multiplicity} joined rows"
        return f"{self.table}: r = {self.ratio:.3g}, {effect} ({rows})"


def planned_noises(
    counts: JoinCounts, encoders: Mapping[str, TableEncoding], settings: Settings
) -> list[TableNoise]:
    """Return the noise of every private table, before anything is spent."""
    joined = counts.joined
    proposal = joined.extracted.proposal
    trained = int(counts.totals[counts.passes.index(TRAINED)])
    norms = norms_of(proposal, settings)
    columns = sum(encoding.columns.width for encoding in encoders.values())
    noises = []
    for table in sorted(private_tables(proposal, settings)):
        if not norms.squared[table]:
            continue
        noise = planned_noise(
            PrivacyTerms.of(settings.privacy),
            norms.sensitivity(table, counts.rows[table].multiplicity),
        )
        ratio = noise.deviation * np.sqrt(columns) / trained
        largest = int(joined.mapping.tables[table].multiplicity.max(initial=0))
        noises.append(TableNoise(table, largest, float(ratio)))
    return noises


def refusals(noises: list[TableNoise], settings: Settings) -> Iterator[str]:
    """Yield why tables need more noise than a model stands."""
    for noise in noises:
        if noise.ratio > MOST:
            yield (
                f"privacy.epsilon: {settings.privacy.epsilon:g} needs noise on table "
                f"{noise}; allowed: r up to {MOST:g}. Leave the table out of "
                "private-tables or of the query, or raise privacy.epsilon"
            )


@dataclass(frozen=True)
class NoiseEffect:
    """What noise may have done to a solution and its metrics, by redrawing it.

    The moments get the same noise once more, many times (a parametric bootstrap): how
    far solution and metrics then move is about how far they are from those without.

    Attributes:
        coefficients: their deviations, (d, d_c), and of the intercepts, (d_c,).
        metrics: by pass and name, the ends of 95 % of the values.
    """

    coefficients: Solution
    metrics: Mapping[int, Mapping[str, Interval]]

    @classmethod
    def of(
        cls,
        moments: Mapping[int, JoinedMoments],
        l2: float,
        generator: np.random.Generator,
        *,
        has_classes: bool,
    ) -> "NoiseEffect":
        """Return the effect on a ridge regression, or the discriminant of classes."""
        solutions = []
        metrics: dict[int, list[Mapping[str, float]]] = {n: [] for n in moments}
        for _ in range(DRAWS):
            redrawn = {n: of.with_more_noise(generator) for n, of in moments.items()}
            least_squares = redrawn[TRAINED].ridge(l2)
            solutions.append(least_squares)
            if has_classes:
                solutions[-1] = redrawn[TRAINED].discriminant(l2)
            for number, of_pass in redrawn.items():
                metrics[number].append(of_pass.metrics(least_squares))
        return cls(
            Solution(
                np.std([each.coefficients for each in solutions], axis=0),
                np.std([each.intercept for each in solutions], axis=0),
            ),
            {number: _intervals(values) for number, values in metrics.items()},
        )

    @property
    def drowned(self) -> tuple[int, ...]:
        """The passes of whose metrics the noise leaves too little to tell them."""
        return tuple(
            number
            for number, metrics in self.metrics.items()
            # both ends are 0 where noise outweighs the squares
            if not metrics["loss"][1] < MOST_WIDTH * metrics["loss"][0]
        )

    def known(
        self, metrics: Mapping[int, Mapping[str, float]]
    ) -> dict[int, dict[str, float]]:
        """Return metrics by pass and name, NaN for those that noise drowns."""
        return {
            number: dict.fromkeys(values, math.nan)
            if number in self.drowned
            else dict(values)
            for number, values in metrics.items()
        }

    def warnings(self) -> Iterator[str]:
        """Yield which losses the noise leaves little of."""
        for number in self.drowned:
            low, high = self.metrics[number]["loss"]
            yield (
                f"the noise leaves little of the {PASS_NAMES[number]} metrics, which "
                f"are not known: the loss is between {low:.3g} and {high:.3g}. Mode "
                "evaluate tells, where scores may leave"
            )

    @property
    def verdict(self) -> str:
        """What a verdict says of metrics that noise drowns; "" if it drowns none."""
        names = " and ".join(PASS_NAMES[number] for number in self.drowned)
        return f"; noise hides how good the model is ({names} metrics)" if names else ""


def _intervals(
    metrics: Sequence[Mapping[str, float]],
) -> dict[str, Interval]:
    """Return where 95 % of the values of each metric are, of those that have it."""
    names = dict.fromkeys(name for values in metrics for name in values)
    intervals = {}
    for name in names:
        values = [each[name] for each in metrics if name in each]
        low, high = np.quantile(values, (0.025, 0.975))
        intervals[name] = (float(low), float(high))
    return intervals


def check_noise(noises: list[TableNoise], settings: Settings) -> None:
    """Refuse a run whose model would be worse than one without its private tables."""
    for refusal in refusals(noises, settings):
        raise SettingsError(refusal)
