"""The Python API: its models are those of the joined table, whatever names the sites.

`fit` is compared with ridge regression on the join that DuckDB makes, `predict` and
`evaluate` with the command line.
"""

import sqlite3
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import tp_flower
from strategies import commands
from strategies.report_page.page import result_view
from tests.support.command_line import printed_by, settings_of
from tests.support.federated import LocalGrid, store, write_site
from tests.support.files import output_of, read_json
from tests.support.page_reading import console_text
from tests.support.policies import OPEN
from tests.support.reference.joins import engine_of
from tp_flower import api
from tp_flower.errors import (
    ModelError,
    QueryError,
    SettingsError,
    SourceError,
    TPFlowerError,
)
from tp_flower.files import home_folder
from tp_flower.query import Query
from tp_flower.reports.records import CompletedRun
from tp_flower.reports.results import Explanation

SQL = (
    "SELECT o.qty AS label, o.day, i.price FROM orders AS o "
    "JOIN items AS i ON o.item = i.item"
)
L2 = 0.1
SETTINGS = {"test_fraction": 0.0, "l2": L2, "tolerance": 1e-9, "task": "regression"}
QUICK = {"num_epochs": 1, "task": "regression"}


def tables():
    """Orders and items, in which no number is missing."""
    return {name: store()[name] for name in ("orders", "items")}


def sites_of(orders, items):
    return {"shop": {"orders": orders}, "maker": {"items": items}}


SITES = sites_of(**tables())
# the user's home, to which no function of the API may write by default
pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture(scope="module")
def model():
    return api.fit(SQL, SITES, **SETTINGS)


def joined_ridge():
    """The coefficients, the mean and the predictions of ridge on the joined table.

    Numbers are standardised over the joined rows, and the loss is a mean: theta is
    (Z'Z / N + l2 I)^-1 Z'(y - mean) / N.
    """
    with engine_of(tables()) as engine:
        joined = engine.execute(SQL).df()
    label = joined["label"].to_numpy(float)
    rows = joined[["day", "price"]].to_numpy(float)
    rows = (rows - rows.mean(axis=0)) / rows.std(axis=0)
    gram = rows.T @ rows / len(rows) + L2 * np.eye(2)
    theta = np.linalg.solve(gram, rows.T @ (label - label.mean()) / len(rows))
    return theta, label.mean(), np.sort(label.mean() + rows @ theta)


def predicted(result):
    return np.sort(result.frame["prediction"].to_numpy())


def test_a_model_is_ridge_regression_on_the_join(model, home):
    theta, _, predictions = joined_ridge()
    shown = model.coefficients.set_index(["table", "column"])["coefficient"]
    expected = [shown["o", "day"], shown["i", "price"]]
    np.testing.assert_allclose(expected, theta, atol=1e-6)
    np.testing.assert_allclose(predicted(model.predict()), predictions, atol=1e-5)
    assert not home.exists()


def test_coefficients_are_those_of_the_report(model):
    listed = [
        (table, entry["feature"], entry["value"])
        for table, entries in model.report["coefficients"].items()
        for entry in entries
    ]
    frame = model.coefficients
    assert list(frame.columns) == ["table", "column", "coefficient"]
    assert list(frame.itertuples(index=False, name=None)) == listed


def in_csv_files(folder, orders, items):
    orders.to_csv(folder / "orders.csv", index=False)
    items.to_csv(folder / "items.csv", index=False)
    return sites_of(str(folder / "orders.csv"), folder / "items.csv")


def in_sqlite(folder, orders, items):
    with closing(sqlite3.connect(folder / "shop.db")) as database:
        orders.to_sql("orders", database, index=False)
        items.to_sql("parts", database, index=False)
    uri = f"sqlite:///{folder}/shop.db"
    return sites_of(uri, {"uri": uri, "table": "parts"})


def in_a_tables_file(folder, orders, items):
    return write_site(folder / "all", {"orders": orders, "items": items})


def in_arrow(_, orders, items):
    return sites_of(*(pa.Table.from_pandas(frame) for frame in (orders, items)))


def in_polars(_, orders, items):
    polars = pytest.importorskip("polars")
    return sites_of(*map(polars.from_pandas, (orders, items)))


def in_shards(_, orders, items):
    first = orders.iloc[:25]
    second = orders.iloc[25:]
    return sites_of([first, pa.Table.from_pandas(second)], items)


def in_a_grid(_, orders, items):
    return LocalGrid(sites_of(orders, items))


@pytest.mark.parametrize(
    "make",
    [
        in_csv_files,
        in_sqlite,
        in_a_tables_file,
        in_arrow,
        in_polars,
        in_shards,
        in_a_grid,
    ],
)
def test_sites_of_every_kind_have_one_model(model, make, tmp_path):
    sites = make(tmp_path, **tables())
    again = api.fit(SQL, sites, **SETTINGS)
    rmse, expected = (each.metrics["train"]["rmse"] for each in (again, model))
    assert rmse == pytest.approx(expected, abs=1e-6)


def test_a_query_may_be_an_object(model):
    again = api.fit(Query.from_sql(SQL), SITES, **SETTINGS)
    assert again.metrics["train"] == model.metrics["train"]


def test_predictions_and_evaluation_are_those_of_the_command_line(
    home, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    file = write_site(tmp_path / "all", tables())
    model = api.fit(SQL, str(file), home=home, **SETTINGS)
    assert model.folder.parent == home / "runs"
    options = settings_of(f"tables={file}", f"sql={SQL}", "task=regression")
    for mode in ("predict", "evaluate"):
        printed_by(mode, *options, *settings_of(f"output-dir={mode}"))
    expected = pd.read_parquet("predict/predictions.parquet")
    pd.testing.assert_frame_equal(model.predict().frame, expected)
    report = read_json(Path("evaluate/report.json"))
    assert report["model"]["version"] == model.manifest["model-version"]
    assert model.evaluate().metrics == report["metrics"]


def test_predictions_of_other_rows_and_of_other_filters(model):
    orders, items = tables().values()
    few = sites_of(orders.drop(columns="qty").iloc[:9], items)
    query = SQL.replace("o.qty AS label, ", "")
    same = model.predict(query=f"{query} WHERE o.day < 9").frame
    assert len(same) == (orders.merge(items, on="item")["day"] < 9).sum()
    new = model.predict(few, query, row_key="o.customer").frame
    assert len(new) == len(orders.iloc[:9].merge(items, on="item"))
    assert new["row_key"].str.fullmatch("[0-9a-f]{32}").all()


def test_predictions_have_the_row_keys_where_one_machine_has_both(model):
    orders, items = tables().values()
    # a text, missing somewhere, and numbers that are whole in one shard alone
    named = [f"n{k}" if k else None for k in range(len(orders))]
    orders = orders.assign(name=named, at=np.arange(len(orders)))
    halves = [orders[:30], orders[30:].assign(at=orders["at"] + 0.5)]
    query = SQL.replace("o.qty AS label, ", "")
    sites = {"shop": {"orders": halves}, "maker": {"items": items}}
    found = model.predict(sites, query, row_key="o.name, o.at").frame
    of_rows = model.predict(sites, query).frame
    rows = pd.concat(halves).iloc[of_rows["row_key"]].reset_index(drop=True)
    assert found["name"].isna().any()
    pd.testing.assert_frame_equal(
        found[["name", "at"]], rows[["name", "at"]], check_dtype=False
    )
    pd.testing.assert_frame_equal(
        found.drop(columns=["name", "at", "row_key"]),
        of_rows.drop(columns="row_key"),
    )


def test_a_saved_model_predicts_in_another_process(model, tmp_path):
    folder = model.save(tmp_path / "model")
    files = in_csv_files(tmp_path, **tables())
    code = (
        "import sys, tp_flower\n"
        "folder, orders, items = sys.argv[1:]\n"
        "model = tp_flower.load(folder)\n"
        "sites = {'shop': {'orders': orders}, 'maker': {'items': items}}\n"
        "frame = model.predict(sites).frame\n"
        "print(model.name, *frame['prediction'].sort_values().to_list())"
    )
    paths = [str(path) for site in files.values() for path in site.values()]
    name, *numbers = output_of(code, str(folder), *paths).split()
    assert name == model.name
    expected = predicted(model.predict())
    np.testing.assert_allclose(np.array(numbers, float), expected, atol=1e-9)
    loaded = api.load(folder)
    assert loaded.report == model.report
    assert loaded.manifest == model.manifest
    pd.testing.assert_frame_equal(loaded.coefficients, model.coefficients)
    # predicting has changed nothing of it
    assert not (folder / "state" / "state.db").exists()
    with pytest.raises(SettingsError, match="name the sites"):
        loaded.predict()
    with pytest.raises(ModelError, match="not empty"):
        model.save(folder)


def test_a_boosted_model_is_saved_with_the_one_it_starts_from(tmp_path, home):
    pytest.importorskip("lightgbm")
    shared = {"home": home, "task": "regression", "validation_fraction": 0.3}
    first = api.fit(SQL, SITES, **shared)
    second = api.fit(
        SQL,
        SITES,
        num_epochs=1,
        strategy="boost",
        boost_from=first.name,
        min_rows_per_leaf=5,
        **shared,
    )
    loaded = api.load(second.save(tmp_path / "model"))
    pd.testing.assert_frame_equal(loaded.predict(SITES).frame, second.predict().frame)
    gains = second.coefficients
    assert list(gains.columns) == ["table", "column", "gain"]


def test_an_explanation_is_what_the_console_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write_site(tmp_path / "all", tables())
    explanation = api.explain(SQL, file, **QUICK)
    options = settings_of(f"tables={file}", f"sql={SQL}", "num-epochs=1")
    options += settings_of("task=regression")
    for folder, flags in (("screen", ()), ("all", ("--full",))):
        output = settings_of(f"output-dir=out/{folder}")
        printed = printed_by("explain", *options, *output, *flags)
        report = read_json(Path("out", folder, "report.json"))
        assert report["tables"] == explanation.report["tables"]
        same = Explanation(CompletedRun(report, Path("out", folder)), None)
        assert same.text(full=bool(flags)) in printed


def test_the_console_prints_what_is_returned(model, capsys):
    model.show()
    shown = capsys.readouterr().out
    assert model.text() in shown
    assert f"Model: {model.name}" in shown
    assert shown.endswith(f"Report: {model.folder / 'report.json'}\n")
    assert model.text().startswith(console_text(result_view(model.report), 100)[:400])


def test_progress_is_printed_on_request(capsys):
    api.fit(SQL, SITES, **QUICK)
    assert capsys.readouterr() == ("", "")
    api.fit(SQL, SITES, progress=True, **QUICK)
    assert "epoch 1/1" in capsys.readouterr().out


class Balanced(HTMLParser):
    """Assert that every element is closed, the innermost first."""

    def __init__(self, html):
        super().__init__()
        self.open = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, _):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_results_are_shown_in_five_lines_and_as_the_head_of_their_page(model):
    for result in (
        model,
        model.predict(),
        model.evaluate(),
        api.explain(SQL.replace("day", "day < 5 AS early"), SITES, **QUICK),
    ):
        lines = repr(result).splitlines()
        assert len(lines) == 5
        assert lines[0].startswith(f"{type(result).__name__}: o.qty ")
        assert max(map(len, lines)) <= 90
        html = result._repr_html_()
        Balanced(html)
        head = html.removeprefix("<div>\n").removesuffix("</div>")
        assert head in (result.folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_epoch": 3}, r"num-epoch: unknown setting. Did you mean num-epochs"),
        ({"privacy_scorez": "clear"}, r"Did you mean privacy.scores"),
        ({"privacy_labels": "laplace"}, "needs either privacy.label-epsilon or"),
        ({"sql": SQL}, "sql: the query is the first argument"),
        ({"tables": "tables.toml"}, "tables: the sites are the second argument"),
        ({"mode": "predict"}, "mode: call fit, explain, predict or evaluate"),
    ],
)
def test_settings_that_are_refused(settings, match):
    with pytest.raises(SettingsError, match=match):
        api.fit(SQL, SITES, **settings)


@pytest.mark.parametrize(
    ("sites", "kind", "match"),
    [
        ("prod", SettingsError, r"no tables file .*/prod; .* is Federation\('prod'\)"),
        (3, SettingsError, "sites: expected the path of a tables file, .* not int"),
        ({"shop": {"orders": 3}}, SourceError, "expected a data frame .*, not int"),
        ({"shop": {}}, SourceError, "site 'shop' has no tables"),
        (api.Federation("prod"), SettingsError, "home: "),
    ],
)
def test_sites_that_are_refused(sites, kind, match, tmp_path):
    with pytest.raises(kind, match=match):
        api.fit(SQL, sites, home=tmp_path)


def test_an_error_of_a_temporary_run_names_no_file_that_is_deleted(tmp_path):
    with pytest.raises(QueryError, match="no column 'dya'") as caught:
        api.fit(SQL.replace("o.day", "o.dya"), SITES)
    assert not getattr(caught.value, "__notes__", [])
    with pytest.raises(QueryError) as caught:
        api.fit(SQL.replace("o.day", "o.dya"), SITES, home=tmp_path)
    assert str(tmp_path) in caught.value.__notes__[0]


def test_coefficients_that_are_hidden_say_by_what(tmp_path):
    file = write_site(tmp_path / "all", tables())
    of_policy = api.fit(SQL, file, **QUICK)
    with pytest.raises(ModelError, match=r"policies of tables 'o', 'i' hide .* = true"):
        of_policy.coefficients  # noqa: B018
    with pytest.raises(ModelError, match=r"policies of tables 'o', 'i' hide .* = true"):
        of_policy.summary()
    assert not (of_policy.folder / "coefficients.csv").exists()
    # without a policy nobody hides what whoever simulates the sites has
    file.write_text(file.read_text().replace(OPEN, ""))
    shown, of_frames = (api.fit(SQL, own, **QUICK) for own in (file, SITES))
    pd.testing.assert_frame_equal(shown.coefficients, of_frames.coefficients)
    network = api.fit(SQL, SITES, model="mlp", **QUICK)
    with pytest.raises(ModelError, match="model 'mlp' has no coefficients"):
        network.coefficients  # noqa: B018


def test_a_model_whose_parts_are_at_a_grid_says_so(tmp_path):
    with in_a_grid(tmp_path, **tables()) as grid:
        model = api.fit(SQL, grid, **QUICK)
    assert repr(model).endswith(f"{model.name}, whose parts stay at its sites")
    with pytest.raises(ModelError, match=r"parts of model .* are not here"):
        api.load(model.save(tmp_path / "model")).predict(SITES)


def test_a_loaded_model_needs_sites_and_a_folder_of_its_own(tmp_path, model):
    folder = model.save(tmp_path / "model")
    loaded = api.load(folder)
    with pytest.raises(TPFlowerError, match="name the sites, as in fit"):
        loaded.predict()
    assert len(loaded.predict(SITES).frame) == len(model.predict().frame)
    with pytest.raises(ModelError, match="is not empty: choose another folder"):
        model.save(folder)
    assert api.load(model.save(tmp_path / "another")).name == model.name


def test_folders_that_have_no_model(tmp_path, model):
    with pytest.raises(TPFlowerError, match="cannot be read"):
        api.load(tmp_path)
    with pytest.raises(ModelError, match="a run that has saved no model"):
        api.load(model.predict().folder)


def test_the_folder_of_a_run_is_loaded_with_the_models_of_its_home(home):
    model = api.fit(SQL, SITES, home=home, **QUICK)
    loaded = api.load(model.folder)
    assert home_folder() == home
    pd.testing.assert_frame_equal(loaded.predict(SITES).frame, model.predict().frame)


def run_by_flower(folder, text=""):
    """Stand in for `flwr run`: return where the report of a run would be."""

    def run(settings, name, announce):
        assert (name, settings.mode) == ("prod", "train")
        announce(f"log: FAILED: {text}")
        return folder and folder / "report.json"

    return run


def test_a_run_of_a_federation_is_read_from_its_folder(model, monkeypatch, home):
    assert api.FittedModel is tp_flower.FittedModel
    run = run_by_flower(model.folder)
    monkeypatch.setattr(commands, "run_through_flower", run)
    fitted = tp_flower.fit(SQL, tp_flower.Federation("prod"))
    assert fitted.report == model.report
    assert "whose parts stay at its sites" in repr(fitted)
    with pytest.raises(ModelError, match="of the SuperLink's machine"):
        fitted.save(home)


@pytest.mark.parametrize(
    ("folder", "match"),
    [(Path("/nowhere"), "is at the SuperLink: copy"), (None, "run has failed: no x")],
)
def test_a_run_of_a_federation_without_results_here(folder, match, monkeypatch):
    run = run_by_flower(folder, "no x")
    monkeypatch.setattr(commands, "run_through_flower", run)
    with pytest.raises(TPFlowerError, match=match):
        api.fit(SQL, api.Federation("prod"))
