"""Runs on the store, made once per process, and the reference problem of each."""

import functools
from pathlib import Path

import numpy as np
import pytest

from client_apps.data.saved_models import SavedModel
from tests.support import federated
from tests.support.reference import joins
from tests.support.reference.training import Centralised, SgdSettings, centralised, sgd
from tp_flower.privacy.key_agreement import GroupSecret

LEFT = """FROM orders o LEFT JOIN customers c ON o.customer = c.id AND o.day < 20
LEFT JOIN items i ON o.item = i.item"""
FRAMES = federated.store()
FRAMES["orders"]["w"] = FRAMES["orders"]["day"] % 4
LAYOUTS = {
    **federated.LAYOUTS,
    "mixed": lambda frames: {
        **federated.whole(frames),
        "customers": federated.sharded(frames)["customers"],
    },
}
each_loss = pytest.mark.parametrize("loss", list(federated.LABELS))
each_layout = pytest.mark.parametrize("layout", ["whole", "sharded"])


def query(
    loss: str = "squared", source: str = federated.SOURCE, weight: str = ""
) -> str:
    """The store's query over some joins, whose rows may have a weight."""
    weighted = f"{weight} AS weight, " if weight else ""
    label = federated.LABELS[loss]
    return f"SELECT {label} AS label, {weighted}{federated.FEATURES} {source}"


def trained(
    loss: str,
    layout: str = "whole",
    strategy: str = "admm",
    source: str = federated.SOURCE,
    *,
    weight: str = "",
    one_site: bool = False,
    **settings: object,
) -> federated.Run:
    """Train on the store; with ``one_site``, without which long runs are slower."""
    sql = query(loss, source, weight)
    how = {"device": "cpu", "l2": 0.01, "task": federated.task_of(loss), "loss": loss}
    settings = {**how, **settings}
    return _trained(sql, layout, strategy, one_site, **settings)


@functools.cache
def _trained(sql, layout, strategy, one_site, **settings) -> federated.Run:
    shards = LAYOUTS[layout](FRAMES)
    sites = [shards] if one_site else federated.one_per_site(shards)
    return federated.run_query(sql, sites, strategy, **settings)


def saved_parameters(folder: Path) -> list[np.ndarray]:
    """The parameters of all parts of models that the sites of a folder have saved."""
    paths = sorted(folder.rglob("part-*"))
    assert paths
    return [SavedModel.load(path).parameters for path in paths]


def assert_same_models(folder: Path, other: Path) -> None:
    """Assert that the sites of two folders have saved the same parameters."""
    models = saved_parameters(folder), saved_parameters(other)
    for theta, expected in zip(*models, strict=True):
        np.testing.assert_array_equal(theta, expected)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """How far apart two parameter vectors are, relative to their size."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def after(finished: federated.Run, epoch: int) -> np.ndarray:
    """All parameters after an epoch, table after table in the query's order."""
    return np.concatenate(list(finished.parameters[epoch].values()))


def batches_of(finished: federated.Run) -> list[list[list[int]]]:
    """Per epoch the joined rows of every batch, in the order they were trained on."""
    plan = finished.strategy.method._batches.plan
    epochs: dict[int, list[list[int]]] = {}
    taken: set[int] = set()
    for seen in finished.seen:
        if seen.action != "train.sgd" or seen.is_reply or seen.round in taken:
            continue
        taken.add(seen.round)
        epoch = next(r.epoch for r in finished.history if r.round == seen.round)
        rows = plan.order[plan.slice(seen.header["batch"])].tolist()
        epochs.setdefault(epoch, []).append(rows)
    return list(epochs.values())


def store_labels(loss: str) -> np.ndarray:
    qty = FRAMES["orders"]["qty"].to_numpy()
    if federated.task_of(loss) == "regression":
        return qty
    if loss == "logistic":
        return (qty > 3).astype(float)
    return (qty > 2).astype(float) + (qty > 4)


def reference_of(
    run: federated.Run, source: str = federated.SOURCE, weight: str = "1"
) -> Centralised:
    """The problem on the join that DuckDB materialises, with the run's split.

    Where a LEFT JOIN found no row, the features of its table are zero.

    Args:
        run: that is compared.
        source: the query from FROM on.
        weight: what DuckDB weighs each joined training row by.
    """
    loss = run.problem.objective.name
    tested = run.tested["o"]
    # an order is trained on or tested, never both
    assert not (run.trained["o"] & tested).any()
    positions, weights = joins.weighted_positions(
        federated.whole(FRAMES),
        federated.ALIASES,
        f"{source} WHERE o.position_ NOT IN {(*np.flatnonzero(tested).tolist(), -1)}",
        weight,
    )
    counted = {row[0] for row, own in zip(positions, weights, strict=True) if own}
    assert counted == set(np.flatnonzero(run.trained["o"]))
    return centralised(
        FRAMES,
        federated.ALIASES,
        federated.COLUMNS,
        positions,
        ("o", store_labels(loss)),
        loss,
        run.strategy.settings.l2,
        GroupSecret.of_simulation(run.strategy.settings.seed).value,
        None if weight == "1" else np.array(weights),
    )


def sgd_of(
    run: federated.Run, how: SgdSettings, source: str = federated.SOURCE, **weight: str
) -> np.ndarray:
    """The parameters that SGD on the joined rows ends with, by the run's batches."""
    return sgd(reference_of(run, source, **weight), batches_of(run), how)[-1]


def assert_optimal(
    finished: federated.Run, excess: float, gradient: float = np.inf, **reference: str
) -> None:
    """Compare with the optimum of the joined rows by its gradient and its loss."""
    problem = reference_of(finished, **reference)
    assert np.abs(problem.gradient(finished.flat)).max() <= gradient
    best = problem.objective(problem.optimum())
    assert problem.objective(finished.flat) <= best * (1 + excess)


def loss_left(finished: federated.Run, **reference: str) -> float:
    """The share that is left of what the joined rows' objective can fall by from
    zero.
    """
    problem = reference_of(finished, **reference)
    best, start, end = map(
        problem.objective,
        (problem.optimum(), np.zeros_like(finished.flat), finished.flat),
    )
    return (end - best) / (start - best)
