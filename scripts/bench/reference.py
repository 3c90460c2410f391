"""What methods are held against: models that are trained on the joined table."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from scripts.bench.curves import FINE_TOLERANCE, TOLERANCE, is_within
from scripts.data.dataset import Dataset
from scripts.joined.baselines import BASELINES
from scripts.joined.optima import fit_linear
from scripts.joined.problem import Problem
from tp_flower.learning.metrics import evaluate
from tp_flower.protocol import field_bytes
from tp_flower.protocol.training_messages import AdmmTarget
from tp_flower.reports.records import Metrics
from tp_flower.settings import Settings

STEPS: Mapping[str, int] = {"MLP": 4, "boosted trees": 100}
"""Epochs or trees where the default would take most of the benchmark's time."""

Found = dict[str, Any]


def measure_reference(dataset: Dataset, settings: Settings) -> Found:
    """Train all baselines on the joined table and measure them on the held-out rows.

    ``reference`` is the metric of the linear model at its optimum, ``guess`` that of
    the best constant score. ``floor`` is the least that an epoch could send: a float32
    per output for every row that takes part, up and down.
    """
    started = time.perf_counter()
    joined = dataset.joined(settings)
    problem = Problem.of(joined, settings)
    joined_at = time.perf_counter()
    fitted = fit_linear(joined.loss, problem.train, problem.train_labels, settings.l2)
    fitted_at = time.perf_counter()

    def metric_of(scores: Any) -> float:
        return evaluate(problem.loss, scores, problem.test_labels)[dataset.metric]

    reference = metric_of(fitted.scores(problem.test))
    base = problem.loss.base_score(problem.train_labels)
    rows = {table: len(np.unique(own)) for table, own in joined.rows.items()}
    return {
        "title": dataset.title,
        "metric": dataset.metric,
        "reference": reference,
        "guess": metric_of(np.tile(base, (len(problem.test_labels), 1))),
        "join-seconds": joined_at - started,
        "optimum-seconds": fitted_at - joined_at,
        "joined-rows": [len(problem.train_labels), len(problem.test_labels)],
        "features": problem.train.shape[1],
        "rows": rows,
        "floor": 2
        * sum(
            field_bytes(
                AdmmTarget, "target", {"trained": count, "outputs": joined.loss.outputs}
            )
            for count in rows.values()
        ),
        "baselines": _baselines(problem, settings, dataset.metric, reference),
    }


def _baselines(
    problem: Problem, settings: Settings, metric: str, reference: float
) -> Found:
    """Return what every baseline reached, after how many steps and seconds."""
    found: Found = {}
    for name, train in BASELINES.items():
        try:
            own = replace(settings, num_epochs=STEPS.get(name, settings.num_epochs))
            curve = train(problem, own, _enough(name, metric, reference))
        except ModuleNotFoundError as error:
            found[name] = {"missing": str(error.name)}
            continue
        values = [float(metrics[metric]) for metrics in curve.test]
        found[name] = {
            "last": values[-1],
            "steps": len(values),
            "seconds": curve.seconds[-1],
        }
        if name == "SGD":
            found[name]["metric"] = values
        within = [is_within(value, metric, reference, TOLERANCE) for value in values]
        if any(within):
            first = within.index(True)
            found[name] |= {
                "steps-to-1%": first + 1,
                "seconds-to-1%": curve.seconds[first],
            }
    return found


def _enough(
    name: str, metric: str, reference: float
) -> Callable[[Metrics], bool] | None:
    """Return when to end: L-BFGS at the optimum, the others after all their steps."""
    if name != "L-BFGS":
        return None

    def is_there(metrics: Mapping[str, float]) -> bool:
        return is_within(metrics[metric], metric, reference, FINE_TOLERANCE)

    return is_there
