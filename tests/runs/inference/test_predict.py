"""Predictions are the scores of the joined-table model with the same parameters."""

import hashlib
import hmac
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from client_apps.data import run_store as site_store
from client_apps.handlers.inference import PURPOSE, check_range
from tests.support.federated import FEATURES, SOURCE, sharded, store, whole
from tests.support.files import case_table
from tests.support.predicted import (
    check_equal,
    on,
    part_scores,
    predicting,
    scored,
    train,
    train_store,
    unlabelled,
)
from tests.support.reference.families import Family
from tp_flower import api
from tp_flower.errors import (
    DivergedError,
    ModelError,
    QueryError,
    SettingsError,
    SiteError,
)
from tp_flower.features.columns import NumericColumn
from tp_flower.objectives import response_of
from tp_flower.privacy.key_agreement import GroupSecret
from tp_flower.reports import predictions
from tp_flower.reports.predictions import class_values
from tp_flower.settings import PrivacySettings

CASES = case_table(__file__)
UNLABELLED = f"SELECT {FEATURES} {SOURCE}"
LEFT = """FROM orders o LEFT JOIN customers c ON o.customer = c.id
LEFT JOIN (SELECT item, AVG(price) AS price, COUNT(*) AS n FROM items GROUP BY item) i
ON o.item = i.item"""


STORE = on(whole, store())


def new_rows():
    """Rows that no model was trained on: other values, nulls, a new category."""
    frames = store(orders=80, customers=15, seed=9)
    frames["customers"].loc[2, "region"] = "Mars"
    frames["orders"]["day"] = frames["orders"]["day"].astype(float)
    frames["orders"].loc[4, "day"] = np.nan
    return {**frames, "orders": frames["orders"].drop(columns="qty")}


def check_scores(table, joined, scores):
    """Compare predictions with the scores of joined rows."""
    check_equal(scored(table), sorted(zip(joined["row"], scores, strict=True)))


def moved(model, folder):
    """A model whose sites' state folders lie elsewhere."""
    return replace(model, state=shutil.copytree(model.state, folder / "state"))


def trained_once(loss, layout=whole, **how):
    """A fixture of a model that is trained once for this module."""

    @pytest.fixture(scope="module")
    def model(tmp_path_factory):
        folder = tmp_path_factory.mktemp("m")
        return train_store(folder, loss, on(layout, store()), **how)

    return model


logistic = trained_once("logistic", sharded)
squared = trained_once("squared")
softmax = trained_once("softmax", strategy="sgd", batch_size=20, num_epochs=1)
NETWORKS = (("i", "mlp"), ("c", "tests.support.examples.networks:network"))
torch = trained_once("squared", models=NETWORKS, num_epochs=1, local_epochs=2)


@pytest.mark.cases("squared", "softmax")
@pytest.mark.parametrize("name", ["squared", "logistic", "softmax", "torch"])
def test_equal_to_the_joined_table(request, name):
    model = request.getfixturevalue(name)
    rows = new_rows()
    # the label table in other shards than in training, the others in more
    again = {**on(sharded, rows), "orders": on(whole, rows)["orders"]}
    table = model.table(again, UNLABELLED)
    check_equal(scored(table), model.reference(rows, SOURCE))
    assert not any(table["is_partial"].to_pylist())


def test_same_rows_score_as_in_training(logistic):
    # the held-out rows are among them: the metrics are of both
    train = logistic.manifest.train["loss"]
    test = logistic.manifest.test["loss"]
    loss = logistic.evaluate(on(sharded, store()))["loss"]
    assert loss == pytest.approx(0.8 * train + 0.2 * test, rel=0.05)


def test_outputs_of_classes(logistic, softmax):
    table = logistic.table(STORE, UNLABELLED)
    score = table["score"].to_numpy()
    chance = table["probability.1"].to_numpy()
    np.testing.assert_allclose(chance, 1 / (1 + np.exp(-score)))
    np.testing.assert_allclose(table["probability.0"].to_numpy() + chance, 1.0)
    assert table["prediction"].to_pylist() == (score > 0).tolist()
    table = softmax.table(STORE)
    scores = np.column_stack([table[f"score.{c}"] for c in "abc"])
    chances = np.column_stack([table[f"probability.{c}"] for c in "abc"])
    odds = np.exp(scores)
    np.testing.assert_allclose(chances, odds / odds.sum(axis=1, keepdims=True))
    best = np.array(list("abc"))[scores.argmax(axis=1)]
    assert table["prediction"].to_pylist() == best.tolist()


def test_a_row_far_outside_of_the_training_rows_is_refused_in_words_about_rows(squared):
    rows = new_rows()
    rows["orders"].loc[7, "day"] = 1e9
    far = on(whole, rows)
    match = (
        r"site 'orders', table 'o': .* a score is out of range.* far outside of those "
        r"that"
    )
    with pytest.raises(SiteError, match=match) as caught:
        squared.table(far, UNLABELLED)
    assert not isinstance(caught.value, DivergedError)
    assert "diverged" not in str(caught.value)
    # both remedies that the error names
    expected = squared.reference(rows, SOURCE)
    clear = PrivacySettings(scores="clear")
    strategy = squared.predict(far, UNLABELLED, privacy=clear)
    # the site's own log says so; here it is in this process
    day, region = strategy.warnings
    assert day.startswith("table o: column 'day': 1 of 75 rows have a number far")
    assert region.startswith("table c: column 'region': 1 of 15 rows have a category")
    scores = scored(strategy.predictions)
    np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-5)
    near = f"{SOURCE} WHERE o.day < 100"
    kept = scored(squared.table(far, f"SELECT {FEATURES} {near}"))
    # rows are numbered among those that are read
    check_equal(
        [row[1:] for row in kept], [row[1:] for row in squared.reference(rows, near)]
    )


def test_classes_that_are_as_frequent_have_a_constant_to_compare_with():
    rows = pd.DataFrame({"x": np.arange(40) % 7, "y": np.arange(40) % 2})
    how = {"task": "classification", "test_fraction": 0.0}
    model = api.fit("SELECT a.y AS label, a.x FROM a", {"s": {"a": rows}}, **how)
    assert model.manifest["base-score"] == [0.0]
    baseline = model.evaluate({"s": {"a": rows}}).report["baseline"]["test"]
    assert baseline["log_loss"] == pytest.approx(np.log(2.0))


@pytest.mark.parametrize("score", [np.nan, np.inf, -1e31])
def test_scores_in_the_clear_that_a_message_cannot_carry_are_refused_alike(score):
    check_range(np.full((3, 1), 1e29), None)
    match = r"up to 1e\+30: .* leave such rows out by WHERE$"
    with pytest.raises(ModelError, match=match):
        check_range(np.array([[1.0], [score]]), None)


def test_predictions_of_a_regression_and_of_rows_joined_several_times(
    squared, monkeypatch
):
    table = squared.table(STORE, UNLABELLED)
    assert table["prediction"].equals(table["score"])
    names = ["row_key", "occurrence", "score", "prediction", "is_partial"]
    assert table.column_names == names
    frame = table.to_pandas()
    assert frame["occurrence"].tolist() == frame.groupby("row_key").cumcount().tolist()
    assert frame["occurrence"].max() == 2
    weighted = UNLABELLED.replace("SELECT", "SELECT o.day AS weight,")
    assert squared.table(STORE, weighted).equals(table)
    # blocks part the rows of one row of the label table
    monkeypatch.setattr(predictions, "TABLE_ROWS", 7)
    assert squared.table(STORE, UNLABELLED).equals(table)


@pytest.mark.parametrize(
    ("kind", "classes", "values"),
    [
        ("boolean", "0 1", [False, True]),
        ("number", "-2 700", [-2, 700]),
        ("number", "0.5 7", [0.5, 7.0]),
        ("text", "01 1", ["01", "1"]),
    ],
)
def test_predicted_classes_have_the_type_of_the_label(kind, classes, values):
    predicted = class_values(response_of("logistic", tuple(classes.split()), kind))
    assert str(predicted.to_pylist()) == str(values)


@pytest.mark.parametrize("loss", ["softmax", "logistic", "kmeans"])
def test_outputs_fit_their_classes(loss):
    with pytest.raises(ValueError, match="with 0 classes"):
        response_of(loss, (), "number")


def test_other_runs_and_moves_change_nothing(logistic, tmp_path):
    sites = on(sharded, store())
    before = logistic.table(sites, UNLABELLED)
    model = moved(logistic, tmp_path)
    # a second training with other encoders; then all that can be made again is gone
    other = train_store(
        model.state, "logistic", sites, max_categories=2, l2=0.1, num_epochs=1
    )
    assert other.manifest.model != model.manifest.model
    for cache in model.state.glob("*/cache"):
        shutil.rmtree(cache)
    site_store._CACHE.clear()
    assert model.table(sites, UNLABELLED).equals(before)


def test_other_filters(squared):
    rows = new_rows()
    where = " WHERE o.day > 10 AND c.region <> 'UK'"
    found = scored(squared.table(on(whole, rows), UNLABELLED + where))
    kept = rows["orders"].index[rows["orders"]["day"] > 10]
    # positions are those among the rows that the filters leave
    expected = [
        (kept.get_loc(row), score)
        for row, score in squared.reference(rows, SOURCE + where)
    ]
    check_equal(found, expected)


def test_left_joins_and_sub_queries(tmp_path):
    sql = f"SELECT o.qty AS label, o.day, c.age, c.region, i.price, i.n {LEFT}"
    model = train(tmp_path, STORE, sql, task="regression")
    rows = new_rows()
    table = model.table(on(whole, rows), unlabelled(sql))
    items = rows["items"].groupby("item")["price"].agg(price="mean", n="size")
    grouped = items.reset_index()
    columns = {name: NumericColumn(grouped[name].to_numpy(float)) for name in items}
    scores = part_scores(model.saved("i"), columns)
    of_orders = model.local_scores("o", rows["orders"])[:, 0]
    of_people = model.local_scores("c", rows["customers"])[:, 0]
    orders = rows["orders"].assign(o=of_orders, row=range(80))
    people = rows["customers"].assign(c=of_people)
    joined = orders.merge(people, "left", left_on="customer", right_on="id").merge(
        grouped.assign(i=scores[:, 0]), "left", on="item"
    )
    total = joined[["o", "c", "i"]].fillna(0).sum(axis=1) + model.manifest.base_score[0]
    assert len(table) == len(joined) == 80
    check_scores(table, joined, total)


def test_parts_of_a_union(tmp_path):
    def apart(frames):
        people = frames["customers"]
        is_young = people["age"].fillna(0) < 50
        return {
            "shop": {"orders": [frames["orders"]]},
            "young": {"young": [people[is_young]]},
            "old": {"old": [people[~is_young].drop(columns="region")]},
        }

    tail = """FROM orders o JOIN (SELECT id, age, region FROM young
    UNION ALL SELECT id, age, 'old' FROM old) c ON o.customer = c.id"""
    sql = f"SELECT o.qty AS label, o.day, c.age, c.region {tail}"
    model = train(tmp_path, apart(store()), sql, task="regression")
    frames = store(customers=20, seed=3)
    table = model.table(apart(frames))
    people = frames["customers"]
    people["region"] = people["region"].where(people["age"].fillna(0) < 50, "old")
    o = model.local_scores("o", frames["orders"])[:, 0]
    c = model.local_scores("c", people)[:, 0]
    joined = (
        frames["orders"]
        .assign(o=o, row=range(len(o)))
        .merge(people.assign(c=c), left_on="customer", right_on="id")
    )
    total = joined["o"] + joined["c"] + model.manifest.base_score[0]
    check_scores(table, joined, total)
    gone = apart(frames)
    del gone["old"]
    table = model.table(gone, on_missing="mean")
    is_partial = table["is_partial"].to_numpy(zero_copy_only=False)
    young = joined[joined["region"] != "old"]
    check_scores(table.filter(~is_partial), young, total[young.index])


def test_metrics_of_private_labels_allow_for_their_noise(logistic):
    # two or three labels of these change: for 0.02 it would take a dozen and more
    frames = store(orders=1000, seed=3)
    exact = logistic.evaluate(on(whole, frames))
    private = PrivacySettings(labels="randomised-response", label_epsilon=6.0)
    noisy = logistic.evaluate(on(whole, frames), privacy=private)
    assert noisy != exact
    assert noisy["accuracy"] == pytest.approx(exact["accuracy"], abs=0.02)


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_metrics_are_those_of_the_joined_table(loss, request):
    model = request.getfixturevalue(loss)
    frames = store(orders=50, seed=3)
    weight = "CASE WHEN o.day > 5 THEN o.day ELSE 0 END AS weight"
    weighted = model.sql.replace("SELECT", f"SELECT {weight},")
    metrics = model.evaluate(on(whole, frames), weighted)
    rows = np.array(model.reference(frames, SOURCE + " WHERE o.day > 5"))
    orders = frames["orders"].iloc[rows[:, 0].astype(int)]
    family = Family("squared")
    labels = orders["qty"].to_numpy(float)
    if loss == "logistic":
        family, labels = Family("logistic", 2), (labels > 3).astype(float)
    objective = family.on(labels, orders["day"].to_numpy(float))
    assert metrics == pytest.approx(objective.metrics(rows[:, 1:]), abs=1e-5)


def test_a_class_that_the_model_does_not_know_is_refused(softmax):
    with pytest.raises(QueryError, match=r"1 classes that .* not know \('z'\)"):
        softmax.evaluate(STORE, softmax.sql.replace("'a'", "'z'"))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        *CASES["other_rows"],
        (
            {SOURCE: f"{SOURCE} JOIN items j ON i.item = j.item"},
            "other tables .* not in .* j",
        ),
    ],
)
def test_a_query_of_other_rows_is_refused(squared, changes, match):
    sql = UNLABELLED
    for old, new in changes.items():
        sql = sql.replace(old, new)
    with pytest.raises(QueryError, match=match):
        squared.table(STORE, sql)


def test_row_keys_are_keyed_hashes_that_the_label_site_alone_can_tell(squared):
    before = set(squared.state.glob("*/predictions/row-keys-*"))
    table = squared.table(STORE, UNLABELLED, row_key="day, o.online")
    positions = squared.table(STORE, UNLABELLED)["row_key"].to_pylist()
    keys = table["row_key"].to_pylist()
    orders = store()["orders"]
    secret = GroupSecret.of_simulation(seed=0).value
    key = hmac.digest(secret, PURPOSE.encode() + b"\x01", hashlib.sha256)
    rows = orders.iloc[positions]
    for found, day, online in zip(keys, rows["day"], rows["online"], strict=True):
        truth = str(online).lower()
        text = f"number{len(str(day))}:{day}boolean{len(truth)}:{truth}"
        # nor can a site of the run, which has the run's key
        assert found != hmac.digest(key, text.encode(), hashlib.sha256).hex()[:32]
    values = set(zip(rows["day"], rows["online"], strict=True))
    assert len(set(keys)) == len(values) < len(rows)
    (folder,) = set(squared.state.glob("*/predictions/row-keys-*")) - before
    assert folder.parts[-3] == "orders"
    assert folder.stat().st_mode & 0o077 == 0
    kept = pq.read_table(folder / "part-0.parquet").to_pandas()
    pd.testing.assert_frame_equal(kept[["day", "online"]], orders[["day", "online"]])
    assert keys == kept["row_key"].iloc[positions].tolist()


def test_the_owner_of_the_label_table_joins_the_predictions_with_its_rows(logistic):
    rows = new_rows()
    rows["orders"] = rows["orders"].assign(
        name=[f"n{k}:\n{k}" for k in range(80)],
        at=pd.Timestamp("2020-01-01 01:02:03") + pd.to_timedelta(range(80), "s"),
        fine=pd.Timestamp("1969-12-31 23:59:59.9999999")
        + pd.to_timedelta(range(80), "ns"),
    )
    rows["orders"].loc[7, "name"] = None
    sites = on(sharded, rows)
    by_position = logistic.table(sites, UNLABELLED).to_pandas()
    before = set(logistic.state.glob("*/predictions/row-keys-*"))
    columns = ["customer", "name", "at", "fine", "online"]
    row_key = ", ".join(columns)
    predictions = logistic.table(sites, UNLABELLED, row_key=row_key).to_pandas()
    (folder,) = set(logistic.state.glob("*/predictions/row-keys-*")) - before
    assert folder.parts[-3] == "orders"
    files = sorted(folder.iterdir())
    assert len(files) == len(sites["orders"]["orders"]) == 3
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert pq.read_table(files[0])["customer"].type == pa.int64()
    # as in docs/how-to/predict.md
    distinct = pd.read_parquet(folder).drop(columns="row").drop_duplicates()
    joined = predictions.merge(distinct, on="row_key")
    pieces = pd.concat(sites["orders"]["orders"], ignore_index=True)
    pd.testing.assert_frame_equal(
        joined[columns].assign(
            **{c: joined[c].dt.tz_localize(None) for c in ("at", "fine")}
        ),
        pieces.iloc[by_position["row_key"]][columns].reset_index(drop=True),
        check_dtype=False,
    )
    unnamed = predictions.drop(columns="row_key")
    pd.testing.assert_frame_equal(joined[unnamed.columns], unnamed)
    pd.testing.assert_frame_equal(unnamed, by_position[unnamed.columns])


def test_of_a_row_key_the_server_has_the_hashes(logistic):
    strategy = predicting(logistic.manifest, UNLABELLED, row_key="day")
    seen = logistic.start(strategy, on(sharded, store()))
    names = {name for s in seen if s.is_reply for _, name in s.arrays}
    joined = {"codes/0", "hashes/0", "codes/1", "hashes/1"}
    assert names == {*joined, "row-hashes", "scores"}


@pytest.mark.parametrize(
    ("row_key", "error", "match"),
    [
        ("day, o.day", SettingsError, "names a column twice"),
        ("c.age", QueryError, "is a column of table 'c'"),
        ("o.nothing", QueryError, "no column 'nothing'"),
    ],
)
def test_refused_row_keys(squared, row_key, error, match):
    with pytest.raises(error, match=match):
        squared.table(STORE, UNLABELLED, row_key=row_key)


def test_a_part_that_was_changed_is_refused(squared, tmp_path):
    model = moved(squared, tmp_path)
    (file,) = (model.state / "items").glob("models/*/*/part-2/model.json")
    file.write_text(file.read_text().replace('"price"', '"price" '))
    with pytest.raises(SiteError, match=r"site 'items', table 'i': .* digest differs"):
        model.table(STORE, UNLABELLED)


def test_a_version_that_a_site_does_not_have_is_refused(squared, tmp_path):
    model = moved(squared, tmp_path)
    shutil.rmtree(model.state / "items" / "models")
    name = str(model.manifest.model)
    with pytest.raises(SiteError, match=f"'items', .* has no part 2 of model {name}"):
        model.table(STORE, UNLABELLED)


def test_a_site_in_memory_has_kept_nothing():
    model = train_store(None, "squared", STORE, num_epochs=1)
    with pytest.raises(ModelError, match=r"'orders' has kept no part .* ':memory:'"):
        model.table(STORE, UNLABELLED)
