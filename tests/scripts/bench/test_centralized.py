"""The joined table that runs are compared with is compared with pandas; its models."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse as sp

from client_apps.app import app
from scripts.compare_centralized import judge, main
from scripts.data.make_store import STORE_CLASSIFICATION_SQL, STORE_SQL, make_store
from scripts.joined.centralized import JoinedTable, join_tables, simulated_hasher
from scripts.joined.models import (
    Problem,
    fit_linear,
    fit_ridge,
    fit_scikit_learn,
    train_lbfgs,
    train_sgd,
)
from strategies import TablePuppetADMM
from strategies.run.grid import InProcessGrid
from tp_flower.features.statistics import category_purpose
from tp_flower.joins.mapping import split_rows
from tp_flower.learning.losses import LogisticLoss, SquaredLoss, sigmoid
from tp_flower.query import Query
from tp_flower.randomness import Stream, generator
from tp_flower.reports.records import write_report
from tp_flower.settings import Settings
from tp_flower.sources.shards import (
    MEMORY_PREFIX,
    load_tables,
    register_frames,
    release,
)

SETTINGS = Settings(task="regression", seed=3)
L2 = 1e-3


@pytest.fixture
def store() -> Mapping[str, list[pd.DataFrame]]:
    return make_store(orders=300, items=20, customers=40, seed=1)


@pytest.fixture
def token(store: Mapping[str, list[pd.DataFrame]]) -> Iterator[str]:
    name = register_frames(store, site="all")
    yield MEMORY_PREFIX + name
    release(name)


def joined_store(token: str, sql: str = STORE_SQL, task: str = "auto") -> JoinedTable:
    settings = Settings(task=task, seed=SETTINGS.seed)
    return join_tables(Query.from_sql(sql), settings, load_tables(token))


def naive_join(store: Mapping[str, list[pd.DataFrame]]) -> pd.DataFrame:
    tables = {
        name: pd.concat(shards, ignore_index=True) for name, shards in store.items()
    }
    joined = (
        tables["orders"]
        .reset_index(names="o")
        .merge(tables["items"].reset_index(names="i"), on="item_id")
        .merge(tables["customers"].reset_index(names="c"), on="customer_id")
    )
    return joined.sort_values(["o", "i", "c"], ignore_index=True)


def naive_encoding(
    table: str, whole: pd.Series, joined: pd.Series
) -> np.ndarray[Any, Any]:
    """One column, or one per category, by the statistics of ``whole``."""
    if pd.api.types.is_string_dtype(whole) or whole.dtype == object:
        key = simulated_hasher(SETTINGS.seed).purpose(
            category_purpose(table, str(whole.name))
        )
        hashes = key.hash_texts(pa.array(whole.unique(), pa.string()))
        categories = whole.unique()[np.lexsort((hashes[:, 1], hashes[:, 0]))]
        return np.stack([(joined == name).to_numpy(float) for name in categories], 1)
    values, seen = (
        column.to_numpy("datetime64[s]").astype(float)
        if column.dtype.kind == "M"
        else column.to_numpy(float)
        for column in (joined, whole)
    )
    scaled = (values - np.nanmean(seen)) / np.nanstd(seen)
    return np.nan_to_num(scaled)[:, None]


def test_matches_merge_and_encoding_by_pandas(
    store: Mapping[str, list[pd.DataFrame]], token: str
) -> None:
    table, naive = joined_store(token), naive_join(store)
    orders, items = store["orders"][0], store["items"][0]
    customers = pd.concat(store["customers"])
    rng = generator(SETTINGS.seed, Stream.SPLIT)
    held_out = split_rows(len(orders), SETTINGS.test_fraction, rng)
    wholes = {
        # the label table is encoded by its training rows
        **{name: orders[~held_out][name] for name in ("channel", "discount", "placed")},
        **{name: items[name] for name in ("part", "price", "weight", "fragile")},
        **{name: customers[name] for name in ("age", "income", "segment", "country")},
    }
    tables = "oooiiiicccc"
    expected = [
        naive_encoding(alias, whole, naive[name])
        for alias, (name, whole) in zip(tables, wholes.items(), strict=True)
    ]
    np.testing.assert_allclose(table.features, np.hstack(expected), atol=2e-6)
    np.testing.assert_array_equal(table.labels, naive["quantity"])
    np.testing.assert_array_equal(table.is_test, held_out[naive["o"]])
    for alias in "oic":
        np.testing.assert_array_equal(table.rows[alias], naive[alias])
    assert 0 < table.is_test.sum() < len(table.labels)
    assert list(table.columns) == ["o", "i", "c"]


def test_held_out_rows_are_counted_after_the_filters(
    store: Mapping[str, list[pd.DataFrame]], token: str
) -> None:
    table = joined_store(token, f"{STORE_SQL} WHERE o.discount > 0")
    orders = store["orders"][0]
    passing = np.flatnonzero(orders["discount"] > 0)
    rng = generator(SETTINGS.seed, Stream.SPLIT)
    held_out = passing[split_rows(len(passing), SETTINGS.test_fraction, rng)]
    np.testing.assert_array_equal(table.is_test, np.isin(table.rows["o"], held_out))


def test_is_the_problem_that_a_run_trains_on(
    store: Mapping[str, list[pd.DataFrame]], token: str
) -> None:
    table = joined_store(token, STORE_CLASSIFICATION_SQL)
    strategy = TablePuppetADMM(
        Query.from_sql(STORE_CLASSIFICATION_SQL), num_epochs=1, seed=SETTINGS.seed
    )
    strategy.start(InProcessGrid(app, [store]))
    federation = strategy.training_problem
    assert federation is not None
    assert federation.loss == table.loss
    assert federation.train_labels.sum() == table.part(test=False)[1].sum()
    assert len(federation.test_labels) == table.is_test.sum()
    widths = {name: own.features for name, own in federation.tables.items()}
    assert widths == {n: s.stop - s.start for n, s in table.columns.items()}


def test_ridge_is_at_its_optimum(token: str) -> None:
    features, labels = joined_store(token).part(test=False)
    fitted = fit_ridge(features, labels, L2)
    residual = fitted.scores(features)[:, 0] - labels
    gradient = features.T @ residual / len(labels) + L2 * fitted.weights[:, 0]
    # labels are about ten: these are relative errors of 1e-9
    assert np.abs(gradient).max() < 1e-8
    assert abs(residual.mean()) < 1e-8


def test_newton_ends_where_the_gradient_is_zero(token: str) -> None:
    features, labels = joined_store(token, STORE_CLASSIFICATION_SQL).part(test=False)
    fitted = fit_linear(LogisticLoss(), features, labels, L2)
    excess = sigmoid(fitted.scores(features)[:, 0]) - labels
    gradient = features.T.astype(float) @ excess / len(labels)
    assert np.abs(gradient + L2 * fitted.weights[:, 0]).max() <= 1e-10
    assert abs(excess.mean()) <= 1e-10


def test_scikit_learn_solves_the_same_problem(token: str) -> None:
    features, labels = joined_store(token, STORE_CLASSIFICATION_SQL).part(test=False)
    exact = fit_linear(LogisticLoss(), features, labels, L2)
    other = fit_scikit_learn(features, labels, L2, tol=1e-8, max_iter=10_000)
    both = [f.objective(LogisticLoss(), features, labels, L2) for f in (exact, other)]
    assert both[0] == pytest.approx(both[1], rel=1e-6)
    assert both[0] <= both[1] + 1e-12


def test_the_objective_counts_the_penalty_but_not_the_intercept() -> None:
    features = np.array([[1.0], [-1.0]], dtype=np.float32)
    fitted = fit_ridge(features, np.array([7.0, 3.0]), l2=1.0)
    # 1/2 (w - 2)^2 + 1/2 w^2 is least at w = 1, with the intercept at the mean
    assert fitted.weights.tolist() == [[pytest.approx(1.0)]]
    assert fitted.intercept.tolist() == [pytest.approx(5.0)]
    value = fitted.objective(SquaredLoss(), features, np.array([7.0, 3.0]), 1.0)
    assert value == pytest.approx(1.0)


THREE_CLASSES = STORE_SQL.replace(
    "o.quantity AS",
    "CASE WHEN o.quantity > 12 THEN 2 WHEN o.quantity > 8 THEN 1 ELSE 0 END AS",
)
QUERIES = {
    "squared": STORE_SQL,
    "logistic": STORE_CLASSIFICATION_SQL,
    "softmax": THREE_CLASSES,
}
STORE = make_store(orders=500, items=20, customers=40, seed=1)
TASKS = {
    "squared": Settings(task="regression", seed=3, l2=1e-3),
    "logistic": Settings(task="classification", seed=3, l2=1e-3),
    "softmax": Settings(task="classification", seed=3, l2=1e-3),
}


@pytest.fixture(scope="module", params=list(QUERIES))
def loss(request: pytest.FixtureRequest) -> str:
    return request.param


@cache
def problem_of(loss: str) -> Problem:
    token = register_frames(STORE, site="all")
    sources = load_tables(MEMORY_PREFIX + token)
    joined = join_tables(Query.from_sql(QUERIES[loss]), TASKS[loss], sources)
    release(token)
    return Problem.of(joined, TASKS[loss])


def excess(loss: str, fitted) -> float:
    """How far the objective is above the optimum's, relatively."""
    problem = problem_of(loss)
    training = (problem.loss, problem.train, problem.train_labels, problem.l2)
    return fitted.objective(*training) / problem.optimum().objective(*training) - 1.0


def test_lbfgs_reaches_the_optimum(loss: str) -> None:
    curve = train_lbfgs(problem_of(loss), TASKS[loss])
    # the products are in float32; for three classes scikit-learn is the optimum
    assert abs(excess(loss, curve.fitted)) < 1e-5
    assert len(curve.test) == len(curve.seconds) > 5
    assert curve.seconds == sorted(curve.seconds)


@pytest.mark.parametrize("train", [train_lbfgs, train_sgd])
def test_a_sparse_table_gives_the_same_steps(loss: str, train) -> None:
    dense = problem_of(loss)
    sparse = replace(
        dense, train=sp.csr_matrix(dense.train), test=sp.csr_matrix(dense.test)
    )
    settings = replace(TASKS[loss], num_epochs=2, learning_rate=0.01)
    one, other = (train(problem, settings) for problem in (dense, sparse))
    for metrics, expected in zip(one.test[:4], other.test[:4], strict=True):
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def test_sgd_reaches_the_optimum(loss: str) -> None:
    settings = replace(TASKS[loss], num_epochs=80, batch_size=100, decay=0.1)
    curve = train_sgd(problem_of(loss), settings)
    assert len(curve.test) == 80
    assert excess(loss, curve.fitted) < 0.005


def test_one_batch_and_no_momentum_is_gradient_descent() -> None:
    problem = problem_of("squared")
    settings = replace(
        TASKS["squared"],
        num_epochs=1,
        batch_size=len(problem.train_labels),
        momentum=0.0,
        learning_rate=0.1,
    )
    curve = train_sgd(problem, settings)
    mean = problem.train_labels.mean()
    gradient = problem.train.T @ (mean - problem.train_labels)
    weights = -0.1 * gradient / len(problem.train_labels)
    np.testing.assert_allclose(
        curve.fitted.weights[:, 0], weights, rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(curve.fitted.intercept, [mean], rtol=1e-9)


@pytest.mark.parametrize("train", [train_lbfgs, train_sgd])
def test_training_ends_when_it_is_good_enough(train) -> None:
    seen = []

    def until(metrics):
        seen.append(metrics)
        return len(seen) == 2

    settings = replace(TASKS["logistic"], num_epochs=5)
    curve = train(problem_of("logistic"), settings, until)
    assert len(curve.test) == 2
    assert curve.test == seen


def report_of(auc: float, models: str = "") -> dict[str, Any]:
    return {
        "final": {"test": {"auc": auc, "log_loss": 0.5}},
        "tables": [{"table": "o"}],
        "settings": {"models": models},
    }


@pytest.mark.parametrize(
    ("strategy", "auc", "is_equal"),
    [
        ("admm", 0.7015, True),
        ("admm", 0.7025, False),
        ("admm", 0.6975, False),
        ("sgd", 0.691, True),
        ("sgd", 0.689, False),
    ],
)
def test_verdicts_on_auc(strategy: str, auc: float, is_equal: bool) -> None:
    text, verdict = judge(report_of(auc), Settings(strategy=strategy), {"auc": 0.7})
    assert verdict == is_equal
    assert ("NOT EQUAL" in text) != is_equal


def test_rmse_is_compared_relatively() -> None:
    report = {**report_of(0.0), "final": {"test": {"rmse": 40.1}}}
    assert not judge(report, Settings(), {"rmse": 40.0})[1]
    assert judge(report, Settings(strategy="sgd"), {"rmse": 40.0})[1]
    mlp = Settings(models=(("o", "mlp"),))
    text, is_equal = judge(report, mlp, {"rmse": 20.0})
    assert is_equal
    assert "no verdict" in text


@pytest.fixture
def run_folder(store: Mapping[str, list[pd.DataFrame]], tmp_path: Path) -> Path:
    """The output folder of a run over tables in files."""
    lines = []
    for table, shards in store.items():
        for number, frame in enumerate(shards):
            frame.to_csv(tmp_path / f"{table}-{number}.csv", index=False)
            lines.append(f'[[tables.{table}.shards]]\npath = "{table}-{number}.csv"')
    (tmp_path / "tables.toml").write_text("\n".join(lines))
    settings = Settings(
        sql=STORE_SQL, task="regression", tables=str(tmp_path / "tables.toml")
    )
    strategy = TablePuppetADMM(Query.from_sql(STORE_SQL), settings)
    strategy.start(InProcessGrid(app, 2, run_config={"tables": settings.tables}))
    write_report(strategy.report, tmp_path)
    return tmp_path


def change_report(folder: Path, **changes: object) -> None:
    path = folder / "report.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_compares_a_run_with_the_joined_table(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run_folder)]) == 0
    out = capsys.readouterr().out
    assert "equal to training on the joined table" in out
    for shown in ("tp_flower ADMM", "ridge regression", "rounds", "bytes up", "RMSE"):
        assert shown in out

    change_report(run_folder, final={"test": {"rmse": 9.0, "r2": 0.0}})
    assert main([str(run_folder)]) == 1
    assert "NOT EQUAL to training on the joined table" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "failed: no rows"}, "did not complete: failed: no rows"),
        ({"joined-rows": {"train": 1, "test": 1}}, "the run joined"),
        ({"settings": {"mode": "explain"}}, "mode = 'explain': nothing was trained"),
    ],
)
def test_runs_that_cannot_be_compared(
    run_folder: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    message: str,
) -> None:
    change_report(run_folder, **changes)
    assert main([str(run_folder)]) == 1
    assert message in capsys.readouterr().err


def test_weighted_runs_are_not_compared_with_unweighted_rows(
    store: Mapping[str, list[pd.DataFrame]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    grid = InProcessGrid(app, [store])
    query = Query.from_sql(STORE_SQL)
    strategy = TablePuppetADMM(query, num_epochs=1, row_weight="entity(i)")
    strategy.start(grid)
    write_report(strategy.report, tmp_path)
    grid.close()
    assert main([str(tmp_path)]) == 1
    assert "joined rows have weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), ("{", "is no report")]
)
def test_reports_that_cannot_be_read(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    message: str,
) -> None:
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    assert main([str(tmp_path)]) == 1
    assert message in capsys.readouterr().err
