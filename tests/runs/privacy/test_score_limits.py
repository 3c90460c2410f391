"""Runs under policies that limit how often scores leave: what ends them, and what users
read.
"""

import numpy as np
import pandas as pd
import pytest

from strategies import Explain
from strategies.inference.predict import Evaluate
from strategies.ranks import ScoreForecast
from strategies.training.saving import make_manifest
from tests.support.federated import LocalGrid, site_per_table, train
from tests.support.ledgers import ledger_lines
from tests.support.predicted import predicting, unlabelled
from tp_flower.errors import SettingsError, SiteError
from tp_flower.query import Query

ROWS = 300
LEFT = 5
RULES = "scores-per-rank = 0.5\ncover = 1\n"
COLUMNS = {"a": 2 * LEFT, "b": 12}


def features_of(columns):
    return [f"{name}.{name}{k}" for name in columns for k in range(columns[name])]


OF_A = ", ".join(features_of({"a": COLUMNS["a"]}))
OF_B = ", ".join(features_of({"b": COLUMNS["b"]}))
SQL = f"SELECT a.y AS label, {OF_A}, {OF_B} FROM a JOIN b ON a.id = b.id"
ALLOWS = (
    "the policy of table 'a' at site 'a' (scores-per-rank) lets 5 more score vectors "
    "leave"
)


def frames(columns=COLUMNS):
    rng = np.random.default_rng(0)
    tables = {}
    for name, count in columns.items():
        columns = {f"{name}{k}": rng.normal(size=ROWS) for k in range(count)}
        tables[name] = pd.DataFrame({"id": np.arange(ROWS), **columns})
    total = sum(frame.drop(columns="id").sum(axis=1) for frame in tables.values())
    tables["a"]["y"] = total + rng.normal(size=ROWS)
    return tables


@pytest.fixture
def grid(tmp_path):
    policies = dict.fromkeys(COLUMNS, RULES)
    sites = site_per_table(tmp_path, frames(), policies)
    with LocalGrid(sites, state=tmp_path / "state") as grid:
        yield grid


def counted(folder):
    return len(ledger_lines(folder / "state" / "a", "scores"))


@pytest.mark.parametrize("method", ["cg", "admm"])
def test_an_automatic_number_of_epochs_ends_in_time(grid, tmp_path, method):
    strategy = train(grid, SQL, method, num_epochs=0, tolerance=1e-12)
    report = strategy.report
    assert report.epochs == strategy.chosen["num-epochs"] == counted(tmp_path) == LEFT
    assert report.verdict.endswith(f"; {ALLOWS}, and an epoch takes 1")
    assert "goes on" not in report.verdict
    assert report.verdict in report.warnings
    # the model of the lowest loss is saved, in all its figures
    assert report.final_train["loss"] == min(strategy.losses)


def test_a_converged_training_is_not_cut_short(grid):
    strategy = train(grid, SQL, "cg", num_epochs=0, tolerance=0.5)
    assert strategy.report.verdict.startswith("converged")
    assert strategy.chosen["num-epochs"] == LEFT
    assert not [text for text in strategy.warnings if "scores-per-rank" in text]


def test_more_epochs_than_are_left_are_refused_before_any_leaves(grid, tmp_path):
    with pytest.raises(SettingsError) as refused:
        train(grid, SQL, "cg", num_epochs=6)
    text = str(refused.value)
    assert text.startswith(
        f"{ALLOWS}, and an epoch takes 1: set num-epochs = 5 or less, read more"
    )
    assert counted(tmp_path) == 0
    # as it says
    train(grid, SQL, "cg", num_epochs=5)
    with pytest.raises(
        SettingsError,
        match=r"lets 0 more .*: earlier runs have used them up, or its rows vary too",
    ):
        train(grid, SQL, "cg", num_epochs=1)
    # without features its scores are constants, in which the other table's do not hide
    with pytest.raises(
        SiteError, match=r"table 'b': train.prepare failed: .*\(cover = 1\) refuses"
    ):
        train(grid, SQL.replace(f"{OF_A}, ", ""), num_epochs=1)
    assert counted(tmp_path) == 5


def test_explain_says_it_before(grid, tmp_path):
    def explained(**settings):
        strategy = train(grid, SQL, Explain, **{"num_epochs": 0, **settings})
        return strategy.explanation["score-vectors"], strategy.warnings

    forecast, warnings = explained()
    assert forecast == [
        {"table": "a", "site": "a", "left": 5, "epoch": 1, "epochs": 5},
        {"table": "b", "site": "b", "left": 6, "epoch": 1, "epochs": 6},
    ]
    # of conjugate gradients
    assert warnings == []
    (early,) = explained(strategy="admm")[1]
    assert early == (
        "training by admm will end after 5 epochs, most likely before its optimum, "
        f"which usually takes about 20: {ALLOWS}, and an epoch takes 1; that of 'b' at "
        "'b' allows 6 epochs. More columns that vary allow more epochs, and so may an "
        "owner who raises scores-per-rank"
    )
    # one number, which both policies allow
    refused = explained(num_epochs=7)[1]
    assert len(refused) == 1
    assert refused[0].startswith(
        f"training will be refused: {ALLOWS}, and an epoch takes 1: set n"
    )
    assert counted(tmp_path) == 0


def test_explain_says_which_table_cannot_be_trained_and_what_to_change(tmp_path):
    columns = {"a": 1, "b": 12, "c": 12}
    features = features_of(columns)
    policies = dict.fromkeys(columns, RULES)

    def train_on(features, *method, num_epochs=1):
        sites = site_per_table(tmp_path, frames(columns), policies)
        sql = f"SELECT a.y AS label, {', '.join(features)} FROM a "
        sql += "JOIN b ON a.id = b.id JOIN c ON a.id = c.id"
        return train(sites, sql, *method, num_epochs=num_epochs)

    strategy = train_on(features, Explain, num_epochs=0)
    (warning,) = strategy.warnings
    start = "training will be refused: "
    assert warning == (
        f"{start}the policy of table 'a' at site 'a' (scores-per-rank) lets 0 more "
        "score vectors leave, and an epoch takes 1: the query reads 1 encoded column "
        "of the table, and no scores leave of rows that vary in fewer than 4 "
        "directions (constants, copies and a column beside which little else varies do "
        "not count). Leave the table's features out of the query, read more columns of "
        "the table that vary, or ask its owner to write scores-per-rank = "
        '"any", which sets no bound'
    )
    # the costs are those of the epochs that the other policies allow
    assert strategy.explanation["cost"]["epochs"] == 6
    with pytest.raises(SettingsError) as refused:
        train_on(features)
    assert f"{start}{refused.value}" == warning
    # as it says
    train_on(features[1:])
    policies["a"] = RULES.replace("0.5", '"any"')
    train_on(features)


def test_predictions_and_evaluations_are_score_vectors(grid, tmp_path):
    strategy = train(grid, SQL, "cg", num_epochs=3)
    manifest = make_manifest(strategy)
    Evaluate(Query.from_sql(SQL), manifest, mode="evaluate").start(grid)

    def predict():
        predicting(manifest, unlabelled(SQL)).start(grid)

    predict()
    assert counted(tmp_path) == LEFT
    match = (
        "lets 0 more score vectors leave, and a prediction takes 1: ask its owner to "
        "raise"
    )
    with pytest.raises(SettingsError, match=match):
        predict()
    assert counted(tmp_path) == LEFT
    # as its owner does who is asked
    tables = tmp_path / "a" / "tables.toml"
    tables.write_text(
        tables.read_text().replace("scores-per-rank = 0.5", "scores-per-rank = 0.7")
    )
    predict()
    assert counted(tmp_path) == LEFT + 1


def test_a_deviation_from_the_forecast_is_refused_by_the_site(grid, tmp_path):
    """Another run may have used what was left in the meantime."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScoreForecast, "epochs", property(lambda _: 99))
        with pytest.raises(
            SiteError, match=r"1 more score vectors of table 'a', and of 5 .* 5 have"
        ):
            train(grid, SQL, "admm", num_epochs=9)
    assert counted(tmp_path) == 5
