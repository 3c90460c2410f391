"""How close to the centralised optimum the methods get, epoch by epoch, on flights."""

from dataclasses import replace

import numpy as np

from scripts.bench.runs import Check, Outcome, Trace, first_within, run_traced
from scripts.joined.additive_mlp import fit_additive_mlp
from scripts.joined.centralized import JoinedTable, join_tables, read_sources
from scripts.joined.optima import fit_linear
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.sources.flights import FLIGHTS_REGRESSION_SQL, FLIGHTS_SQL

ORGANISATIONS = 5
TASKS = {"regression": FLIGHTS_REGRESSION_SQL, "classification": FLIGHTS_SQL}

OPTIMUM_GAP = 0.001
EPOCHS_TO_OPTIMUM = {"regression": 8, "classification": 12}
CONSENSUS_GAP = 0.005
CONSENSUS_EPOCHS = 12
MLP_RATIO = 1.01


def measure_convergence() -> Outcome:
    """Run every method with default settings on both tasks."""
    outcome = Outcome()
    for task, sql in TASKS.items():
        settings = Settings(task=task)
        joined = join_tables(Query.from_sql(sql), settings, read_sources(""))
        _measure_linear(outcome, settings, sql, joined)
        _measure_mlp(outcome, settings, sql, joined)
    return outcome


def _measure_linear(
    outcome: Outcome, settings: Settings, sql: str, joined: JoinedTable
) -> None:
    training = joined.part(test=False)
    fitted = fit_linear(joined.loss, *training, settings.l2)
    optimum = fitted.objective(joined.loss, *training, settings.l2)
    runs = {
        "ADMM": settings,
        "ADMM, consensus": replace(settings, lou="consensus"),
        "SGD": replace(settings, strategy="sgd"),
    }
    gaps = {
        name: [
            value / optimum - 1.0
            for value in run_traced(sql, chosen, ORGANISATIONS).objective
        ]
        for name, chosen in runs.items()
    }
    task = settings.task
    outcome.curves[f"{task}, linear: objective above the optimum's"] = gaps
    outcome.facts[f"{task}: objective of the optimum"] = optimum
    for name, values in gaps.items():
        outcome.facts[f"{task}, {name}: last gap"] = values[-1]
    outcome.checks += [
        Check(
            f"{task}, ADMM: epochs to {OPTIMUM_GAP:.1%} of the optimum",
            first_within(gaps["ADMM"], OPTIMUM_GAP),
            EPOCHS_TO_OPTIMUM[task],
        ),
        Check(
            f"{task}, ADMM with consensus: gap at epoch {CONSENSUS_EPOCHS}",
            gaps["ADMM, consensus"][CONSENSUS_EPOCHS - 1],
            CONSENSUS_GAP,
            "%",
        ),
    ]


def _measure_mlp(
    outcome: Outcome, settings: Settings, sql: str, joined: JoinedTable
) -> None:
    trace: Trace = run_traced(sql, replace(settings, model="mlp"), ORGANISATIONS)
    rng = np.random.default_rng(settings.seed)
    joint = fit_additive_mlp(joined, settings, rng)
    own = [float(metrics["loss"]) for metrics in trace.test]
    task = settings.task
    outcome.curves[f"{task}, MLP: test loss"] = {"ADMM": own, "joint Adam": joint}
    outcome.facts[f"{task}, MLP: seconds of the run"] = trace.seconds[-1]
    outcome.facts[f"{task}, MLP: test loss, run and joint"] = [own[-1], joint[-1]]
    outcome.checks.append(
        Check(
            f"{task}, MLP: test loss at epoch {len(own)} over joint training's",
            own[-1] / joint[-1],
            MLP_RATIO,
        )
    )
