"""Effects of tables' keys in whole runs: in metrics, at the sites, in prediction."""

import numpy as np
import pandas as pd
import pytest
from numpy.random import default_rng
from numpy.testing import assert_allclose

from strategies.training.saving import make_manifest
from tests.support.federated import (
    on_requests,
    pieces,
    run_query,
    task_of,
    whole,
    write_site,
)
from tests.support.predicted import Model, on, scored, train
from tp_flower.errors import SettingsError, SiteError
from tp_flower.protocol.messages import Action
from tp_flower.settings import PrivacySettings, Settings

CLEAR = PrivacySettings(scores="clear")
FEATURES = "r.hour, u.age, f.year"
SOURCE = (
    "FROM ratings r {join} users u ON r.user = u.id {join} films f ON r.film = f.id"
)
JOIN = SOURCE.format(join="JOIN")
LEFT = SOURCE.format(join="LEFT JOIN")
LABELS = {
    "squared": "r.stars",
    "logistic": "r.stars > 0",
    "softmax": "CASE WHEN r.stars > 1 THEN 'up' WHEN r.stars < -1 THEN 'down' "
    "ELSE 'even' END",
}
NOISY = PrivacySettings(predictions=1.0)
HOW = {"validation_fraction": 0.3, "num_epochs": 4, "device": "cpu"}


def ratings(rows: int = 900, seed: int = 0) -> dict[str, pd.DataFrame]:
    """Stars of users for films, which have levels that no column tells."""
    rng = default_rng(seed)
    # not by the seed: the same users and films again
    fixed = default_rng(77)
    users = pd.DataFrame({"id": np.arange(30), "age": fixed.integers(18, 80, 30)})
    films = pd.DataFrame(
        {"id": 100 + np.arange(20), "year": fixed.integers(1950, 2020, 20)}
    )
    levels = 1.2 * fixed.normal(size=30), 1.2 * fixed.normal(size=20)
    user, film = rng.integers(0, 31, rows), rng.integers(0, 20, rows)
    stars = 0.02 * (users["age"].to_numpy()[user % 30] - 50) + 0.5 * rng.normal(
        size=rows
    )
    stars += levels[0][user % 30] + levels[1][film]
    table = pd.DataFrame(
        {
            # of nobody's, some
            "user": np.where(user == 30, 999, user),
            "film": 100 + film,
            "time": rng.permutation(rows),
            "hour": rng.integers(0, 24, rows),
            "stars": stars.round(3),
        }
    )
    return {"ratings": table, "users": users, "films": films}


RATINGS = ratings()
WHOLE = on(whole, RATINGS)
SHARDED = {
    **WHOLE,
    "users": {"users": pieces(RATINGS["users"], 12)},
    "ratings": {"ratings": pieces(RATINGS["ratings"], 400)},
}


def settings_of(loss: str) -> dict[str, object]:
    return {"task": task_of(loss), "loss": loss, **HOW}


def query(loss: str = "squared", source: str = JOIN) -> str:
    return f"SELECT {LABELS[loss]} AS label, {FEATURES} {source}"


def fitted(
    folder, strategy, loss="squared", sites=WHOLE, source=JOIN, **settings
) -> Model:
    how = {**settings_of(loss), **settings}
    return train(folder, sites, query(loss, source), strategy, **how)


def added(model: Model, frames, source: str = JOIN) -> pd.DataFrame:
    """What the model adds to the scores of its tables' own models, by rating."""
    sites = on(whole, frames)
    found = scored(model.table(sites, f"SELECT {FEATURES} {source}"))
    own = model.reference(frames, source, ("r", "u", "f"))
    assert [row for row, *_ in found] == [row for row, *_ in own]
    rows = frames["ratings"].iloc[[int(row) for row, *_ in found]]
    difference = np.array(found)[:, 1] - np.array(own)[:, 1]
    return rows.assign(added=difference)


@pytest.mark.cases("boost-squared", "cg-softmax", "admm-logistic", "sgd-squared")
@pytest.mark.parametrize("loss", LABELS)
@pytest.mark.parametrize("strategy", ["boost", "cg", "admm", "sgd", "gd"])
def test_a_saved_model_scores_as_in_training(tmp_path, strategy, loss):
    how = {**settings_of(loss), "test_split": "time(r.time)", "test_fraction": 0.2}
    if strategy == "sgd":
        how["batch_size"] = 100  # not a hundred rounds an epoch
    sql = query(loss)
    run = run_query(sql, SHARDED, strategy, state=tmp_path, **how)
    model = Model(sql, tmp_path, make_manifest(run.strategy))
    assert model.saved("u").effects is not None
    _, tested = run.problem.joined_rows
    joined = RATINGS["ratings"].query("user != 999")
    last = joined["time"].nlargest(tested).min()
    again = model.evaluate(SHARDED, f"{sql} WHERE r.time >= {last}")
    assert again["loss"] == pytest.approx(model.manifest.test["loss"], rel=1e-4)
    before = run_query(sql, SHARDED, strategy, effects="none", **how)
    assert again["loss"] < before.strategy.final.test["loss"]


@pytest.mark.parametrize("source", [JOIN, LEFT], ids=["join", "left"])
def test_a_row_gets_the_effects_of_its_keys_and_an_unseen_key_none(tmp_path, source):
    model = fitted(tmp_path, "cg", source=source)
    old = added(model, RATINGS, source)
    # a sum of a number of the user and one of the film, 0 for nobody
    users, films = (
        pd.get_dummies(old[name]).astype(float) for name in ("user", "film")
    )
    users = users.drop(columns=999, errors="ignore")
    z = np.hstack([users, films])
    best, *_ = np.linalg.lstsq(z, old["added"], rcond=None)
    assert_allclose(z @ best, old["added"], atol=2e-5)
    assert np.abs(old["added"]).max() > 1.0
    fresh = ratings(200, seed=3)
    # a user that is renamed is an unseen one
    fresh["users"].loc[4, "id"] = 4_000
    fresh["ratings"]["user"] = fresh["ratings"]["user"].replace(4, 4_000)
    new = added(model, fresh, source)
    known = pd.concat([old.assign(is_new=0), new.assign(is_new=1)])
    of_pair = known[known["user"] != 4_000].groupby(["user", "film"])["added"]
    assert_allclose(of_pair.max(), of_pair.min(), atol=2e-5)
    # what is left of a pair of a known film is the film's own
    by_film = new[new["user"] == 4_000].groupby("film")["added"]
    assert_allclose(by_film.max(), by_film.min(), atol=2e-5)
    if source == LEFT:
        nobody = known[known["user"] == 999].groupby("film")["added"].first()
        common = by_film.first().index.intersection(nobody.index)
        assert_allclose(by_film.first()[common], nobody[common], atol=2e-5)


BY_USER = query().replace(", f.year", "").partition(" JOIN films")[0]


def test_a_shard_knows_the_effects_of_what_it_has_trained_on_alone(tmp_path):
    """Users of a shard that is only tested are unseen there, and metrics say so."""
    ordered = RATINGS["ratings"].sort_values("time")
    shards = {"ratings": pieces(ordered, 740)}
    sites = {"users": WHOLE["users"], "ratings": shards}
    how = {**settings_of("squared"), "effects": "r", "test_split": "time(r.time)"}
    run = run_query(BY_USER, sites, "cg", state=tmp_path, **how)
    assert set(run.chosen["effects"]) == {"r"}
    model = Model(BY_USER, tmp_path, make_manifest(run.strategy))
    _, tested = run.problem.joined_rows
    last = RATINGS["ratings"].query("user != 999")["time"].nlargest(tested).min()
    again = model.evaluate(sites, f"{BY_USER} WHERE r.time >= {last}")
    assert again["loss"] == pytest.approx(model.manifest.test["loss"], rel=1e-4)


def test_a_key_in_one_joined_row_has_no_effect(tmp_path):
    frames = {**RATINGS, "ratings": RATINGS["ratings"].iloc[:150]}
    how = {"effects": "f", "num_epochs": 2, "validation_fraction": 0.2}
    run = run_query(query(), on(whole, frames), "cg", state=tmp_path, **how)
    multiplicity = run.problem.train.tables["f"].multiplicity
    effects = run.arrays(Action.FINISH)[2, "effects"][:, 0]
    counts = multiplicity[: len(effects)]
    assert 1 in counts
    np.testing.assert_array_equal(effects != 0.0, counts > 1)


def test_shares_of_scores_are_with_effects():
    shares = []
    for effects in ("none", "f"):
        how = {**settings_of("squared"), "effects": effects}
        run = run_query(query(), WHOLE, "cg", **how)
        shares.append(run.strategy.outcome.contributions["f"].share)
    # the levels of films are far more than what their years tell
    assert shares[1] > 0.5 > 2 * shares[0]


@pytest.mark.parametrize(
    ("rules", "features", "has_effects"),
    [
        ('columns = ["id", "age"]', "u.age", True),
        ('columns = ["age"]\nkeys = ["id"]', "u.age", False),
        ('columns = ["age"]\njoin-only = ["id"]', "u.age", False),
        ('columns = ["id", "age"]', "", False),
    ],
    ids=["a feature", "a key", "join-only", "no features"],
)
def test_effects_are_of_keys_that_features_may_read(
    tmp_path, rules, features, has_effects
):
    """They would be features, of columns that an owner keeps from models."""
    files = [
        write_site(tmp_path / name, {name: frame}, policies)
        for name, frame, policies in (
            ("ratings", RATINGS["ratings"], {}),
            ("users", RATINGS["users"], {"users": rules}),
        )
    ]
    sql = "SELECT r.stars AS label, r.hour" + (f", {features}" if features else "")
    sql += " FROM ratings r JOIN users u ON r.user = u.id"
    how = {**settings_of("squared"), "effects": "u"}
    run = run_query(sql, files, "cg", **how)
    if has_effects:
        assert set(run.chosen["effects"]) == {"u"}
    else:
        assert "effects" not in run.chosen
        assert not run.arrays(Action.FINISH)


def test_masks_and_shards_change_no_effect(tmp_path):
    metrics = [
        fitted(tmp_path / str(number), "cg", sites=sites, privacy=privacy).manifest.test
        for number, (sites, privacy) in enumerate(
            ((WHOLE, CLEAR), (WHOLE, PrivacySettings()), (SHARDED, PrivacySettings()))
        )
    ]
    for other in metrics[1:]:
        assert other == pytest.approx(metrics[0], rel=1e-4)


def test_the_report_says_what_effects_gain(caplog):
    run = run_query(query(), WHOLE, "cg", **HOW)
    entries = run.chosen["effects"]
    assert set(entries) == {"u", "f"}
    for entry in entries.values():
        before, after = entry["validation-loss"]
        assert after < before
        assert 0.5 < entry["kept"] < 1.0
    assert entries["u"]["keys"] == 30
    # of levels with deviation 1.2
    assert 0.1 < entries["u"]["variance"] < 5.0
    assert "Row effects of 30 keys of u" in caplog.text
    assert any("effect of each row" in line for line in told(run))


def told(run) -> list[str]:
    return [entry["carries"] for entry in run.report.privacy["messages"]]


@pytest.mark.parametrize(
    "settings",
    [{"effects": "none"}, {"validation_fraction": 0.0}, {"privacy": NOISY}],
    ids=["none", "no-validation", "noise"],
)
def test_runs_that_fit_none_send_none(settings):
    how = {**HOW, **settings}
    run = run_query(query(), WHOLE, "admm", **how)
    assert "effects" not in run.chosen
    assert not run.arrays(Action.FINISH)
    assert not any("effect of each row" in line for line in told(run))


def test_one_table_is_named():
    how = {key: value for key, value in HOW.items() if key != "validation_fraction"}
    run = run_query(query(), WHOLE, "cg", effects="F", **how)
    # rows validate because effects are asked for
    assert set(run.chosen["effects"]) == {"f"}


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"effects": "u", "validation_fraction": 0.0}, "effects: 'u' need rows that"),
        ({"effects": "u", "privacy": NOISY}, "effects: 'u' does not go with privacy"),
        ({"effects": "u, none"}, "effects: 'u, none' names tables beside"),
        ({"effects": ""}, "effects: '' names no table"),
        ({"effects": "u", "strategy": "moments"}, "strategy 'moments' fits none"),
    ],
)
def test_effects_that_cannot_be_fitted_are_refused(settings, match):
    with pytest.raises(SettingsError, match=match):
        Settings(**{"strategy": "admm", **settings})


def test_advice_about_effects_is_taken():
    with pytest.raises(SettingsError, match='have no noise; use "none"'):
        Settings(strategy="admm", effects="u", privacy=NOISY)
    assert not Settings(strategy="admm", effects="none", privacy=NOISY).fits_effects
    match = 'leave validation-fraction "auto", or above 0'
    with pytest.raises(SettingsError, match=match):
        Settings(strategy="admm", effects="u", validation_fraction=0.0)
    for fraction in ("auto", 0.2):
        settings = Settings(strategy="admm", effects="u", validation_fraction=fraction)
        assert settings.fits_effects


def test_an_unknown_table_is_refused():
    with pytest.raises(SettingsError, match="effects names table 'x'; the query has"):
        run_query(query(), WHOLE, "cg", effects="x", **HOW)


def test_a_site_takes_no_effects_that_were_not_proposed():
    @on_requests(Action.FINISH)
    def add(seen):
        rows = len(RATINGS["users"])
        seen.arrays[1, "effects"] = np.zeros((rows, 1), np.float32)

    with pytest.raises(
        SiteError, match="'effects': the run was proposed with 'effects"
    ):
        run_query(query(), WHOLE, "cg", change=add, effects="none", **HOW)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda effects: np.arange(len(effects))[:, None],
            "differ between rows of one",
        ),
        (lambda effects: effects[1:], "is float32 of shape"),
    ],
    ids=["two of a key", "shape"],
)
def test_a_site_refuses_effects_that_are_no_function_of_keys(change, match):
    @on_requests(Action.FINISH)
    def lie(seen):
        for place, effects in list(seen.arrays.items()):
            seen.arrays[place] = change(effects).astype(np.float32)

    sites = {name: WHOLE[name] for name in ("ratings", "users")}
    with pytest.raises(SiteError, match=match):
        run_query(BY_USER, sites, "cg", change=lie, effects="r", **HOW)


def test_a_site_gives_effects_to_no_table_that_was_not_named():
    @on_requests(Action.FINISH)
    def lie(seen):
        if not seen.arrays:
            rows = len(RATINGS["users"])
            seen.arrays[1, "effects"] = np.ones((rows, 1), np.float32)

    with pytest.raises(SiteError, match="proposed with 'effects = f'"):
        run_query(query(), WHOLE, "cg", change=lie, effects="f", **HOW)


def test_keys_of_another_kind_have_no_such_effects(tmp_path):
    model = fitted(tmp_path, "cg")
    users = RATINGS["users"].assign(id=RATINGS["users"]["id"].astype(str))
    table = RATINGS["ratings"].assign(user=RATINGS["ratings"]["user"].astype(str))
    texts = on(whole, {**RATINGS, "users": users, "ratings": table})
    with pytest.raises(SiteError, match=r'by the keys .*"id" \(number\).* "id" \(text'):
        model.evaluate(texts)


def test_a_named_table_without_effects_is_warned_of(caplog):
    frames = {**RATINGS, "ratings": RATINGS["ratings"].drop_duplicates("user")}
    run_query(query(), on(whole, frames), "cg", effects="u", num_epochs=2)
    assert "effects: table 'u' has none: its keys are in fewer than two" in caplog.text


def test_a_query_that_joins_by_other_keys_has_no_such_effects(tmp_path):
    model = fitted(tmp_path, "cg")
    other = JOIN.replace("r.user = u.id", "r.user = u.id + 0")
    with pytest.raises(SiteError, match="effects of rows by the keys"):
        model.evaluate(WHOLE, query(source=other))
    again = model.evaluate(WHOLE)["loss"]
    assert again < 1.3 * model.manifest.train["loss"]
