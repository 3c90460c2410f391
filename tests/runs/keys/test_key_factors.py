"""Factors of two tables' keys in whole runs: metrics, policies, prediction."""

import numpy as np
import pandas as pd
import pytest
from numpy.random import default_rng

from strategies.training.saving import make_manifest
from tests.support.federated import (
    on_requests,
    pieces,
    run_query,
    site_per_table,
    whole,
)
from tests.support.predicted import Model, on, scored
from tp_flower.errors import SettingsError, SiteError
from tp_flower.protocol.messages import Action
from tp_flower.settings import PrivacySettings, Settings

USERS, FILMS = 40, 30
NAMED = {"factors": "u, f: 4"}
HOW = {"validation_fraction": 0.2, "num_epochs": 3, "device": "cpu"}
SOURCE = (
    "FROM ratings r {join} users u ON r.user = u.id {join} films f ON r.film = f.id"
)
FEATURES = "r.hour, u.age, f.year"


def ratings(has_taste: bool = True) -> dict[str, pd.DataFrame]:
    """Stars of users for films: levels of both, and perhaps what some users like."""
    rng = default_rng(8)
    user, film = (
        codes.ravel()
        for codes in np.meshgrid(np.arange(USERS), np.arange(FILMS), indexing="ij")
    )
    rows = rng.permutation(USERS * FILMS)[:1_000]
    user, film = user[rows], film[rows]
    levels = rng.normal(size=USERS), rng.normal(size=FILMS)
    taste = rng.normal(size=(USERS, 2)), rng.normal(size=(FILMS, 2))
    stars = levels[0][user] + levels[1][film] + 0.4 * rng.normal(size=len(rows))
    stars += has_taste * 0.8 * (taste[0][user] * taste[1][film]).sum(axis=1)
    return {
        "ratings": pd.DataFrame(
            {
                # of nobody's, some
                "user": np.where(rng.random(len(rows)) < 0.03, 999, user),
                "film": 100 + film,
                "time": rng.permutation(len(rows)),
                "hour": rng.integers(0, 24, len(rows)),
                "stars": stars.round(3),
            }
        ),
        "users": pd.DataFrame(
            {"id": np.arange(USERS), "age": rng.integers(18, 80, USERS)}
        ),
        "films": pd.DataFrame(
            {
                "id": 100 + np.arange(FILMS),
                "year": rng.integers(1950, 2020, FILMS),
            }
        ),
    }


RATINGS = ratings()
WHOLE = on(whole, RATINGS)
SHARDED = {
    **WHOLE,
    "users": {"users": pieces(RATINGS["users"], 16)},
    "ratings": {"ratings": pieces(RATINGS["ratings"], 400)},
}


def query(label: str = "r.stars", join: str = "JOIN") -> str:
    return f"SELECT {label} AS label, {FEATURES} {SOURCE.format(join=join)}"


def told(privacy) -> list[str]:
    return [entry["carries"] for entry in privacy["messages"]]


@pytest.mark.cases("boost-squared", "cg-logistic")
@pytest.mark.parametrize("label", ["squared", "logistic"])
@pytest.mark.parametrize("strategy", ["boost", "cg"])
def test_a_saved_model_scores_as_in_training(tmp_path, strategy, label):
    """With masks, shards and a LEFT JOIN; by boosting, factors come by themselves."""
    sql = query("r.stars" if label == "squared" else "r.stars > 0", "LEFT JOIN")
    how = {**HOW, "test_split": "time(r.time)", "test_fraction": 0.2}
    how |= {} if strategy == "boost" else NAMED
    run = run_query(sql, SHARDED, strategy, state=tmp_path, **how)
    entry = run.chosen["factors"]
    assert set(entry["tables"]) == {"u", "f"}
    before, after = entry["validation-loss"]
    assert after < 0.95 * before
    model = Model(sql, tmp_path, make_manifest(run.strategy))
    widths = {table.table: table.factors for table in model.manifest.tables}
    assert widths == {"r": 0, "u": entry["width"], "f": entry["width"]}
    assert any(
        "factors of each row's key" in carries for carries in told(run.report.privacy)
    )
    _, tested = run.problem.joined_rows
    last = RATINGS["ratings"]["time"].nlargest(tested).min()
    tests = f"{sql} WHERE r.time >= {last}"
    again = model.evaluate(SHARDED, tests)
    assert again["loss"] == pytest.approx(model.manifest.test["loss"], rel=1e-4)


def test_rows_with_a_score_for_each_region_have_one_row_of_factors(tmp_path):
    frames = ratings()
    table = frames["ratings"]
    age = table["user"].map(frames["users"].set_index("id")["age"]).fillna(50.0)
    year = table["film"].map(frames["films"].set_index("id")["year"])
    table["stars"] += 3.0 * np.sign(age - 50.0) * np.sign(year - 1985)
    sites = on(whole, frames)
    how = {**HOW, "num_epochs": 8, "min_rows_per_leaf": 5, "test_split": "time(r.time)"}
    how["factors"] = "u, f"
    run = run_query(query(), sites, "boost", state=tmp_path, **how)
    model = Model(query(), tmp_path, make_manifest(run.strategy))
    assert model.manifest.divided
    assert {table.table for table in model.manifest.multiplied} == {"u", "f"}
    _, tested = run.problem.joined_rows
    joined = table[table["user"] != 999]
    last = joined["time"].nlargest(tested).min()
    again = model.evaluate(sites, f"{query()} WHERE r.time >= {last}")
    assert again["loss"] == pytest.approx(model.manifest.test["loss"], rel=1e-4)


def added(model: Model, frames, join: str, **settings) -> pd.DataFrame:
    """What the model adds to the scores of its tables' own models, by rating."""
    source = SOURCE.format(join=join)
    sites = on(whole, {name: frames[name] for name in frames})
    found = scored(model.table(sites, f"SELECT {FEATURES} {source}", **settings))
    own = model.reference(frames, source, ("r", "u", "f"))
    assert [row for row, *_ in found] == [row for row, *_ in own]
    rows = frames["ratings"].iloc[[int(row) for row, *_ in found]]
    return rows.assign(added=np.array(found)[:, 1] - np.array(own)[:, 1])


def spread(groups) -> float:
    """The largest difference within a group of what is added."""
    return float((groups.max() - groups.min()).max())


def test_unseen_keys_missing_rows_and_missing_sites_have_no_factors(tmp_path):
    how = {**HOW, **NAMED, "privacy": PrivacySettings(scores="clear")}
    run = run_query(query(join="LEFT JOIN"), WHOLE, "cg", state=tmp_path, **how)
    model = Model(query(join="LEFT JOIN"), tmp_path, make_manifest(run.strategy))
    old = added(model, RATINGS, "LEFT JOIN")
    # what is added is no sum of a number of the user and one of the film
    known = old[old["user"] != 999]
    z = pd.get_dummies(known[["user", "film"]].astype(str)).to_numpy(float)
    best, *_ = np.linalg.lstsq(z, known["added"].to_numpy(), rcond=None)
    assert np.abs(z @ best - known["added"]).max() > 0.5
    # a user that is renamed is an unseen one: there is the film's effect alone
    frames = {name: frame.copy() for name, frame in RATINGS.items()}
    frames["users"].loc[4, "id"] = 4_000
    frames["ratings"]["user"] = frames["ratings"]["user"].replace(4, 4_000)
    new = added(model, frames, "LEFT JOIN")
    nobody = new[new["user"].isin([999, 4_000])]
    assert nobody["user"].nunique() == 2
    assert spread(nobody.groupby("film")["added"]) < 2e-5
    assert spread(known.groupby("film")["added"]) > 0.5
    # of a site that is gone the mean stands in, without factors
    there = {name: WHOLE[name] for name in ("ratings", "users")}
    strategy = model.predict(
        there, f"SELECT {FEATURES} {SOURCE.format(join='LEFT JOIN')}", on_missing="mean"
    )
    found = pd.DataFrame(scored(strategy.predictions), columns=["row", "score"])
    own = RATINGS["ratings"].iloc[found["row"].astype(int)]
    hours = model.local_scores("r", RATINGS["ratings"])[found["row"].astype(int), 0]
    rest = own.assign(added=found["score"].to_numpy() - hours)
    assert spread(rest.groupby("user")["added"]) < 2e-5
    # what leaves is said, and in the ledger of the sites that send factors
    assert any(
        "a row of numbers" in text for text in told(strategy.report()["privacy"])
    )
    lines = [line["release"] for own in strategy.ledgers.values() for line in own]
    assert {line["part"] for line in lines if line["what"] == "factors"} == {1}


def policies(users: str) -> dict[str, str]:
    rules = 'columns = ["id", "{}"]\nreleases.factors = "{}"'
    return {
        "users": rules.format("age", users),
        "films": rules.format("year", "clear"),
    }


def test_factors_are_of_tables_whose_policies_release_them(tmp_path):
    for level in ("clear", "never"):
        sites = site_per_table(tmp_path / level, RATINGS, policies(level))
        how = {**HOW, "validation_fraction": 0.3}
        run = run_query(query(), list(sites.values()), "boost", **how)
        assert set(run.chosen["effects"]) == {"u", "f"}
        assert ("factors" in run.chosen) == (level == "clear")
        names = {name for _, name in run.arrays(Action.FINISH)}
        assert names == {"effects", *(["factors"] if level == "clear" else [])}
    # asked for by name, before any epoch
    sites = list(
        site_per_table(tmp_path / "named", RATINGS, policies("never")).values()
    )
    match = r"policy \(releases.factors = never\) refuses: the run asks for factors"
    with pytest.raises(SiteError, match=match):
        run_query(query(), sites, "cg", **HOW, **NAMED)


def test_a_policy_that_has_become_stricter_holds_in_predictions(tmp_path):
    sites = site_per_table(tmp_path, RATINGS, policies("clear"))
    state = tmp_path / "state"
    run = run_query(query(), list(sites.values()), "cg", state=state, **HOW, **NAMED)
    model = Model(query(), state, make_manifest(run.strategy))
    assert model.table(list(sites.values())).num_rows
    private = PrivacySettings(predictions=1.0)
    with pytest.raises(SiteError, match="factors of the keys of table 'u', which no"):
        model.table(list(sites.values()), privacy=private)
    site_per_table(tmp_path, RATINGS, policies("never"))
    with pytest.raises(SiteError, match=r"releases\.factors = never"):
        model.table(list(sites.values()))


def test_where_levels_add_up_no_factors_are_kept_or_sent():
    sites = on(whole, ratings(has_taste=False))
    run = run_query(query(), sites, "boost", **HOW)
    assert run.chosen["factors"] == "none"
    assert {name for _, name in run.arrays(Action.FINISH)} <= {"effects"}
    assert not any(t.factors for t in make_manifest(run.strategy).tables)
    # neither where there are none by the settings
    run = run_query(query(), WHOLE, "boost", effects="none", **HOW)
    assert not {"effects", "factors"} & run.chosen.keys()


def test_factors_are_a_part_of_one_score():
    label = (
        "CASE WHEN r.stars > 1 THEN 'up' WHEN r.stars < -1 THEN 'down' ELSE 'no' END"
    )
    run = run_query(query(label), WHOLE, "boost", **HOW)
    assert "factors" not in run.chosen
    match = "factors: 'u, f: 4' are a part of one score, and this label has 3 of them"
    with pytest.raises(SettingsError, match=match):
        run_query(query(label), WHOLE, "cg", **HOW, **NAMED)
    run_query(query(label), WHOLE, "cg", **HOW, factors="none")
    run_query(query("r.stars > 0"), WHOLE, "cg", **HOW, **NAMED)


def test_tables_that_can_have_no_factors_are_warned_of(caplog):
    few = {**RATINGS, "ratings": RATINGS["ratings"].drop_duplicates("user")}
    how = {**HOW, "factors": "F, u"}
    run = run_query(query(), on(whole, few), "cg", **how)
    assert "factors" not in run.chosen
    assert "factors: tables 'F, u' have none: the keys of one of them" in caplog.text
    with pytest.raises(SettingsError, match="factors names table 'x'; the query has"):
        run_query(query(), WHOLE, "cg", **HOW, factors="u, x")


def unlike(factors: np.ndarray) -> np.ndarray:
    return np.arange(factors.size).reshape(factors.shape)


@pytest.mark.parametrize(
    ("settings", "change", "match"),
    [
        (
            {"factors": "none"},
            None,
            "'factors': the run was proposed with 'factors = no",
        ),
        (
            {"factors": "r, f: 4"},
            None,
            "'factors': the run was proposed with 'factors = ",
        ),
        ({}, lambda factors: factors[:, :3], "says '3 of each row'"),
        ({}, lambda factors: factors[1:], "is float32 of shape"),
    ],
    ids=["none", "other-tables", "width", "rows"],
)
def test_a_site_takes_no_factors_that_were_not_proposed(settings, change, match):
    @on_requests(Action.FINISH)
    def lie(seen):
        for place, factors in list(seen.arrays.items()):
            if change and place[1] == "factors":
                seen.arrays[place] = change(factors).astype(np.float32)
        if change is None:
            rows = len(RATINGS["users"])
            seen.arrays[1, "factors"] = np.ones((rows, 4), np.float32)

    with pytest.raises(SiteError, match=match):
        run_query(query(), WHOLE, "cg", change=lie, **{**HOW, **NAMED, **settings})


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"validation_fraction": 0.0}, "factors: 'u, f: 4' need rows that judge them"),
        (
            {"privacy": PrivacySettings(predictions=1.0)},
            "factors: 'u, f: 4' does not go with privacy.predictions",
        ),
        ({"factors": "u"}, "factors: 'u' does not name two tables"),
        ({"factors": "u, U"}, "'u, U' does not name two tables"),
        ({"factors": "u, f: 0"}, "has no width from 1 to 128 after the colon"),
        ({"factors": "u, f: many"}, "has no width from 1 to 128"),
        ({"strategy": "moments"}, "strategy 'moments' fits none"),
    ],
)
def test_factors_that_cannot_be_fitted_are_refused(settings, match):
    with pytest.raises(SettingsError, match=match):
        Settings(**{"strategy": "admm", **NAMED, **settings})


def test_what_settings_of_factors_mean():
    settings = Settings(strategy="cg", factors=" u ,f:32")
    assert settings.factors == "u, f: 32"
    assert settings.factor_tables == ("u", "f")
    assert settings.factor_width == 32
    assert settings.fits_factors
    assert settings.validation_share == 0.1
    assert not Settings(strategy="cg").fits_factors
    assert Settings(strategy="boost").fits_factors
    assert not Settings(strategy="boost", effects="u").fits_factors
    assert Settings(strategy="boost", effects="none", factors="u, f").fits_factors
