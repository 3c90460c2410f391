"""Trees on the bins of all tables: what they learn, what leaves, and who lets it."""

import re

import duckdb
import numpy as np
import pandas as pd
import pytest
from numpy.random import default_rng
from numpy.testing import assert_allclose

from strategies import Explain
from strategies.inference.manifest import write_manifest
from strategies.training import join_method
from strategies.training.bins import ask_bins
from strategies.training.saving import make_manifest
from tests.support.federated import (
    on_replies,
    on_requests,
    pieces,
    run_query,
    train,
    whole,
    write_site,
)
from tests.support.predicted import Model, on, scored, scores_of
from tp_flower.errors import ReplyError, SettingsError, SiteError
from tp_flower.extraction.extract import extract
from tp_flower.files import home_at, home_folder
from tp_flower.learning.joint_trees import SHARE, as_numbers, options_of
from tp_flower.protocol.messages import Action
from tp_flower.query import Fragment
from tp_flower.settings import PrivacySettings, Settings
from tp_flower.sources.shards import ShardSource, register_frames, release

CLEAR = PrivacySettings(scores="clear")
FEATURES = "s.qty, s.shop, p.price, p.kind"
SOURCE = "FROM sales s LEFT JOIN parts p ON s.part = p.id"
SQL = f"SELECT s.paid AS label, {FEATURES} {SOURCE}"
INNER = SQL.replace("LEFT JOIN", "JOIN")
HOW = {
    "num_epochs": 3,
    "device": "cpu",
    "effects": "none",
    "validation_fraction": 0.2,
    "test_fraction": 0.2,
    "test_split": "time(s.time)",
}
NAMED = {"sales": "releases.bins = 24", "parts": "releases.bins = 16"}


def sales(rows: int = 1_200, seed: int = 0) -> dict[str, pd.DataFrame]:
    """What is paid is a product of two tables' columns; some parts are unknown."""
    rng = default_rng(seed)
    fixed = default_rng(77)
    parts = pd.DataFrame(
        {
            "id": np.arange(80),
            "price": fixed.normal(size=80).round(3),
            "kind": fixed.choice(["a", "b", "c"], 80),
        }
    )
    parts.loc[3, "price"] = np.nan
    part = rng.integers(0, 84, rows)
    qty = rng.normal(size=rows).round(3)
    price = parts["price"].reindex(part).fillna(0.0).to_numpy()
    frame = {"part": part, "time": np.arange(rows), "qty": qty}
    frame["shop"] = rng.choice(["north", "south"], rows)
    paid = qty * price + 0.5 * price + 0.1 * rng.normal(size=rows)
    return {"sales": pd.DataFrame({**frame, "paid": paid}), "parts": parts}


FRAMES = sales()
WHOLE = on(whole, FRAMES)
SHARDED = {
    "sales": {"sales": pieces(FRAMES["sales"], 500)},
    "parts": {"parts": pieces(FRAMES["parts"], 35)},
}


def bins_by(model: Model, alias: str, frame: pd.DataFrame) -> np.ndarray:
    """The bins of a frame's rows by a table's saved part."""
    saved = model.saved(alias)
    name = saved.fragment.name
    token = register_frames({name: frame}, "here")
    plain = Fragment(saved.fragment.table, name, saved.fragment.features)
    rows = extract(ShardSource(name, "here", 0, token=token), plain)
    columns = {info.name: rows.column(info.name) for info in rows.features}
    release(token)
    return saved.bins.apply(saved.encoder.encoder, saved.encoder.transform(columns))


def with_absent(array: np.ndarray, rows: pd.Series, absent: float) -> np.ndarray:
    """Rows of a table by position; ``absent`` where there is none."""
    last = np.full((1, array.shape[1]), absent, array.dtype)
    return np.concatenate([array, last])[rows.fillna(-1).astype(int)]


def on_the_built_join(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """The scores that trees go on from, (N,), and the bins (N, c), by sale."""
    own, parts = FRAMES["sales"], FRAMES["parts"]
    join = duckdb.sql(
        "SELECT s.time, p.position FROM own s LEFT JOIN (SELECT *, row_number() OVER "
        "() - 1 AS position FROM parts) p ON s.part = p.id ORDER BY s.time"
    ).df()
    position = join["position"]
    tables = (
        scores_of(model.saved("s"), own),
        with_absent(scores_of(model.saved("p"), parts), position, 0.0),
    )
    start = SHARE * (tables[0] + tables[1])[:, 0] + model.manifest.base_score[0]
    bins = np.hstack(
        [
            bins_by(model, "s", own),
            with_absent(bins_by(model, "p", parts), position, 255),
        ]
    )
    return start, bins


def test_the_trees_are_lightgbms_on_the_bins_of_the_built_join(tmp_path):
    """And the saved model scores all rows as in training, unmatched ones too."""
    import lightgbm

    run = run_query(SQL, WHOLE, "cg", state=tmp_path, bins=16, privacy=CLEAR, **HOW)
    model = Model(SQL, tmp_path, make_manifest(run.strategy))
    entry = run.chosen["bins"]
    assert entry["tables"] == {
        "s": {"bins": 16, "columns": 2},
        "p": {"bins": 16, "columns": 2},
    }
    # a sum of a model of each table learns nothing of a product
    before, after = entry["validation-loss"]
    assert after < 0.2 * before

    own = FRAMES["sales"]
    start, bins = on_the_built_join(model)
    numbers = as_numbers(bins)
    _, tested = run.problem.joined_rows
    trained = int(run.problem.train.joined_rows)
    options = options_of(entry["leaves"], run.strategy.method.joint.trees.rate, 1, 1, 0)
    options |= {"objective": "regression", "boost_from_average": False}
    data = lightgbm.Dataset(
        numbers[:trained],
        own["paid"][:trained],
        init_score=start[:trained],
        categorical_feature=[1, 3],
        params=options,
    )
    built = lightgbm.train(options, data, entry["trees"])
    expected = start + built.predict(numbers, raw_score=True)
    predicted = scored(model.table(WHOLE, f"SELECT {FEATURES} {SOURCE}"))
    found = np.array([score for _, score in predicted])
    assert_allclose(found[:trained], expected[:trained], atol=2e-6)
    # between bins of no training row, several thresholds are as good
    assert (np.abs(found - expected) < 2e-6).mean() > 0.99
    # and so are the metrics of the run
    last = f"{SQL} WHERE s.time >= {len(own) - tested}"
    again = model.evaluate(WHOLE, last)
    assert again["loss"] == pytest.approx(model.manifest.test["loss"], rel=1e-5)
    error = expected[-tested:] - own["paid"].to_numpy()[-tested:]
    assert again["loss"] == pytest.approx(0.5 * np.mean(error**2), rel=1e-2)


@pytest.mark.cases("boost-squared", "cg-softmax")
@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
@pytest.mark.parametrize("strategy", ["boost", "cg", "admm", "sgd"])
def test_shards_masks_and_effects_beside_them(tmp_path, strategy, loss):
    label = {
        "squared": "s.paid",
        "logistic": "s.paid > 0",
        "softmax": "CASE WHEN s.paid > 0.4 THEN 'a' WHEN s.paid < -0.4 THEN 'b' "
        "ELSE 'c' END",
    }[loss]
    sql = f"SELECT {label} AS label, {FEATURES} {SOURCE}"
    how = {**HOW, "effects": "p", "loss": loss}
    how["task"] = "regression" if loss == "squared" else "classification"
    run = run_query(sql, SHARDED, strategy, state=tmp_path, bins=32, **how)
    before, after = run.chosen["bins"]["validation-loss"]
    assert after < 0.7 * before
    assert set(run.chosen["effects"]) == {"p"}
    model = Model(sql, tmp_path, make_manifest(run.strategy))
    _, tested = run.problem.joined_rows
    last = f"{sql} WHERE s.time >= {len(FRAMES['sales']) - tested}"
    again = model.evaluate(SHARDED, last)
    assert again["loss"] == pytest.approx(model.manifest.test["loss"], rel=1e-4)
    # a table that is gone has the bins of no row
    gone = {"sales": SHARDED["sales"]}
    partial = model.table(gone, f"SELECT {FEATURES} {SOURCE}", on_missing="mean")
    assert np.isfinite([values for _, *values in scored(partial)]).all()


def site_files(folder, policies):
    return [
        write_site(folder / name, {name: frame}, policies)
        for name, frame in FRAMES.items()
    ]


def test_by_default_tables_show_the_bins_that_their_policies_name(tmp_path):
    files = site_files(tmp_path, NAMED)
    run = run_query(INNER, files, "cg", **HOW)
    tables = run.chosen["bins"]["tables"]
    assert {name: own["bins"] for name, own in tables.items()} == {"s": 24, "p": 16}
    sent = run.arrays(Action.BINS, replies=True)
    for (part, _), numbers in sent.items():
        trained = run.arrays(Action.PREPARE)[part, "trained"]
        # those that are trained on come first
        count = int(np.bitwise_count(trained).sum())
        for column in numbers[:count].T:
            _, counts = np.unique(column, return_counts=True)
            assert counts.min() >= 5
    noted = [line for line in run.releases if line["what"] == "bins"]
    assert {line["table"] for line in noted} == {"sales", "parts"}
    assert all("of up to" in line["scope"] for line in noted)
    told = [entry["carries"] for entry in run.report.privacy["messages"]]
    assert any("which of up to 24 groups its value is in" in text for text in told)
    totals = run.report.privacy["totals"]
    assert all("bins" in total["uncovered"] for total in totals)
    explain = train(files, INNER, Explain, mode="explain", strategy="cg", **HOW)
    releases = explain.explanation["releases"]
    assert {Action.BINS} <= {release["message"] for release in releases}
    assert explain.explanation["cost"]["rounds"]["run"] == run.strategy.rounds_done


@pytest.mark.parametrize("shown", [{}, {"sales": NAMED["sales"], "parts": ""}])
def test_fewer_than_two_tables_show_nothing_by_default(tmp_path, shown):
    run = run_query(INNER, site_files(tmp_path, shown), "cg", **HOW)
    assert not run.sent(Action.BINS)
    assert "bins" not in run.chosen


def test_a_policy_refuses_more_bins_before_any_training(tmp_path):
    seen = []
    watch = on_requests(Action.PREPARE, Action.BINS)(lambda s: seen.append(s.action))
    files = site_files(tmp_path, NAMED)
    match = r"'parts'.*releases.bins = 16.* of 24 bins.*at most 16 of a column"
    with pytest.raises(SiteError, match=match):
        run_query(INNER, files, "cg", change=watch, bins=24, **HOW)
    assert set(seen) == {Action.PREPARE}
    run = run_query(INNER, files, "cg", bins="none", **HOW)
    assert not run.sent(Action.BINS)
    assert run_query(INNER, files, "cg", bins=12, **HOW).sent(Action.BINS)


def test_bin_numbers_leave_once(tmp_path, monkeypatch):
    def ask_twice(problem, most):
        yield from ask_bins(problem, most)
        # other bins of the same rows would tell more
        return (yield from ask_bins(problem, {name: n - 1 for name, n in most.items()}))

    monkeypatch.setattr(join_method, "ask_bins", ask_twice)
    with pytest.raises(SiteError, match="bin numbers have left, and leave once"):
        run_query(INNER, site_files(tmp_path, NAMED), "cg", **HOW)


def check_lineage(tmp_path):
    first = run_query(
        SQL, WHOLE, "cg", state=tmp_path, bins=4, model_name="first", **HOW
    )
    write_manifest(home_folder(), make_manifest(first.strategy))
    run = run_query(
        SQL, WHOLE, "boost", state=tmp_path, bins=16, boost_from="first", **HOW
    )
    told = [entry["carries"] for entry in run.report.privacy["messages"]]
    assert any("by the bins of the model's training" in text for text in told)
    model = Model(SQL, tmp_path, make_manifest(run.strategy))
    _, tested = run.problem.joined_rows
    last = f"{SQL} WHERE s.time >= {len(FRAMES['sales']) - tested}"
    again = model.evaluate(WHOLE, last)
    assert again["loss"] == pytest.approx(model.manifest.test["loss"], rel=1e-4)
    assert again["loss"] < first.strategy.final.test["loss"]


def test_trees_go_on_from_a_model_with_trees(tmp_path):
    """Each model's tables count by its own share; owners are told of both."""
    with home_at(tmp_path / "home"):
        check_lineage(tmp_path)


def test_nothing_is_kept_where_a_sum_is_the_truth():
    linear = FRAMES["sales"].assign(paid=lambda s: 2 * s["qty"] - 1)
    frames = {**FRAMES, "sales": linear}
    for strategy in ("cg", "boost"):
        how = {**HOW, "num_epochs": 12 if strategy == "boost" else 4}
        run = run_query(SQL, on(whole, frames), strategy, bins=64, **how)
        assert run.chosen["bins"] == "none"
        assert run.strategy.final.test["r2"] > 0.99


def test_a_prediction_takes_what_the_owner_still_allows(tmp_path):
    run = run_query(SQL, WHOLE, "cg", state=tmp_path, bins=16, **HOW)
    model = Model(SQL, tmp_path, make_manifest(run.strategy))
    features = f"SELECT {FEATURES} {SOURCE}"
    strategy = model.predict(WHOLE, features)
    # the owners of its tables are told
    assert strategy.settings.bins == 16
    told = strategy.report()["privacy"]
    assert any("bin number of each" in item["carries"] for item in told["messages"])
    assert all("bins" in total["uncovered"] for total in told["totals"])
    with pytest.raises(SiteError, match="'bins': the run was proposed with"):
        model.predict(WHOLE, features, bins="none")
    with pytest.raises(SettingsError, match="bins: 16 does not go with privacy"):
        model.predict(WHOLE, features, privacy=PrivacySettings(predictions=1.0))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"bins": 8, "validation_fraction": 0.0}, "bins: 8 needs rows that judge"),
        ({"bins": 8, "privacy": PrivacySettings(predictions=1.0)}, "bins: 8 does not"),
        ({"bins": 1}, 'bins: 1 is neither "auto", "none" nor a number from 2 to 255'),
        ({"bins": "some"}, "bins: 'some' is neither"),
        ({"bins": 8, "strategy": "moments"}, "strategy 'moments' grows no trees on"),
    ],
)
def test_bins_that_no_trees_could_use_are_refused(settings, match):
    with pytest.raises(SettingsError, match=re.escape(match)):
        Settings(**{"strategy": "admm", **settings})


def test_advice_about_bins_is_taken():
    assert Settings(strategy="admm", bins=8).asks_bins
    private = PrivacySettings(predictions=1.0)
    assert not Settings(strategy="admm", bins="none", privacy=private).asks_bins


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda numbers: numbers[1:], "sent 'numbers' of shape"),
        (lambda numbers: np.full_like(numbers, 99), "a bin number beyond the 8 bins"),
    ],
    ids=["shape", "number"],
)
def test_bins_that_do_not_fit_are_refused(change, match):
    @on_replies(Action.BINS)
    def lie(seen):
        for place, numbers in list(seen.arrays.items()):
            seen.arrays[place] = change(numbers)

    with pytest.raises(ReplyError, match=match):
        run_query(SQL, WHOLE, "cg", change=lie, bins=8, **HOW)
