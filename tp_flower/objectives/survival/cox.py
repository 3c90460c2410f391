"""Proportional hazards: the partial likelihood of times to an event.

The hazard of a row is h0(t) exp(h), with a baseline h0 that nobody names (Cox 1972).
With d deaths D at an event time t, and the rows R that are at risk then,

    loss = - sum_t [ sum_{i in D} w_i h_i
                     - w' sum_{l=0}^{d-1} log(sum_R w e^h - l/d sum_D w e^h) ]

where w' is the mean weight of D, of weights whose mean is 1 (Efron 1977, "The
efficiency of Cox's likelihood function for censored data", for ties; Therneau and
Grambsch 2000, "Modeling survival data", sections 3.3 and 7.2, for weights). A row is at
risk from its entry, exclusive, to its time, inclusive, in its own stratum. It is R's
``coxph(ties = "efron")``, and without ties also Breslow's and the exact likelihood.

It is not separable: who is at risk decides a row's derivatives. A row's own loss is its
death's share of the sum,

    loss_i = -h_i + (1/d) sum_l log(..)     0 of a row without an event

and its derivatives are those of the whole sum by its score, divided by its weight.

Notation:
    N  rows    K  event times    E  deaths
    f  ``ranks``, l / d          q  ``share`` of the deaths in the sum over R
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final, Self

import numpy as np

from tp_flower.arrays import FloatArray, mean
from tp_flower.objectives.log_link import exponential
from tp_flower.objectives.objective import (
    TARGET,
    WEIGHTS,
    Objective,
    RowInformation,
)
from tp_flower.objectives.response import HAZARD, Response
from tp_flower.objectives.survival.baseline import (
    MOST_TIMES,
    Baseline,
    StratumBaselines,
)
from tp_flower.objectives.survival.brier import integrated_brier
from tp_flower.objectives.survival.concordance import Survival, concordance
from tp_flower.objectives.survival.levels import Clock, Steps
from tp_flower.objectives.survival.risk_sets import RiskSets
from tp_flower.objectives.survival.stretches import Stretches
from tp_flower.objectives.target import ENTRY, EVENT, STRATA, TIME, Target

BRIER: Final = "integrated_brier"
HAZARD_RATIO: Final = "hazard_ratio"
SURVIVAL: Final = "survival"
QUARTILES: Final = (0.25, 0.5, 0.75)
LEAST_CURVATURE: Final = 1e-12


@dataclass(frozen=True)
class SurvivalResponse(Response):
    """A logarithm of the hazard, relative to the baseline's.

    Attributes:
        baselines: of each stratum, once a model is trained.
        times: at which predictions have the probability of no event so far, where
            there is one stratum.

    >>> baselines = (Baseline((3.0,), (0.5,)),)
    >>> response = SurvivalResponse("cox", baselines=baselines, times=(4.0,))
    >>> details = response.details(np.array([[0.0]]))
    >>> {name: values.round(4).tolist() for name, values in details.items()}
    {'hazard_ratio': [1.0], 'survival.4': [0.6065]}
    """

    headline: ClassVar[str] = "loss"
    ratio: ClassVar[str] = "hazard ratio"
    reads_scores: ClassVar[bool] = True
    baselines: tuple[Baseline, ...] = ()
    times: tuple[float, ...] = ()

    @property
    def has_survival(self) -> bool:
        """Whether one baseline is that of all rows."""
        return [baseline.stratum for baseline in self.baselines] == [None]

    def predict(self, scores: FloatArray) -> FloatArray:
        """Return the scores, which are logarithms of hazard ratios."""
        return scores[:, 0].copy()

    def details(self, scores: FloatArray) -> Mapping[str, FloatArray]:
        """Return the hazard ratios, and the probabilities of no event by some times."""
        details = {HAZARD_RATIO: exponential(scores[:, 0])}
        if self.has_survival:
            (baseline,) = self.baselines
            details |= {
                f"{SURVIVAL}.{time:g}": baseline.survival(scores[:, 0], time)
                for time in self.times
            }
        return details

    def report_entries(self) -> dict[str, object]:
        """Return the survival of a score of 0 in each stratum, as `survival`."""
        entries = []
        for baseline in self.baselines:
            hazards = np.array(baseline.hazards)
            entry = {
                "times": list(baseline.times),
                "hazards": hazards.tolist(),
                "survival": np.exp(-hazards).tolist(),
            }
            if baseline.stratum is not None:
                entry = {"stratum": baseline.stratum, **entry}
            entries.append(entry)
        return {"survival": entries}

    def compare(self, *_: FloatArray | None) -> dict[str, object]:
        """Return {}: a time is not compared with a hazard."""
        return {}


@dataclass(frozen=True, eq=False)
class AtRisk:
    """Sums over the rows at risk, and with an event, at each event time.

    Attributes:
        log_sum: the log of sum_R w e^h, (K,).
        share: q, (K,).
        left: 1 - f q, of each death, (E,).
    """

    log_sum: FloatArray
    share: FloatArray
    left: FloatArray


class Cox(Objective):
    """The negative partial log likelihood, with Efron's ties.

    Its target has the columns "time" and "event", and perhaps "entry" and "strata".

    >>> from tp_flower.objectives import Target
    >>> died = np.array([[1.0, 1.0], [2.0, 1.0]])
    >>> objective = Cox(Target(died, names=("time", "event")))
    >>> objective.gradient(np.zeros((2, 1))).tolist()
    [[-0.5], [0.5]]
    """

    name = "cox"
    class_counts = range(1)
    label_names = (TIME, EVENT)
    is_separable = False
    has_likelihood = True
    dispersion_is_known = True

    @classmethod
    def make_response(cls, _classes: tuple[str, ...], _kind: str) -> SurvivalResponse:
        """Return the score as the logarithm of a hazard ratio."""
        return SurvivalResponse(cls.name, link=HAZARD)

    @classmethod
    def refusal(cls, target: Target) -> str:
        """Return which times or events nobody can have, or ""."""
        time, event = map(target.column_named, cls.label_names)
        if (least := float(time.min(initial=0.0))) < 0.0:
            return (
                f"a time is negative, {least:g}: filter these rows in the query, or "
                "count all times from an earlier moment"
            )
        is_other = ~np.isin(event, (0.0, 1.0))
        if is_other.any():
            return (
                f"an event is {event[is_other][0]:g}, neither 0 nor 1: write a "
                "condition, such as (status = 2) AS event"
            )
        entry = target.column(ENTRY)
        if entry is None or not (late := int(np.count_nonzero(entry >= time))):
            return ""
        return (
            f"the entry is not before the time in {late} joined rows, which are never "
            "at risk: filter them in the query, WHERE entry < time"
        )

    def refusal_to_train(self) -> str:
        """Return why nothing is learned from its rows, or ""."""
        events = int(np.count_nonzero(self.survival.is_event))
        if not events:
            return (
                f"all {len(self)} joined training rows are censored: none has an event"
            )
        if events == 1:
            return f"one of the {len(self)} joined training rows has an event, no other"
        comparable = concordance(np.zeros(len(self)), self.survival)
        if np.isnan(comparable):
            return (
                f"no two of the {len(self)} joined training rows can be compared: at "
                "no event is there a row at risk that has its own later"
            )
        return ""

    @cached_property
    def survival(self) -> Survival:
        """When the rows have an event or are censored."""
        strata = self.target.column(STRATA)
        return Survival(
            self.target.column_named(TIME),
            self.target.column_named(EVENT) > 0.0,
            self.target.column(ENTRY),
            None if strata is None else np.unique(strata, return_inverse=True)[1],
        )

    @cached_property
    def risk_sets(self) -> RiskSets:
        """The rows at risk at each event time: scores do not change them."""
        survival = self.survival
        return RiskSets.of(
            survival.time, survival.is_event, survival.entry, survival.stratum
        )

    @cached_property
    def relative_weights(self) -> FloatArray:
        """The weights over their mean, (N,): of them, log sums have no unit."""
        if self.weights is None:
            return np.ones(len(self))
        if not len(self):
            return self.weights
        relative: FloatArray = self.weights / self.weights.mean()
        return relative

    @cached_property
    def mean_weights(self) -> FloatArray:
        """The mean relative weight of the deaths at each event time, w', (K,)."""
        sets = self.risk_sets
        sums = sets.sums_of_deaths(self.relative_weights[sets.deaths])
        means: FloatArray = sums / sets.counts
        return means

    @cached_property
    def _log_weights(self) -> FloatArray:
        return np.log(self.relative_weights)

    def on(self, vectors: Mapping[str, FloatArray]) -> Self:
        """Return the objective of other rows; of the same ones itself.

        A kernel has all rows at once, whose risk sets are ready.
        """
        if np.array_equal(vectors[TARGET], self.target.columns) and _are_equal(
            vectors.get(WEIGHTS), self.weights
        ):
            return self
        return super().on(vectors)

    def base_scores(self) -> FloatArray:
        """Return 0: any constant is as good, and is the baseline's."""
        return np.zeros(1)

    def at_risk(self, scores: FloatArray) -> AtRisk:
        """Return the sums over risk sets at scores (N, 1)."""
        sets = self.risk_sets
        logs = scores[:, 0] + self._log_weights
        log_sum = sets.spans.at_risk(logs)
        share = np.exp(sets.log_sums_of_deaths(logs) - log_sum)
        # the deaths are at risk: more than the whole is rounding
        share = np.minimum(share, 1.0)
        return AtRisk(log_sum, share, 1.0 - sets.ranks * share[sets.time_of])

    def row_values(self, scores: FloatArray) -> FloatArray:
        """Return the share of each row's event in the sum, 0 without one."""
        sets = self.risk_sets
        risk = self.at_risk(scores)
        of_time = risk.log_sum + sets.sums_of_deaths(np.log(risk.left)) / sets.counts
        values = np.zeros(len(self))
        values[sets.deaths] = of_time[sets.time_of] - scores[sets.deaths, 0]
        return values

    def log_hazards(self, risk: AtRisk) -> FloatArray:
        """Return the log of the baseline hazard of each event time, (K,).

        It is w' sum_l 1 / (sum_R - l/d sum_D), Efron's estimate: that of R's
        ``basehaz``, at scores as they are.
        """
        sums = self.risk_sets.sums_of_deaths(1.0 / risk.left)
        hazards: FloatArray = np.log(self.mean_weights * sums) - risk.log_sum
        return hazards

    def baselines(self, scores: FloatArray) -> list[Baseline]:
        """Return the baseline of each stratum with an event, from scores (N, 1)."""
        sets = self.risk_sets
        hazards = np.exp(self.log_hazards(self.at_risk(scores)))
        strata = self.target.column(STRATA)
        numbers = [None] if strata is None else np.unique(strata).tolist()
        strata_baselines = []
        for code in np.unique(sets.strata).tolist():
            rows = sets.strata == code
            times = tuple(sets.times[rows].tolist())
            steps = tuple(np.cumsum(hazards[rows]).tolist())
            strata_baselines.append(Baseline(times, steps, numbers[code]))
        most = max(MOST_TIMES // max(len(strata_baselines), 1), 2)
        return [
            baseline.thinned(most, self.event_quartiles)
            for baseline in strata_baselines
        ]

    @property
    def event_quartiles(self) -> tuple[float, ...]:
        """The quartiles of the times of the rows with an event; none without any."""
        times = self.survival.time[self.survival.is_event]
        if not len(times):
            return ()
        quartiles = np.quantile(times, QUARTILES, method="inverted_cdf")
        return tuple(np.unique(quartiles).tolist())

    def fit_response(self, scores: FloatArray) -> SurvivalResponse:
        """Return the response with the baselines, and the quartiles of event times."""
        return SurvivalResponse(
            self.name,
            link=HAZARD,
            baselines=tuple(self.baselines(scores)),
            times=self.event_quartiles,
        )

    def fitted_metrics(
        self, scores: FloatArray, response: Response
    ) -> dict[str, float]:
        """Return the integrated Brier score by the baseline that training has fitted.

        There is none where rows enter late, as Kaplan and Meier's weights are of rows
        that are at risk from the beginning, nor where one is of a stratum that had no
        event in training.
        """
        is_late = self.survival.entry is not None
        if is_late or not isinstance(response, SurvivalResponse):
            return {}
        baseline = self._baseline_of_rows(response.baselines)
        if baseline is None:
            return {}
        brier = integrated_brier(scores[:, 0], self.survival, baseline, self.weights)
        return {} if np.isnan(brier) else {BRIER: brier}

    def _baseline_of_rows(
        self, baselines: Sequence[Baseline]
    ) -> Baseline | StratumBaselines | None:
        """Return the baselines of the rows, by stratum; None where some have none."""
        places = {baseline.stratum: place for place, baseline in enumerate(baselines)}
        strata = self.target.column(STRATA)
        if strata is None:
            return baselines[places[None]] if None in places else None
        numbers, inverse = np.unique(strata, return_inverse=True)
        found = [places.get(number) for number in numbers.tolist()]
        if None in found:
            return None
        return StratumBaselines(baselines, np.array(found, np.intp)[inverse])

    @cached_property
    def stretches(self) -> Stretches:
        """The stretches of time over which information is added up."""
        return Stretches.of(self.risk_sets)

    def information_by_rows(self, scores: FloatArray) -> RowInformation:
        """Return the information, by stretches of time (S of them).

        What is beside the rows' weights is in proportion to the hazards that they have
        had in each stretch, and its features' sums to means of the rows at risk; see
        :mod:`tp_flower.objectives.survival.levels`.
        """
        sets = self.risk_sets
        risk = self.at_risk(scores)
        shares = risk.left**-2
        whole, late, later = (
            sets.sums_of_deaths(sets.ranks**power * shares) for power in range(3)
        )
        logs = np.log(self.mean_weights) - 2.0 * risk.log_sum
        spread = np.where(sets.counts > 1, later - late**2 / whole, 0.0)
        with np.errstate(divide="ignore"):
            ties = logs + np.log(np.maximum(spread, 0.0))
        clock = Clock(
            sets,
            Steps(logs + np.log(whole), late / whole, ties),
            self.stretches.of_time,
            scores[:, 0] + self._log_weights,
        )
        first_deaths = np.searchsorted(sets.time_of, clock.first)
        at_risk = risk.log_sum[sets.time_of] + np.log(risk.left)
        means, scales = clock.means(np.minimum.reduceat(at_risk, first_deaths))
        return RowInformation(
            self.weigh(self._expected(scores, risk)),
            means,
            scales,
            self.stretches.fewest,
            clock.clusters(),
        )

    def _expected(self, scores: FloatArray, risk: AtRisk) -> FloatArray:
        """Return how many events a row's hazard has had by its time, (N,).

        Of the l-th death at a time the others are at risk by 1 - l/d of them.
        """
        sets = self.risk_sets
        eta = scores[:, 0]
        late = self.mean_weights * sets.sums_of_deaths(sets.ranks / risk.left)
        expected = np.exp(eta + sets.spans.over_times(self.log_hazards(risk)))
        ratios = np.exp(eta[sets.deaths] - risk.log_sum[sets.time_of])
        expected[sets.deaths] -= late[sets.time_of] * ratios
        return expected

    def gradient(self, scores: FloatArray) -> FloatArray:
        """Return the expected events less those that were: martingale residuals."""
        expected = self._expected(scores, self.at_risk(scores))
        gradient: FloatArray = (expected - self.survival.is_event)[:, None]
        return gradient

    def hessian(self, scores: FloatArray) -> FloatArray:
        """Return the second derivative by the row's own score, at least 0."""
        sets = self.risk_sets
        eta = scores[:, 0]
        risk = self.at_risk(scores)
        sums = sets.sums_of_deaths(1.0 / risk.left**2)
        logs = np.log(self.mean_weights * sums) - 2.0 * risk.log_sum
        squares = np.exp(2.0 * eta + self._log_weights + sets.spans.over_times(logs))
        late = sets.ranks * (2.0 - sets.ranks) / risk.left**2
        of_time = self.mean_weights * sets.sums_of_deaths(late)
        ratios = np.exp(
            2.0 * (eta[sets.deaths] - risk.log_sum[sets.time_of])
            + self._log_weights[sets.deaths]
        )
        squares[sets.deaths] -= of_time[sets.time_of] * ratios
        return np.maximum(self._expected(scores, risk) - squares, 0.0)[:, None]

    def curvature(self, base: FloatArray) -> float:
        """Return the mean second derivative at a constant; 1 without labels."""
        if not (self.target.has_label and len(self)):
            return 1.0
        hessian = self.hessian(np.broadcast_to(base, (len(self), 1)))[:, 0]
        return max(float(mean(hessian, self.weights)), LEAST_CURVATURE)

    def measure(self, scores: FloatArray, value: float) -> dict[str, float]:
        """Return Harrell's concordance, and the partial log likelihood."""
        return {
            "concordance": concordance(scores[:, 0], self.survival, self.weights),
            "log_likelihood": -value * self.mass,
        }


def _are_equal(left: FloatArray | None, right: FloatArray | None) -> bool:
    if left is None or right is None:
        return left is right
    return np.array_equal(left, right)
