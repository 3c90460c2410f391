"""Runs on labels that the features determine end "converged", at Ridge's optimum."""

import numpy as np
import pandas as pd
import pytest

from tests.support.examples import toys
from tests.support.federated import LocalGrid, Run, pieces, run_query, train, whole
from tp_flower.settings import PrivacySettings

CLEAR = PrivacySettings(scores="clear", unions="clear")
REPEATED = range(12)  # of the 200 toys that the fix was made with


def first_toy(rows: int = 20, keys: int = 5, noise: float = 0.0) -> tuple[dict, str]:
    """The tables and the query of y = 2 x + 3 z."""
    rng = np.random.default_rng(1)
    a = pd.DataFrame({"k": np.arange(rows) % keys, "x": np.arange(rows, dtype=float)})
    a["y"] = 2 * a["x"] + 3 * a["k"] + noise * 50 * rng.normal(size=rows)
    b = pd.DataFrame({"k": np.arange(keys), "z": np.arange(keys, dtype=float)})
    sql = "SELECT a.y AS label, a.x, b.z FROM a JOIN b ON a.k = b.k"
    return {"a": a, "b": b}, sql


def in_halves(frames: dict) -> dict:
    return {name: pieces(frame, len(frame) // 2) for name, frame in frames.items()}


def end_of(shards, sql: str, strategy: str = "cg", **settings: object) -> Run:
    how = {"num_epochs": 0, "task": "regression", **settings}
    return run_query(sql, [shards], strategy, **how)


@pytest.mark.parametrize("noise", [0.0, 1e-5, 1e-3])
@pytest.mark.parametrize(("rows", "keys"), [(20, 5), (300, 20)])
def test_the_first_toy_converges_in_a_few_epochs(rows, keys, noise):
    frames, sql = first_toy(rows, keys, noise)
    finished = end_of(whole(frames), sql, test_fraction=0.25)
    report = finished.report
    assert report.verdict == "converged: the gradient is below the tolerance"
    # without noise the penalty of 1e-4 alone is between the model and the labels
    assert report.final_test["r2"] > 1.0 - 1e-6 - 2 * noise
    assert len(finished.losses) <= 6
    assert finished.losses[-1] <= min(finished.losses) * (1.0 + 1e-3)


def test_admm_settles_where_rounding_does():
    frames, sql = first_toy()
    by_admm, by_cg = (
        end_of(whole(frames), sql, strategy, test_fraction=0.25).report
        for strategy in ("admm", "cg")
    )
    assert by_admm.verdict == "converged: the loss has settled"
    loss = by_cg.final_train["loss"]
    assert by_admm.final_train["loss"] == pytest.approx(loss, rel=0.05)


@pytest.mark.parametrize("privacy", [CLEAR, PrivacySettings()])
@pytest.mark.parametrize("layout", [whole, in_halves])
def test_without_a_penalty_it_ends_where_rounding_does(privacy, layout):
    frames, sql = first_toy()
    finished = end_of(
        layout(frames), sql, l2=0.0, tolerance=1e-9, test_fraction=1e-9, privacy=privacy
    )
    assert finished.report.verdict.startswith("converged")
    assert len(finished.losses) < 20
    # masked scores have 20 bits of the label's deviation
    assert 1.0 - finished.report.final_train["r2"] < 1e-9


@pytest.mark.cases("0", "1", "2", "3", "6", "7")
@pytest.mark.parametrize("seed", REPEATED)
def test_a_toy_ends_at_the_optimum_of_ridge(seed, tmp_path):
    toy = toys.toy(seed)
    shards = whole(toy.frames) if seed % 3 else in_halves(toy.frames)
    with LocalGrid([shards], state=tmp_path) as grid:
        strategy = train(
            grid,
            toy.sql,
            "cg",
            l2=toy.l2,
            num_epochs=0,
            test_fraction=1e-9,
            task="regression",
        )
    assert strategy.verdict.startswith("converged"), toy.traits
    optimum = toys.Optimum.of(toy)
    base = float(strategy.training_problem.base_score[0])
    reached = optimum.objective(toys.saved_weights(toy, tmp_path, base))
    # the gradient's tolerance allows 4.5e-6 of f, and many times that where tables
    # nearly determine each other; rounding 1e-9 of the label's variance. Without a
    # penalty features that are collinear but for a millionth of their size, which
    # float32 hardly holds, are left out.
    rounding = (1e-9 if toy.l2 else 1e-4) * optimum.variance
    assert reached <= optimum.objective(optimum.best()) * (1.0 + 1e-3) + rounding, (
        toy.traits
    )
