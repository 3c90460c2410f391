"""Boosted trees over joins and unions, against LightGBM and the joined rows."""

import itertools

import lightgbm
import numpy as np
import pandas as pd
import pytest

from strategies.inference.manifest import write_manifest
from strategies.methods.boost import strategy as boosting
from strategies.report_page.page import render
from strategies.training.saving import make_manifest
from tests.support.examples.explained import explain
from tests.support.examples.store_runs import FRAMES, LEFT, each_loss
from tests.support.federated import (
    SOURCE,
    WatchedGrid,
    named_sites,
    on_requests,
    one_per_site,
    pieces,
    run_query,
    sharded,
    store,
    store_sql,
    task_of,
    train,
    whole,
    write_site,
)
from tests.support.predicted import (
    Model,
    check_equal,
    on,
    predicting,
    scored,
    train_store,
)
from tests.support.predicted import train as train_query
from tp_flower.errors import SettingsError, SiteError
from tp_flower.files import HOME_VARIABLE, home_folder
from tp_flower.methods.boost.boosting import Boosting
from tp_flower.methods.boost.messages import TRAIN_BAG, TRAIN_BOOST
from tp_flower.protocol.messages import Action
from tp_flower.reports.records import report_dict
from tp_flower.settings import PrivacySettings, Settings

CLEAR = PrivacySettings(scores="clear")
SQL = store_sql("squared")
WHOLE = one_per_site(whole(FRAMES))
each_privacy = pytest.mark.parametrize(
    "privacy", [CLEAR, PrivacySettings()], ids=["clear", "masked"]
)
HOW = {"strategy": "boost", "num_epochs": 3, "trees_per_round": 5, "leaves": 8}
SELF = """SELECT o.qty AS label, o.day, p.day AS other FROM orders o
JOIN orders p ON o.customer = p.customer AND p.day < 10"""


@pytest.mark.cases("sharded-squared", "whole-softmax")
@each_loss
@pytest.mark.parametrize("layout", [whole, sharded])
def test_the_saved_trees_score_as_they_did_in_training(tmp_path, loss, layout):
    sites = on(layout, store())
    model = train_store(
        tmp_path, loss, sites, test_fraction=0.0, validation_fraction=0.0, **HOW
    )
    again = model.evaluate(sites)
    assert again["loss"] == pytest.approx(model.manifest.train["loss"], rel=1e-5)
    if layout is whole:
        check_equal(scored(model.table(sites)), model.reference(store(), SOURCE))


@pytest.mark.cases("self")
@pytest.mark.parametrize(
    "sql",
    [
        SQL.replace(SOURCE, LEFT),
        SELF,
        SQL.replace("SELECT", "SELECT o.day + 1 AS weight,", 1),
    ],
    ids=["left", "self", "weights"],
)
def test_every_round_lowers_the_loss_and_masks_change_nothing(sql):
    tables = [name for name in FRAMES if name in sql]
    sites = one_per_site(whole({name: FRAMES[name] for name in tables}))
    # clear scores have a step for each table, after which other regions may help
    clear, masked = (
        run_query(sql, sites, privacy=privacy, regions="none", **HOW)
        for privacy in (CLEAR, PrivacySettings())
    )
    assert clear.losses == sorted(clear.losses, reverse=True)
    np.testing.assert_allclose(masked.losses, clear.losses, rtol=1e-3)


def test_trees_without_a_split_are_warned_of(caplog):
    run = run_query(SQL, WHOLE, **HOW, min_rows_per_leaf=10**6)
    assert (
        "no table's trees have a split, so that all rows get one score" in caplog.text
    )
    labels = run.problem.objective.target.numbers
    assert run.losses == [pytest.approx(labels.var() / 2)]
    caplog.clear()
    split = run_query(SQL, WHOLE, **HOW, min_rows_per_leaf=1)
    assert "have a split" not in caplog.text
    assert split.losses[-1] < run.losses[0]


def test_a_table_whose_step_is_zero_grows_no_more(monkeypatch):
    steps = []

    def lengths(_, directions):
        steps.append(len(directions))
        return np.linspace(0.0, 0.5, len(directions))

    monkeypatch.setattr(Boosting, "lengths", lengths)
    run = run_query(SQL, WHOLE, privacy=CLEAR, **HOW)
    assert steps == [3, 2, 1]
    # the last of them had no step, either: nothing is left to grow
    assert len(run.losses) == 3
    rounds = [seen for seen in run.seen if seen.action == TRAIN_BOOST]
    grown = [len(seen.arrays) for seen in rounds if seen.is_reply]
    assert sorted(grown) == [0, 0, 0, 1, 1, 1, 1, 1, 1]


def test_the_gains_of_trees_are_those_of_lightgbm_where_a_policy_shows_them(tmp_path):
    frame = FRAMES["orders"]
    sql = "SELECT qty AS label, day, customer FROM orders"
    how = {**HOW, "num_epochs": 1, "test_fraction": 0.0, "validation_fraction": 0.0}
    policy = "coefficients = true\nreleases = { scores = 'clear' }"
    sites = {"shop": write_site(tmp_path, {"orders": frame}, {"orders": policy})}
    strategy = run_query(sql, sites, privacy=CLEAR, **how).strategy
    gains = report_dict(strategy.report)["coefficients"]["orders"]
    assert [gain["output"] for gain in gains] == ["gain", "gain"]
    rows = frame[["day", "customer"]].to_numpy(float)
    labels = frame["qty"]
    options = {"num_leaves": 8, "learning_rate": 0.1, "verbosity": -1}
    data = lightgbm.Dataset(rows, np.asarray(labels, float), params=options)
    booster = lightgbm.train(options, data, 5)
    (length,) = strategy.last_request().lengths.values()
    expected = length * booster.feature_importance("gain")
    assert [gain["value"] for gain in gains] == pytest.approx(expected, rel=1e-4)


def test_the_gains_of_trees_of_several_classes_are_one_number_a_column(tmp_path):
    policies = dict.fromkeys(FRAMES, "coefficients = true")
    sites = {"shop": write_site(tmp_path, FRAMES, policies)}
    how = {"num_epochs": 2, "linear_epochs": 0, "task": "classification"}
    run = run_query(store_sql("softmax"), sites, "boost", **how)
    shown = report_dict(run.report)["coefficients"]
    assert {gain["output"] for gains in shown.values() for gain in gains} == {"gain"}
    assert sum(gain["value"] for gains in shown.values() for gain in gains) > 0.0


def test_a_curvature_that_is_not_above_zero_is_refused():
    def change(seen):
        for key in seen.arrays:
            if key[-1] == "hessian":
                seen.arrays[key] = -seen.arrays[key]

    with pytest.raises(Exception, match="'hessian' must be above 0"):
        run_query(store_sql("logistic"), WHOLE, change=change, **HOW)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "mlp"}, "which trains its own kind"),
        ({"l2": 0.1}, "l2: strategy 'boost' has no such penalty: fewer leaves"),
        ({"privacy.features": "dp-sgd"}, "plans no noise"),
        ({"privacy.predictions": 1.0}, "plans no noise"),
        ({"tree-rate": 0.0}, "tree-rate: 0.0 .* above 0"),
    ],
)
def test_settings_that_boosting_has_no_use_for_are_refused(settings, message):
    with pytest.raises(SettingsError, match=message):
        Settings.from_run_config({"strategy": "boost", **settings})


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))


def train_linear(state, loss, sites, **settings):
    """Train a linear model; return the settings that boost from it, and the model."""
    model = train_store(state, loss, sites, strategy="cg", **settings)
    write_manifest(home_folder(), model.manifest)
    return {**HOW, **settings, "boost_from": str(model.manifest.model)}, model


@pytest.mark.cases(
    "whole-clear-softmax", "sharded-masked-logistic", "whole-masked-squared"
)
@each_loss
@each_privacy
@pytest.mark.parametrize("layout", [whole, sharded])
def test_boosting_goes_on_where_a_linear_model_ended(tmp_path, loss, layout, privacy):
    sites = on(layout, store())
    how, linear = train_linear(
        tmp_path, loss, sites, privacy=privacy, test_fraction=0.0
    )
    how |= {"task": task_of(loss), "loss": loss, "min_rows_per_leaf": 3}
    how["device"] = "cpu"
    with WatchedGrid(sites, state=tmp_path) as grid:
        strategy = train(grid, store_sql(loss), **how, method="boost", patience=9)
    model = Model(store_sql(loss), tmp_path, make_manifest(strategy))
    again = model.evaluate(sites, privacy=privacy)["loss"]
    epoch = strategy.chosen["best-epoch"]
    facts = strategy.split_entry
    start = linear.evaluate(sites, privacy=privacy)["loss"]
    if not epoch:
        assert again == pytest.approx(start, rel=1e-5)
        return
    # the rows that train and that validate are all rows
    best = next(item for item in strategy.history if item.epoch == epoch and item.train)
    counts = strategy.training_problem.train.joined_rows, facts["validation-rows"]
    losses = best.train["loss"], best.validation["loss"]
    assert again == pytest.approx(np.average(losses, weights=counts), rel=1e-5)


LINES = "SELECT a.y AS label, a.x, b.z FROM a JOIN b ON a.k = b.k"


def lines(seed, shape, rows=500):
    """A number that is a function of another table's column and of its own, with
    noise.
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(size=rows).round(3)
    k = rng.integers(0, 20, rows)
    y = shape(x) + 0.5 * (k % 4) + 0.5 * rng.normal(size=rows)
    tables = {"a": pd.DataFrame({"k": k, "x": x, "y": y})}
    tables["b"] = pd.DataFrame({"k": np.arange(20), "z": np.arange(20) % 4})
    return on(whole, tables)


def line_and_trees(folder, sites, first="default", second="default"):
    """A linear model and trees that go on from it, by their names; it is saved."""
    line = train_query(folder, sites, LINES, "cg", num_epochs=9, model_name=first)
    write_manifest(home_folder(), line.manifest)
    trees = train_query(
        folder,
        sites,
        LINES,
        strategy="boost",
        num_epochs=12,
        boost_from=first,
        model_name=second,
    )
    return line, trees


@pytest.mark.parametrize("kept", [False, True])
def test_trees_are_kept_where_the_model_that_they_go_on_from_leaves_them_something(
    tmp_path, caplog, kept
):
    sites = lines(0, np.square if kept else (lambda x: 2.0 * x))
    first, second = line_and_trees(tmp_path, sites)
    losses = [model.manifest.test["loss"] for model in (first, second)]
    scored_again = [model.evaluate(sites)["loss"] for model in (first, second)]
    message = (
        "no epoch of trees predicts the validation rows better than "
        f"{first.manifest.model}"
    )
    assert (message in caplog.text) == (not kept)
    if kept:
        assert losses[1] < 0.5 * losses[0]
        assert scored_again[1] < 0.5 * scored_again[0]
    else:
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
        assert scored_again[1] == pytest.approx(scored_again[0], rel=1e-4)


def test_trees_are_scored_with_the_model_of_another_name_that_they_start_from(tmp_path):
    """Sites compare the models that they are asked for with the one proposed."""
    sites = lines(0, np.square)
    first, second = line_and_trees(tmp_path, sites, "first", "second")
    write_manifest(home_folder(), second.manifest)
    straight = first.evaluate(sites, model_name="first")["loss"]
    for name in ("second", str(second.manifest.model)):
        assert second.evaluate(sites, model_name=name)["loss"] < 0.5 * straight
    with pytest.raises(SiteError, match=r"'model name'.*proposed with 'first'"):
        second.evaluate(sites, model_name="first")


def test_trees_behind_a_linear_model_of_the_same_rows_say_so(tmp_path, caplog):
    sites = lines(0, lambda x: 2.0 * x)
    how = {"strategy": "boost", "num_epochs": 2}
    alone = train_query(tmp_path, sites, LINES, **how)
    assert "behind the linear model" not in caplog.text
    linear = train_query(tmp_path, sites, LINES, "cg", num_epochs=9)
    write_manifest(home_folder(), linear.manifest)
    train_query(tmp_path, sites, LINES, **how, seed=1)
    train_query(tmp_path, sites, LINES.replace("a.y AS", "a.y + 1 AS"), **how)
    # of other rows, or of another label
    assert "behind the linear model" not in caplog.text
    train_query(tmp_path, sites, LINES, **how)
    rmse = alone.manifest.test["rmse"], linear.manifest.test["rmse"]
    text = (
        f"behind the linear model {linear.manifest.model} on the same held-out rows: "
        "rmse"
    )
    assert f"{text} {rmse[0]:.4g} against {rmse[1]:.4g}" in caplog.text
    # and those of a shape that a line does not have are not behind
    caplog.clear()
    curved = lines(0, np.square)
    write_manifest(home_folder(), train_query(tmp_path, curved, LINES, "cg").manifest)
    train_query(tmp_path, curved, LINES, "boost", num_epochs=9)
    assert "behind the linear model" not in caplog.text


def chosen(run):
    return [run.chosen[name] for name in ("leaves", "trees-per-round", "patience")]


def test_what_the_rows_decide_is_reported():
    sites = lines(0, np.square, rows=30_000)
    run = run_query(LINES, list(sites.values()), "boost")
    # 21,600 rows to train on: 14 leaves, 30 trees
    assert run.problem.train.joined_rows == pytest.approx(21_600, abs=200)
    assert chosen(run) == [14, 30, 2]
    requests = [seen.header["growth"] for seen in run.sent(TRAIN_BOOST)]
    assert {(growth["trees"], growth["leaves"]) for growth in requests} == {(30, 14)}
    few = run_query(SQL, WHOLE, "boost", num_epochs=1)
    assert chosen(few) == [7, 10, 5]
    # and where no rows validate, of which few epochs follow
    every = run_query(SQL, WHOLE, "boost", validation_fraction=0.0)
    assert chosen(every) == [7, 30, 0]


def test_scores_are_the_sums_of_both_models(tmp_path):
    sites = on(whole, store())
    frames = store()
    how, linear = train_linear(tmp_path, "squared", sites)
    boosted = train_store(tmp_path, "squared", sites, **how)
    first, trees = (each.reference(frames, SOURCE) for each in (linear, boosted))
    # a row of the label table is in several joined rows, in any order
    results = (first, trees, scored(boosted.table(sites)))
    by_row = [pd.DataFrame(each).groupby(0)[1] for each in results]
    first, trees, actual = (scores.sum() for scores in by_row)
    # the base score is the linear model's alone
    base = boosted.manifest.base_score[0] * by_row[0].size()
    np.testing.assert_allclose(actual, first + trees - base, rtol=1e-4)


def test_the_scores_of_two_models_have_masks_of_their_own(tmp_path):
    sites = on(whole, store())
    how, _ = train_linear(tmp_path, "squared", sites)
    boosted = train_store(tmp_path, "squared", sites, **how)
    seen = boosted.start(predicting(boosted.manifest, boosted.sql), sites)
    replies = [one for one in seen if one.action == Action.SCORE and one.is_reply]
    scores = [reply.arrays for reply in replies]
    assert len(scores) == 2 * len(FRAMES)
    for first, second in itertools.combinations(scores, 2):
        for key in first.keys() & second.keys():
            # with one mask the difference is that of the scores, a few thousand units
            difference = (first[key] - second[key]).astype(np.int32)
            assert np.ptp(difference.astype(float)) > 1 << 30


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 1}, "trained with other held-out rows: train both with one query"),
        ({"test_fraction": 0.3}, "trained with other held-out rows"),
        (
            {"validation_fraction": 0.0},
            "boost-from: trees that go on from a model need rows that",
        ),
        ({"loss": "logistic"}, "trained with other label, loss"),
        ({"boost_from": "missing"}, "missing"),
        ({"coreset_size": 10}, "does not go with boost-from"),
    ],
)
def test_a_start_of_another_label_or_of_other_rows_is_refused(
    tmp_path, settings, message
):
    sites = on(whole, store())
    how, _ = train_linear(tmp_path, "squared", sites)
    how |= {"loss": "squared", "sites": sites, **settings}
    with pytest.raises(Exception, match=message):
        train_store(tmp_path, **how)


def test_codes_are_for_trees_alone():
    with pytest.raises(Exception, match=r"codes.* is for trees"):
        run_query(SQL, WHOLE, "cg", encoders="c.region=codes")


SHARDED = one_per_site(sharded(FRAMES))


def boosted(lou, sites=SHARDED, change=None, **settings):
    how = {**HOW, "min_rows_per_leaf": 3, "validation_fraction": 0.2, "patience": 9}
    how |= settings
    return run_query(SQL, sites, change=change, lou=lou, **how)


@pytest.mark.cases("masked")
@each_privacy
def test_the_average_of_equal_shards_is_what_each_has_grown(privacy):
    orders = FRAMES["orders"]
    twins = one_per_site({**whole(FRAMES), "orders": [orders, orders]})
    for sites, rounds in ((WHOLE, 0), (twins, 3)):
        how = {"validation_fraction": 0.0, "patience": 0, "test_fraction": 0.0}
        how["privacy"] = privacy
        local, bagged = (boosted(lou, sites, **how) for lou in ("local", "bagged"))
        np.testing.assert_allclose(bagged.losses, local.losses, rtol=1e-5)
        assert len({seen.round for seen in bagged.sent(TRAIN_BAG)}) == rounds


@pytest.mark.cases("clear")
@each_privacy
def test_auto_takes_what_the_validation_rows_prefer(privacy):
    runs = {lou: boosted(lou, privacy=privacy) for lou in ("local", "bagged", "auto")}
    first = {
        lou: next(each.validation["loss"] for each in run.history if each.validation)
        for lou, run in runs.items()
    }
    assert first["local"] != first["bagged"]
    assert first["auto"] == min(first["local"], first["bagged"])
    own = runs["bagged"].arrays(TRAIN_BOOST, replies=True)
    assert {name for _, name in own} == {"sealed"}


@pytest.mark.parametrize(
    ("own_from", "tried", "chosen"),
    [
        (1, 1, "local in 3 of 3 epochs"),
        (2, 2, "bagged in 1 of 3 epochs, local in 2 of 3 epochs"),
        (9, 3, "bagged in 3 of 3 epochs"),
    ],
)
def test_shards_average_until_their_own_trees_are_preferred(
    monkeypatch, own_from, tried, chosen
):
    taken = boosting._step
    calls = itertools.count(2)

    def step(*facts, **how):
        # in turns of own trees and of the average, while both are tried
        epoch, is_averaged = divmod(next(calls), 2)
        found = taken(*facts, **how)
        worse = bool(is_averaged) == (epoch >= own_from)
        return found._replace(
            metrics=found.metrics._replace(validation={"loss": float(worse)})
        )

    monkeypatch.setattr(boosting, "_step", step)
    run = boosted("auto")
    assert len({seen.round for seen in run.sent(TRAIN_BAG)}) == tried
    assert run.chosen["lou"] == chosen


def test_large_shards_keep_their_trees_where_no_rows_validate(monkeypatch):
    monkeypatch.setattr(boosting, "LARGE_SHARD", 1)
    run = boosted("auto", validation_fraction=0.0, patience=0)
    assert not run.sent(TRAIN_BAG)
    assert run.chosen["lou"] == "local in 3 of 3 epochs"
    assert "the trees that a shard has grown" not in str(report_dict(run.report))


def written(folder, shards, policy):
    """A site on disk for each shard, whose table has this policy."""
    sites = {}
    for site, tables in named_sites(shards).items():
        ((name, (frame,)),) = tables.items()
        sites[site] = write_site(folder / site, {name: frame}, {name: policy})
    return sites


@pytest.mark.parametrize("lou", ["auto", "bagged"])
def test_trees_are_shown_where_the_policies_let_models_leave(tmp_path, lou):
    policy = "releases = {{ models = '{}', scores = 'masked' }}"
    for level, count in (("clear", 1), ("sealed", 0)):
        sites = written(tmp_path / level, sharded(FRAMES), policy.format(level))
        if lou == "bagged" and not count:
            with pytest.raises(
                Exception, match=r"releases.models = sealed.*lou = 'local'"
            ):
                boosted(lou, sites)
            continue
        run = boosted(lou, sites)
        assert len({seen.round for seen in run.sent(TRAIN_BAG)}) == 3 * count
        kinds = {release["what"] for release in run.releases}
        assert ("trees" in kinds) == bool(count)


@pytest.mark.parametrize("how", ["replayed", "swapped", "missing"])
def test_sealed_trees_that_belong_elsewhere_are_refused(how):
    earlier = {}

    @on_requests(TRAIN_BAG)
    def change(seen):
        for key in list(seen.arrays):
            if how == "missing":
                del seen.arrays[key]
                return
            if how == "replayed" and key in earlier:
                seen.arrays[key] = earlier[key]
            if how == "swapped":
                others = (k for k in seen.arrays if k[0] == key[0] and k != key)
                seen.arrays[key] = seen.arrays[next(others)]
        earlier.update(seen.arrays)

    message = "trees/" if how == "missing" else "the sealed trees .* cannot be opened"
    with pytest.raises(Exception, match=message):
        boosted("bagged", change=change)


def clinics(seed, *, is_apart):
    """A clinic and a register, of the sick and the well; and a table that they join."""
    rng = np.random.default_rng(seed)
    rows = 300
    is_sick = rng.random(2 * rows) < 0.5
    if is_apart:
        is_sick = np.arange(2 * rows) < rows
    place = {"k": rng.integers(0, 20, 2 * rows), "y": np.where(is_sick, "sick", "well")}
    place["x"] = rng.normal(np.where(is_sick, 0.5, -0.5)).round(3)
    place["kind"] = np.where(rng.random(2 * rows) < 0.2 + 0.3 * is_sick, "new", "old")
    other = pd.DataFrame({"k": np.arange(20), "z": np.arange(20) % 3})
    return {"a": pieces(pd.DataFrame(place), rows), "b": [other]}


CLINICS = "SELECT a.y AS label, a.x, a.kind, b.z FROM a JOIN b ON a.k = b.k"


def area(scores, is_sick):
    """The area under the curve, by pairs."""
    above = scores[is_sick][:, None] - scores[~is_sick][None]
    return float(np.mean((above > 0) + 0.5 * (above == 0)))


@pytest.mark.cases("bagged")
@pytest.mark.parametrize("lou", ["auto", "pooled", "local", "bagged"])
def test_shards_of_one_class_each_do_not_tell_rows_by_their_shard(
    tmp_path, lou, caplog
):
    model = train_query(
        tmp_path,
        named_sites(clinics(0, is_apart=True)),
        CLINICS,
        strategy="boost",
        num_epochs=0,
        lou=lou,
        validation_fraction=0.2,
        patience=2,
    )
    new = clinics(1, is_apart=False)
    held_out = model.manifest.test["auc"]
    on_new = model.evaluate(named_sites(new))["auc"]
    finding = (
        "100% of the label's variance is between the shards of a (a-0, a-1: one label "
        "only)"
    )
    assert (finding in caplog.text) == (lou != "pooled")
    if lou == "local":
        # what the warning is about
        assert "the shard is a feature of this model" in caplog.text
        assert (held_out, round(on_new, 1)) == (1.0, 0.5)
        return
    if lou == "bagged":
        assert "learn little from its columns" in caplog.text
        assert max(held_out, on_new) < 0.62
        return
    rows = pd.concat(clinics(0, is_apart=True)["a"]), pd.concat(new["a"])
    features = [
        np.column_stack([each["x"], each["kind"] == "new", each["k"] % 3])
        for each in rows
    ]
    options = {"objective": "binary", "num_leaves": 7, "learning_rate": 0.05}
    options["verbosity"] = -1
    data = lightgbm.Dataset(features[0], rows[0]["y"] == "sick")
    slow = lightgbm.train(options, data, 60)
    expected = area(slow.predict(features[1]), (rows[1]["y"] == "sick").to_numpy())
    assert on_new > expected - 0.03
    # of 120 rows: no more than chance apart
    assert held_out == pytest.approx(on_new, abs=0.15)


def test_shards_that_tell_the_label_and_show_nothing_are_refused_with_what_helps(
    tmp_path,
):
    policy = "releases = { models = 'sealed', labels = 'clear' }"
    sites = written(tmp_path, clinics(0, is_apart=True), policy)
    with pytest.raises(
        Exception, match=r"strategy = 'cg' trains without .* lou = 'local' accepts"
    ):
        run_query(CLINICS, sites, **HOW)
    linear = run_query(CLINICS, sites, "cg", num_epochs=5).strategy
    assert 0.65 < linear.report.final_test["auc"] < 0.95
    own = run_query(CLINICS, sites, **HOW, lou="local").strategy
    assert own.report.final_test["auc"] == 1.0


def test_shards_that_are_alike_are_not_warned_of(caplog):
    run = run_query(CLINICS, one_per_site(clinics(2, is_apart=False)), **HOW)
    assert "between the shards" not in caplog.text
    assert "pooled" not in run.chosen["lou"]


def test_only_the_table_that_tells_the_label_pools(caplog):
    tables = clinics(3, is_apart=True)
    tables["b"] = pieces(tables["b"][0], 9)
    run = run_query(CLINICS, one_per_site(tables), **HOW, validation_fraction=0.2)
    assert "between the shards of a " in caplog.text
    assert "between the shards of b" not in caplog.text
    assert run.chosen["lou"] == "bagged, but pooled for a, in 3 of 3 epochs"
    content = report_dict(run.report)
    assert "So the shards pool sums by column" in "".join(content["warnings"])


@pytest.mark.cases("squared-clear", "softmax-masked")
@each_privacy
@each_loss
def test_pooled_trees_of_shards_lower_the_loss_and_are_saved(tmp_path, loss, privacy):
    sites = on(sharded, store())
    how = {**HOW, "lou": "pooled", "min_rows_per_leaf": 3, "privacy": privacy}
    how |= {"validation_fraction": 0.0, "test_fraction": 0.0}
    first, model = (
        train_store(tmp_path, loss, sites, **how | {"num_epochs": epochs})
        for epochs in (1, 4)
    )
    assert model.manifest.train["loss"] < first.manifest.train["loss"]
    again = model.evaluate(sites, privacy=privacy)["loss"]
    assert again == pytest.approx(model.manifest.train["loss"], rel=1e-5)


@pytest.mark.parametrize("mode", ["train", "explain"])
def test_the_page_says_what_the_rows_decided(mode):
    if mode == "train":
        content = report_dict(run_query(SQL, WHOLE, **HOW).report)
    else:
        content = explain(SQL, WHOLE, **HOW)
    page = render(content)
    assert (
        "Trees: 5 of each table in an epoch, of at most 8 leaves, until 10 epochs"
        in " ".join(page.split())
    )
    assert "boosted trees" in page
    assert "linear models" not in page


LINEAR = """SELECT a.y AS label, a.x, b.z, c.kind FROM a
JOIN b ON a.b = b.id JOIN c ON a.c = c.id"""


def straight(rows: int = 2_000) -> dict[str, pd.DataFrame]:
    """A label that is linear in three tables' columns."""
    rng = np.random.default_rng(6)
    b = pd.DataFrame({"id": np.arange(300), "z": rng.normal(size=300)})
    c = pd.DataFrame({"id": np.arange(40), "kind": rng.choice(list("uvw"), 40)})
    a = pd.DataFrame({"x": rng.normal(size=rows), "b": rng.integers(0, 300, rows)})
    a["c"] = rng.integers(0, 40, rows)
    of_kind = c["kind"].map({"u": -1.0, "v": 0.0, "w": 2.0}).to_numpy()
    a["y"] = 2 * a["x"] + 3 * b["z"].to_numpy()[a["b"]] + of_kind[a["c"]]
    a["y"] += 0.1 * rng.normal(size=rows)
    return {"a": a, "b": b, "c": c}


STRAIGHT = on(whole, straight())
STRAIGHT_SHARDS = {**STRAIGHT, "a": {"a": pieces(straight()["a"], 900)}}


def linear_rounds(run, field="is-linear") -> list[bool]:
    """Which epochs fitted linear models, by what sites were asked for."""
    asked = {}
    for seen in run.seen:
        if seen.action == TRAIN_BOOST and not seen.is_reply:
            asked[seen.round] = seen.header.get(field, False)
    return [asked[number] for number in sorted(asked)]


@each_privacy
def test_trees_go_on_from_linear_models_that_they_fit_first(privacy):
    how = {"strategy": "boost", "privacy": privacy, "effects": "none"}
    run, trees = (
        run_query(LINEAR, STRAIGHT, linear_epochs=epochs, **how) for epochs in (12, 0)
    )
    rounds = linear_rounds(run)
    assert rounds[0]
    assert not rounds[-1]
    # they do not come back
    assert rounds == sorted(rounds, reverse=True)
    assert not any(linear_rounds(trees))
    rmse, of_trees = (one.strategy.final.test["rmse"] for one in (run, trees))
    # the noise has 0.1
    assert rmse < 0.13
    assert of_trees > 1.6 * rmse
    assert len(rounds) <= len(linear_rounds(trees))


def test_linear_epochs_are_at_most_a_quarter():
    how = {"strategy": "boost", "effects": "none"}
    for most, linear in ((3, 0), (8, 2)):
        run = run_query(LINEAR, STRAIGHT, num_epochs=most, **how)
        assert sum(linear_rounds(run)) == linear


def test_shrunk_fits_come_first_then_full_ones_each_while_they_gain():
    run = run_query(LINEAR, STRAIGHT, strategy="boost", effects="none")
    count = sum(linear_rounds(run))
    shrunk = linear_rounds(run, "is-shrunk")
    first = sum(shrunk)
    assert 0 < first < count < 12
    assert shrunk == [True] * first + [False] * (len(shrunk) - first)
    judged = [item.validation["loss"] for item in run.history if item.validation]
    losses = np.array(judged[:count])
    falls = -np.diff(losses) / losses[1:]
    is_last = np.isin(np.arange(1, count), [first - 1, count - 1])
    assert (falls[~is_last] >= 0.01).all()
    assert (falls[is_last] < 0.01).all()


@pytest.mark.cases("clear-sharded", "masked-whole")
@pytest.mark.parametrize("sites", [STRAIGHT, STRAIGHT_SHARDS], ids=["whole", "sharded"])
@each_privacy
def test_saved_linear_models_and_trees_score_as_in_training(tmp_path, sites, privacy):
    how = {"strategy": "boost", "privacy": privacy, "num_epochs": 12, "effects": "none"}
    run = run_query(LINEAR, sites, state=tmp_path, test_split="time(a.x)", **how)
    model = Model(LINEAR, tmp_path, make_manifest(run.strategy))
    _, tested = run.problem.joined_rows
    last = float(straight()["a"]["x"].nlargest(tested).min())
    again = model.evaluate(sites, f"{LINEAR} WHERE a.x >= {last!r}", privacy=privacy)
    assert again["loss"] == pytest.approx(model.manifest.test["loss"], rel=1e-4)
    if sites is STRAIGHT:
        found = scored(model.table(sites, privacy=privacy))
        check_equal(found, model.reference(straight(), LINEAR.partition("kind ")[2]))
    assert all(linear_parts(model, alias) for alias in "abc")


def linear_parts(model: Model, alias: str) -> int:
    """In how many epochs the first shard of a table has fitted a linear model."""
    return model.saved(alias).parameters.tobytes().count(b'{"means"')


@pytest.mark.parametrize("lou", ["bagged", "pooled", "local"])
def test_shards_that_share_trees_fit_no_linear_model_of_their_own(tmp_path, lou):
    how = {"num_epochs": 8, "effects": "none", "lou": lou}
    model = train_query(tmp_path, STRAIGHT_SHARDS, LINEAR, "boost", **how)
    assert (linear_parts(model, "a") > 0) == (lou == "local")
    assert linear_parts(model, "b") > 0


def test_shards_that_tell_the_label_fit_no_linear_model(tmp_path):
    frames = straight()
    a = frames["a"].sort_values("y")
    sites = {**STRAIGHT, "a": {"a": pieces(a, 1_000)}}
    how = {"num_epochs": 8, "effects": "none"}
    model = train_query(tmp_path, sites, LINEAR, "boost", **how)
    assert linear_parts(model, "a") == 0
    assert linear_parts(model, "b") > 0


@pytest.mark.parametrize(
    "settings", [{"validation_fraction": 0.0}, {"linear_epochs": 0}], ids=str
)
def test_there_are_no_linear_epochs_that_nothing_judges_or_nobody_wants(settings):
    run = run_query(LINEAR, STRAIGHT, strategy="boost", num_epochs=8, **settings)
    assert not any(linear_rounds(run))


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"linear_epochs": 0}, 0),
        ({"validation_fraction": 0.0, "num_epochs": 8}, 0),
        ({"num_epochs": 3}, 0),
        ({"num_epochs": 8}, 2),
        ({"linear_epochs": 3}, 3),
    ],
    ids=str,
)
def test_a_site_fits_no_linear_model_that_was_not_proposed(settings, allowed):
    @on_requests(TRAIN_BOOST)
    def lie(seen):
        seen.header["is-linear"] = True

    match = (
        f"'linear epochs': the run was proposed with {allowed}, and the request says "
        f"{allowed + 1}"
    )
    with pytest.raises(SiteError, match=match):
        run_query(LINEAR, STRAIGHT, strategy="boost", change=lie, **settings)


def test_a_linear_step_that_loses_is_not_taken(tmp_path):
    """Categories of noise alone: what they tell is wrong of the rows that validate."""
    frames = straight()
    rng = np.random.default_rng(2)
    noise = frames["a"].assign(
        y=rng.normal(size=2_000), k=rng.integers(0, 90, 2_000).astype(str)
    )
    sites = on(whole, {**frames, "a": noise})
    sql = LINEAR.replace("a.x", "a.k")
    how = {"num_epochs": 8, "effects": "none", "min_rows_per_leaf": 1}
    run = run_query(sql, sites, "boost", state=tmp_path, **how)
    assert sum(linear_rounds(run)) == 2
    first = next(item for item in run.history if item.validation)
    base = run.problem.validated.constant_metrics(run.problem.base_score)
    assert first.validation["loss"] == pytest.approx(base["loss"])
    model = Model(sql, tmp_path, make_manifest(run.strategy))
    assert linear_parts(model, "a") == 0
