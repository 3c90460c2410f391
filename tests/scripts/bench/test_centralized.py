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

from scripts.bench.datasets import Dataset
from scripts.compare_centralized import judge, main
from scripts.data.make_store import STORE_CLASSIFICATION_SQL, STORE_SQL, make_store
from scripts.data.make_store import main as make_files
from scripts.joined.centralized import JoinedTable, join_tables, simulated_hasher
from scripts.joined.models import Problem, fit_ridge, train_lbfgs
from strategies import TrainingStrategy
from tests.support import federated
from tests.support.federated import LocalGrid
from tests.support.files import case_table, read_json
from tests.support.reference.families import Family
from tp_flower.features.statistics import category_purpose
from tp_flower.query import Query
from tp_flower.randomness import Stream, generator
from tp_flower.reports.records import report_dict, write_json
from tp_flower.settings import Settings
from tp_flower.sources.shards import (
    MEMORY_PREFIX,
    load_tables,
    register_frames,
    release,
)
from tp_flower.splits import TEST, TRAIN, VALIDATION, split_rows

CASES = case_table(__file__)
SETTINGS = Settings(task="regression", seed=3)


@pytest.fixture
def store() -> Mapping[str, list[pd.DataFrame]]:
    return make_store(orders=300, items=20, customers=40, seed=1)


@pytest.fixture
def token(store: Mapping[str, list[pd.DataFrame]]) -> Iterator[str]:
    name = register_frames(store, site="all")
    yield MEMORY_PREFIX + name
    release(name)


def joined_store(token: str, sql: str = STORE_SQL) -> JoinedTable:
    settings = Settings(task="auto", seed=SETTINGS.seed)
    return join_tables(Query.from_sql(sql), settings, load_tables(token))


def naive_join(store: Mapping[str, list[pd.DataFrame]]) -> pd.DataFrame:
    orders, items, customers = (
        pd.concat(store[name], ignore_index=True).reset_index(names=name[0])
        for name in ("orders", "items", "customers")
    )
    joined = orders.merge(items, on="item_id").merge(customers, on="customer_id")
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
    return np.nan_to_num((values - np.nanmean(seen)) / np.nanstd(seen))[:, None]


@pytest.mark.parametrize("condition", ["", " WHERE o.discount > 0"])
def test_matches_merge_and_encoding_by_pandas(store, token, condition):
    table = joined_store(token, STORE_SQL + condition)
    naive = naive_join(store)
    orders = store["orders"][0]
    # what is held out is counted after the filters
    passing = np.flatnonzero(orders["discount"] > 0) if condition else orders.index
    naive = naive[naive["o"].isin(passing)]
    rng = generator(SETTINGS.seed, Stream.SPLIT)
    is_test = split_rows(len(passing), SETTINGS.test_fraction, rng)
    held_out = naive["o"].isin(passing[is_test])
    names = ["channel", "discount", "placed", "part", "price", "weight", "fragile"]
    names += ["age", "income", "segment", "country"]
    # joined training rows encode all
    expected = [
        naive_encoding(alias, naive.loc[~held_out, name], naive[name])
        for alias, name in zip("oooiiiicccc", names, strict=True)
    ]
    np.testing.assert_allclose(table.features, np.hstack(expected), atol=2e-6)
    np.testing.assert_array_equal(table.labels, naive["quantity"])
    np.testing.assert_array_equal(table.is_test, held_out)
    for alias in "oic":
        np.testing.assert_array_equal(table.rows[alias], naive[alias])
    assert 0 < table.is_test.sum() < len(table.labels)
    assert list(table.columns) == ["o", "i", "c"]


def test_a_joined_row_without_a_row_of_a_table_has_zeros_there(store):
    store["customers"][1] = store["customers"][1].iloc[:0]
    name = register_frames(store, site="all")
    sql = STORE_SQL.replace("JOIN customers", "LEFT JOIN customers")
    table = joined_store(MEMORY_PREFIX + name, sql)
    release(name)
    is_missing = table.rows["c"] < 0
    assert 0 < is_missing.sum() < len(is_missing)
    assert not table.features[is_missing, table.columns["c"]].any()
    assert table.features[~is_missing, table.columns["c"]].any(axis=1).all()


def test_the_objective_counts_the_penalty_but_not_the_intercept():
    features = np.array([[1.0], [-1.0]])
    labels = np.array([7.0, 3.0])
    fitted = fit_ridge(features, labels, l2=1.0)
    # 1/2 (w - 2)^2 + 1/2 w^2 is least at w = 1, with the intercept at the mean
    assert fitted.weights.tolist() == [[pytest.approx(1.0)]]
    assert fitted.intercept.tolist() == [pytest.approx(5.0)]
    problem = Problem(*(features, Family("squared").on(labels)) * 2, 1.0)
    assert problem.objective(fitted) == pytest.approx(1.0)


THREE_CLASSES = STORE_SQL.replace(
    "o.quantity AS",
    "CASE WHEN o.quantity > 12 THEN 2 WHEN o.quantity > 8 THEN 1 ELSE 0 END AS",
)
QUERIES = {
    "squared": ("regression", STORE_SQL),
    "logistic": ("classification", STORE_CLASSIFICATION_SQL),
    "softmax": ("classification", THREE_CLASSES),
}
each_loss = pytest.mark.parametrize("loss", QUERIES)


@cache
def problem_of(loss: str) -> tuple[Problem, Settings]:
    task, sql = QUERIES[loss]
    settings = Settings(task=task, seed=3, l2=1e-3)
    frames = make_store(orders=500, items=20, customers=40, seed=1)
    tables = {name: pd.concat(shards) for name, shards in frames.items()}
    dataset = Dataset("", "", "", sql, {}, tables)
    return Problem.of(dataset.joined(settings), settings), settings


@each_loss
def test_the_optimum_has_no_gradient(loss):
    problem, _ = problem_of(loss)
    fitted = problem.optimum()
    features = problem.train.astype(float)
    excess = problem.mean_loss.gradient(fitted.scores(features))
    gradient = features.T @ excess / len(features) + problem.l2 * fitted.weights
    # labels are about ten: these are relative errors of 1e-9
    assert np.abs(gradient).max() < 1e-8
    assert np.abs(excess.mean(axis=0)).max() < 1e-8


@each_loss
def test_steps_reach_the_optimum(loss):
    problem, _ = problem_of(loss)
    optimum = problem.objective(problem.optimum())
    curve = train_lbfgs(problem)
    # the products are in float32
    assert problem.objective(curve.fitted) == pytest.approx(optimum, rel=1e-5)
    assert len(curve.test) == len(curve.seconds) > 5
    assert curve.seconds == sorted(curve.seconds)
    assert (
        train_lbfgs(problem, lambda metrics: metrics == curve.test[1]).test
        == curve.test[:2]
    )
    sparse = replace(
        problem, train=sp.csr_matrix(problem.train), test=sp.csr_matrix(problem.test)
    )
    same = zip(train_lbfgs(sparse).test[:4], curve.test[:4], strict=True)
    for metrics, expected in same:
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("strategy", "metric", "optimum", "value", "is_equal"), CASES["verdicts"]
)
def test_verdicts(strategy, metric, optimum, value, is_equal):
    report = {"final": {"test": {metric: value}}, "tables": [{"table": "o"}]}
    text, verdict = judge(report, Settings(strategy=strategy), {metric: optimum})
    assert verdict == is_equal
    assert ("NOT EQUAL" in text) != is_equal
    mlp = Settings(strategy=strategy, models=(("o", "mlp"),))
    text, verdict = judge(report, mlp, {metric: optimum})
    assert verdict
    assert "no verdict" in text


@pytest.mark.parametrize(("auc", "is_close"), [(0.75, True), (0.68, False)])
def test_trees_may_be_better_than_those_of_the_joined_table(auc, is_close):
    report = {"final": {"test": {"auc": auc}}, "tables": [{"table": "o"}]}
    settings = Settings(strategy="boost", validation_fraction=0.0)
    text, verdict = judge(report, settings, {"auc": 0.7})
    assert verdict is is_close
    assert ("NOT CLOSE to" in text) is not is_close
    stopped = replace(settings, validation_fraction=0.1)
    text, verdict = judge(report, stopped, {"auc": 0.7})
    assert verdict
    assert "no verdict" in text


def train_and_report(folder: Path, sql: str, nodes: int) -> TrainingStrategy:
    """Train on the tables of a folder, and write the report there."""
    tables = str(folder / "tables.toml")
    settings = Settings(sql=sql, task="regression", tables=tables)
    grid = LocalGrid(nodes, run_config={"tables": tables})
    strategy = federated.train(grid, sql, settings=settings)
    write_json(report_dict(strategy.report), folder)
    return strategy


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    sizes = ("--orders", "300", "--items", "20", "--customers", "40")
    assert make_files([str(folder), *sizes]) == 0
    train_and_report(folder, STORE_SQL, 2)
    return folder


def test_compares_a_run_whose_names_have_quotes_and_whose_shards_differ(
    tmp_path, capsys
):
    rng = np.random.default_rng(1)
    parents = [0, 1, 2, 3, 4, 5, 6, 7] * 20
    orders = {"it's": parents, "qty": rng.normal(size=160)}
    orders['a "b"'] = rng.integers(0, 3, 160)
    pd.DataFrame(orders).to_csv(tmp_path / "o.csv", index=False)
    for name, first in (("US", 0), ("UK", 4)):
        columns = {"id": range(first, first + 4), "Children's": [0, 3, 1, 2]}
        frame = pd.DataFrame({**columns, f"Only {name}": "x"})
        frame = frame if first else frame.rename(columns=str.upper)
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    (tmp_path / "tables.toml").write_text(CASES["quotes"]["tables"])
    strategy = train_and_report(tmp_path, CASES["quotes"]["sql"], 3)
    assert sum("* leaves it out" in text for text in strategy.warnings) == 2
    assert main([str(tmp_path)]) == 0
    assert "equal to training on the joined table" in capsys.readouterr().out


def test_compares_a_run_with_the_joined_table(run_folder, capsys):
    assert main([str(run_folder)]) == 0
    out = capsys.readouterr().out
    assert "equal to training on the joined table" in out
    for text in ("tp_flower ADMM", "ridge regression", "rounds", "bytes up", "RMSE"):
        assert text in out


@pytest.mark.parametrize(
    ("changes", "message"), [*CASES["not_equal"], (None, "cannot be read")]
)
def test_runs_that_are_not_equal_or_cannot_be_compared(
    run_folder, tmp_path, capsys, changes, message
):
    if isinstance(changes, dict):
        report = read_json(run_folder / "report.json")
        changes = json.dumps({**report, **changes})
    if changes is not None:
        (tmp_path / "report.json").write_text(changes, encoding="utf-8")
    assert main([str(tmp_path)]) == 1
    assert message in "".join(capsys.readouterr())


@pytest.mark.parametrize("split", ["group(c.age, c.segment)", "time(o.placed)"])
def test_a_run_holds_out_the_same_rows(store, token, split):
    settings = Settings(
        task="regression",
        seed=3,
        test_split=split,
        validation_fraction=0.2,
        num_epochs=1,
    )
    table = join_tables(Query.from_sql(STORE_SQL), settings, load_tables(token))
    run = federated.train([store], STORE_SQL, settings=settings).training_problem
    subset = [int((table.subset == part).sum()) for part in (TRAIN, VALIDATION, TEST)]
    held_out = (run.validates.sum(), (~run.validates).sum())
    assert subset == [run.train.joined_rows, *held_out]
    assert min(subset) > 0
    for rows, labels in (
        (table.subset == TRAIN, run.objective.target.numbers),
        (table.is_test, run.tested.target.numbers),
    ):
        np.testing.assert_array_equal(np.sort(table.labels[rows]), np.sort(labels))
