"""Regions of one table, which the trees of all others read."""

import re

import duckdb
import numpy as np
import pandas as pd
import pytest

from strategies.inference.manifest import write_manifest
from strategies.inference.predict import Evaluate
from strategies.methods.boost import strategy
from strategies.run.strategy import BestEpoch
from strategies.training import strategy as training_strategy
from strategies.training.saving import make_manifest
from tests.support.federated import (
    WatchedGrid,
    on_requests,
    run_query,
    whole,
    write_site,
)
from tests.support.predicted import Model, features_of, model_of, on, predicting, scored
from tp_flower.errors import DivergedError, SettingsError, SiteError
from tp_flower.files import HOME_VARIABLE, home_folder
from tp_flower.joins.pairs import NO_REGION
from tp_flower.learning.models.local_model import pair_features
from tp_flower.methods.boost.messages import TRAIN_PAIRS, TRAIN_REGIONS
from tp_flower.methods.boost.regions import region_tables
from tp_flower.protocol.messages import Action
from tp_flower.query import Query
from tp_flower.settings import PrivacySettings, Settings

SQL = """SELECT a.y AS label, a.x, b.z, c.u
FROM a JOIN b ON a.b = b.id JOIN c ON b.c = c.id"""
LEFT = SQL.replace("JOIN b", "LEFT JOIN b").replace("JOIN c", "LEFT JOIN c")
HOW = {"effects": "none", "num_epochs": 25, "test_fraction": 0.25}
FEW = {**HOW, "num_epochs": 4}


def product_of_two_tables(rows=2_400, seed=0):
    """Return tables of which no sum explains the label: it is x times z, plus u."""
    rng = np.random.default_rng(seed)
    c = pd.DataFrame({"id": np.arange(12), "u": rng.normal(size=12)})
    b = pd.DataFrame({"id": np.arange(150), "c": rng.integers(0, 12, 150)})
    b["z"] = rng.normal(size=150)
    a = pd.DataFrame({"b": rng.integers(0, 170, rows), "x": rng.integers(-4, 5, rows)})
    mine = b.reindex(a.b).reset_index(drop=True).fillna(0.0)
    a["y"] = (a.x + 5) * (mine.z + 1) + c.u.to_numpy()[mine.c.astype(int)]
    a["y"] += rng.normal(0.0, 0.1, rows)
    return {"a": a, "b": b, "c": c}


FRAMES = product_of_two_tables()


def reference(model: Model, sql: str, frames: dict) -> np.ndarray:
    """Return the scores of DuckDB's joined rows by the saved parts of a model.

    Nothing of pairs, messages or masks is in it.
    """
    connection = duckdb.connect()
    for name, frame in frames.items():
        connection.register(name, frame.assign(position=np.arange(len(frame))))
    positions = ", ".join(f"{name}.position AS {name}" for name in frames)
    source = sql[sql.index("FROM") :]
    joined = connection.execute(f"SELECT {positions} {source} ORDER BY a.position").df()
    saved = {name: model.saved(name) for name in frames}
    features = {name: features_of(saved[name], frames[name]) for name in frames}
    divided = model.manifest.divided
    own = model_of(saved[divided]).regions(features[divided])
    region = np.append(own, NO_REGION)[joined[divided].fillna(-1).astype(int)]
    total = np.full(len(joined), model.manifest.base_score[0])
    for name in frames:
        there = joined[name].notna().to_numpy()
        rows = joined[name][there].astype(int).to_numpy()
        read = None if name == divided else region[there].astype(np.uint8)
        paired = pair_features(features[name], rows, read)
        total[there] += model_of(saved[name]).scores(paired)[:, 0]
    return total


@pytest.mark.cases("clear-inner", "masked-left")
@pytest.mark.parametrize("sql", [SQL, LEFT], ids=["inner", "left"])
@pytest.mark.parametrize("privacy", ["clear", "masked"])
def test_a_product_of_two_tables_is_learnt(tmp_path, sql, privacy):
    how = {**HOW, "privacy": PrivacySettings(scores=privacy)}
    sites = on(whole, FRAMES)
    run = run_query(sql, sites, "boost", state=tmp_path, **how)
    alone = run_query(sql, sites, "boost", regions="none", **how)
    table = run.chosen["regions"]["table"]
    assert table in ("a", "b")
    assert run.strategy.final.test["rmse"] < 0.6 * alone.strategy.final.test["rmse"]
    model = Model(sql, tmp_path, make_manifest(run.strategy))
    assert model.manifest.divided == table
    expected = reference(model, sql, FRAMES)
    predicted = [score for _, score in sorted(scored(model.table(sites)))]
    np.testing.assert_allclose(predicted, expected, atol=1e-4)
    labels = FRAMES["a"].y
    if sql is SQL:
        labels = labels[FRAMES["a"].b.isin(FRAMES["b"].id)]
    error = float(np.sqrt(np.mean((expected - labels) ** 2)))
    assert model.evaluate(sites)["rmse"] == pytest.approx(error, rel=1e-4)


def test_shards_weights_and_classes_are_scored_as_in_training(tmp_path):
    frames = FRAMES["a"].assign(w=2.0 + FRAMES["a"].x % 3, big=FRAMES["a"].y > 6)
    half = np.arange(len(frames)) % 2 == 0
    sites = {
        "a": {"a": [frames[half], frames[~half]]},
        "b": {"b": [FRAMES["b"][:70], FRAMES["b"][70:]]},
        "c": {"c": [FRAMES["c"]]},
    }
    sql = LEFT.replace("a.y AS label", "a.big AS label, a.w AS weight")
    how = {"num_epochs": 3, "test_fraction": 0.0, "validation_fraction": 0.0}
    run = run_query(
        sql, sites, "boost", state=tmp_path, regions="a", lou="local", **how
    )
    manifest = make_manifest(run.strategy)
    again = Model(sql, tmp_path, manifest).evaluate(sites)
    assert again["loss"] == pytest.approx(manifest.train["loss"], rel=1e-5)
    # the regions of the shards are numbered one after the other
    first = [part.first_region for part in manifest.table("a").parts]
    assert first[0] == 0
    assert 2 <= first[1] < run.chosen["regions"]["regions"]


def test_a_shard_may_have_one_region(tmp_path):
    a = FRAMES["a"]
    # of the second LightGBM makes no regions, of the third there are no rows
    sites = {**on(whole, FRAMES), "a": {"a": [a[:-6], a[-6:], a[:0]]}}
    how = {**FEW, "regions": "a", "lou": "local", "validation_fraction": 0.0}
    how["test_fraction"] = 0.0
    run = run_query(SQL, sites, "boost", state=tmp_path, **how)
    manifest = make_manifest(run.strategy)
    regions = run.chosen["regions"]["regions"]
    first = [part.first_region for part in manifest.table("a").parts]
    assert first == [0, regions - 2, regions - 1]
    again = Model(SQL, tmp_path, manifest).evaluate(sites)
    assert again["loss"] == pytest.approx(manifest.train["loss"], rel=1e-5)


def test_trees_go_on_from_a_model_with_regions(tmp_path, monkeypatch):
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    sites = on(whole, FRAMES)
    first = run_query(SQL, sites, "boost", state=tmp_path, regions="a", **FEW)
    start = make_manifest(first.strategy)
    write_manifest(home_folder(), start)
    how = {**HOW, "boost_from": str(start.model), "num_epochs": 9}
    for regions in ("none", "b"):
        run = run_query(SQL, sites, "boost", state=tmp_path, regions=regions, **how)
        manifest = make_manifest(run.strategy)
        assert manifest.train["loss"] < start.train["loss"]
        evaluation = Evaluate(Query.from_sql(SQL), manifest, mode="evaluate")
        Model(SQL, tmp_path, manifest).start(evaluation, sites)
        losses = [manifest.train["loss"], manifest.test["loss"]]
        assert min(losses) < evaluation.metrics["loss"] < max(losses)
        for privacy in (run.strategy.report.privacy, evaluation.report()["privacy"]):
            told = {each["message"] for each in privacy["messages"]}
            assert Action.DIVIDE in told


@pytest.mark.parametrize("best", [1, 2, 3])
def test_the_best_model_may_be_of_before_the_regions(tmp_path, monkeypatch, best):
    after = BestEpoch.after

    def is_best(self, epoch, loss):
        return after(self, epoch, loss if epoch <= best else 1e9 + epoch)

    monkeypatch.setattr(BestEpoch, "after", is_best)
    sites = on(whole, FRAMES)
    # epoch 2 is the last before there are pairs
    how = {**HOW, "effects": "b", "linear_epochs": 1, "regions": "a", "num_epochs": 9}
    run = run_query(SQL, sites, "boost", state=tmp_path, **how)
    assert run.chosen["best-epoch"] == best
    assert [seen for seen in run.seen if seen.action == TRAIN_PAIRS]
    manifest = make_manifest(run.strategy)
    losses = [manifest.train["loss"], manifest.test["loss"]]
    again = Model(SQL, tmp_path, manifest).evaluate(sites)["loss"]
    assert min(losses) < again < max(losses)


def test_a_training_that_diverges_with_regions_ends_with_its_best_model(
    tmp_path, monkeypatch
):
    def check_epoch(epoch, *_):
        if epoch == 6:
            raise DivergedError("by this test")

    monkeypatch.setattr(training_strategy, "check_epoch", check_epoch)
    # gains of columns, and of the region that they are read beside
    how = {**HOW, "linear_epochs": 1, "regions": "a"}
    run = run_query(SQL, owned(tmp_path), "boost", **how)
    assert run.strategy.verdict.startswith("diverged in epoch 6")
    shapes = {
        name: each.shape for name, each in run.strategy.outcome.coefficients.items()
    }
    assert shapes == {"a": (1, 1), "b": (2, 1), "c": (2, 1)}


POLICY = """min-rows = {}
coefficients = true
sees-regions = {}
releases = {{ regions = {} }}
"""


def owned(folder, fewest=1, *, sees="true", most=32, frames=FRAMES):
    """Return sites whose policies say what regions may be."""
    return {
        name: write_site(
            folder / name,
            {name: frame},
            {name: POLICY.format(fewest if name == "a" else 1, sees, most)},
        )
        for name, frame in frames.items()
    }


def regions_sent(run):
    """Return by node the regions that have been sent, of its rows."""
    replies = [
        seen for seen in run.seen if seen.action == TRAIN_REGIONS and seen.is_reply
    ]
    return [array for seen in replies for array in seen.arrays.values()]


def test_a_table_has_no_more_regions_than_its_policy_allows(tmp_path):
    last = {}
    for most in (32, 2):
        sites = owned(
            tmp_path / str(most), most=most, frames=product_of_two_tables(4_800)
        )
        run = run_query(SQL, sites, "boost", regions="a", **FEW)
        last[most] = regions_sent(run)[0].max()
    # as many as the server asks for, of so many rows, where the policy lets it
    assert last[32] >= 2
    assert last[2] == 1


def test_regions_are_as_few_and_as_large_as_policies_say(tmp_path):
    run = run_query(SQL, owned(tmp_path, 300, most=3), "boost", regions="a", **HOW)
    (regions,) = regions_sent(run)
    assert len(regions) == sum(FRAMES["a"].b.isin(FRAMES["b"].id))
    trained = run.problem.train.tables["a"].rows
    counts = np.bincount(regions[:trained])
    assert 2 <= len(counts) <= 3
    assert counts.min() >= 300
    noted = [line for line in run.releases if line["what"] == "regions"]
    assert [line["action"] for line in noted] == [TRAIN_REGIONS]
    assert f"in which of {len(counts)} regions each row is" in noted[0]["scope"]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"most": 0}, "the policy of 'a' allows no regions (releases.regions)"),
        ({"sees": "false"}, "lets none of its rows be scored by regions"),
    ],
)
def test_policies_keep_regions_away(tmp_path, how, reason):
    sites = owned(tmp_path, **how)
    run = run_query(SQL, sites, "boost", **{**HOW, "num_epochs": 5})
    assert not regions_sent(run)
    with pytest.raises(SettingsError, match=re.escape(reason)):
        run_query(SQL, sites, "boost", regions="a", **HOW)


def test_a_site_refuses_what_its_policy_and_the_proposal_do_not_allow(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(strategy, "divisible_tables", lambda *_: ["a"])
    for how, match in (
        ({"most": 0}, r"releases.regions = 0\) refuses"),
        ({"sees": "false"}, r"\(sees-regions\) refuses"),
    ):
        folder = tmp_path / match[:12]
        with pytest.raises(SiteError, match=match):
            run_query(SQL, owned(folder, **how), "boost", **HOW)
    with pytest.raises(SiteError, match="'regions': the run was proposed with 'reg"):
        run_query(SQL, owned(tmp_path / "b"), "boost", regions="none", **HOW)


def test_advice_about_regions_is_taken():
    noisy = PrivacySettings(labels="laplace", label_epsilon=1.0)
    with pytest.raises(SettingsError, match='leaves without noise; use "none"'):
        Settings(strategy="boost", regions="a", privacy=noisy)
    for regions in ("none", "auto"):
        settings = Settings(strategy="boost", regions=regions, privacy=noisy)
        assert region_tables(settings) is None


def test_a_prediction_tells_no_regions_against_a_policy(tmp_path):
    state = tmp_path / "state"
    sites = owned(tmp_path / "sites")
    run = run_query(SQL, sites, "boost", state=state, regions="a", **HOW)
    model = Model(SQL, state, make_manifest(run.strategy))
    model.table(sites)
    for how, match in (
        ({"most": 0}, r"releases.regions = 0\) refuses"),
        ({"sees": "false"}, r"\(sees-regions\) refuses"),
    ):
        owned(tmp_path / "sites", **how)
        with pytest.raises(SiteError, match=match):
            model.table(sites)


def no_joined_row(seen):
    key = next(key for key in seen.arrays if key[1] == "multiplicity")
    seen.arrays[key][0] += 1


def twice(seen):
    for name in ("rows", "regions"):
        key = next(key for key in seen.arrays if key[1] == name)
        seen.arrays[key][1] = seen.arrays[key][0]


def in_two_halves(seen):
    """A pair of two joined rows or more comes twice, all of them counted once."""
    arrays = seen.arrays
    repeated = [
        (part, int(np.argmax(counts > 1)))
        for (part, name), counts in arrays.items()
        if name == "multiplicity" and (counts > 1).any()
    ]
    if not repeated:  # no pair of this site is joined twice
        return
    part, at = repeated[0]
    for name in ("rows", "regions", "multiplicity"):
        values = arrays[part, name]
        arrays[part, name] = np.insert(values, at, values[at])
    arrays[part, "multiplicity"][at] = 1
    arrays[part, "multiplicity"][at + 1] -= 1
    tested = np.unpackbits(arrays[part, "tested"])[: len(arrays[part, "rows"]) - 1]
    arrays[part, "tested"] = np.packbits(np.insert(tested, at, tested[at]))


def weighing_less_than_nothing(seen):
    for part, name in list(seen.arrays):
        if name == "multiplicity":
            masses = seen.arrays.pop((part, name)).astype(np.float32)
            rows = seen.arrays[part, "rows"][: len(masses)]
            _, first, pairs = np.unique(rows, return_index=True, return_counts=True)
            if (pairs > 1).any():
                row = first[np.argmax(pairs)]
                (others,) = np.nonzero(rows == rows[row])
                masses[others[:2]] += 50.0, -50.0
            seen.arrays[part, "masses"] = masses


def of_no_table(seen):
    seen.header["table"] = "elsewhere"


def other_regions(seen):
    key = next(key for key in seen.arrays if key[1] == "regions")
    seen.arrays[key] = (seen.arrays[key] + np.arange(len(seen.arrays[key])) % 2).astype(
        np.uint8
    )


@pytest.mark.parametrize(
    ("lie", "match"),
    [
        (no_joined_row, "the pairs are not those of the rows"),
        (twice, "the pairs are not those of the rows"),
        (in_two_halves, "the pairs are not those of the rows"),
        (weighing_less_than_nothing, "'masses' must hold weights above 0"),
        (of_no_table, "the run has no table 'elsewhere'"),
        (other_regions, "the regions are not those that the table has sent"),
    ],
)
def test_pairs_that_are_not_those_of_the_rows_are_refused(lie, match):
    change = on_requests(TRAIN_PAIRS)(lie)
    sites = on(whole, FRAMES)
    # which table it is the proposal leaves open
    regions = "auto" if lie is of_no_table else "a"
    with pytest.raises(SiteError, match=match):
        run_query(SQL, sites, "boost", change=change, regions=regions, **HOW)


def in_all_regions(seen):
    for part in seen.header["parts"]:
        scored = int(np.unpackbits(seen.arrays[part["id"], "rows"]).sum())
        rows = np.repeat(np.arange(scored, dtype=np.int32), 9)
        seen.arrays[part["id"], "pair-rows"] = rows
        seen.arrays[part["id"], "regions"] = (np.arange(len(rows)) % 9).astype(np.uint8)


def test_only_models_with_regions_score_pairs(tmp_path):
    sites = on(whole, FRAMES)
    change = on_requests(Action.SCORE)(in_all_regions)
    noisy = PrivacySettings(predictions=1.0)
    for name, settings, privacy, match in (
        # the mean of many scores of a row would have little noise
        ("cg", {}, noisy, "a row has one score with noise"),
        ("cg", {}, PrivacySettings(), "has sent no regions"),
        ("boost", {"regions": "a"}, PrivacySettings(), "are not those that the table"),
    ):
        state = tmp_path / name
        run = run_query(SQL, sites, name, state=state, **{**FEW, **settings})
        predict = predicting(run.strategy, SQL, privacy=privacy)
        with (
            WatchedGrid(sites, change, state=state) as grid,
            pytest.raises(SiteError, match=match),
        ):
            predict.start(grid)


TWO_ROLES = """SELECT a.y AS label, a.x, b.z, d.z AS other
FROM a JOIN b ON a.b = b.id JOIN b AS d ON a.d = d.id"""


def test_rows_in_two_roles_tell_one_division_and_none_that_no_trees_read():
    frames = {"a": FRAMES["a"].assign(d=FRAMES["a"].b[::-1].to_numpy() % 150)}
    frames["b"] = FRAMES["b"]
    run = run_query(TWO_ROLES, on(whole, frames), "boost", **FEW)
    assert len(regions_sent(run)) == 2  # of a, and of b in one role
    run = run_query(TWO_ROLES, on(whole, frames), "boost", **{**FEW, "num_epochs": 1})
    assert not {TRAIN_REGIONS, TRAIN_PAIRS} & {seen.action for seen in run.seen}
