"""The ServerApp in modes predict and evaluate: what it writes, shows and refuses."""

import pyarrow.parquet as pq
import pytest

from strategies.app import act, page_line
from strategies.report_page.page import run_view
from tests.support.federated import (
    FEATURES,
    SOURCE,
    LocalGrid,
    sharded,
    store,
    store_sql,
)
from tests.support.files import read_json
from tests.support.page_reading import Page, console_text
from tests.support.predicted import on
from tp_flower.errors import ModelError, QueryError
from tp_flower.settings import Settings

UNLABELLED = f"SELECT {FEATURES} {SOURCE}"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run the app's mode in a folder; return its report, and what the console shows."""
    root = tmp_path_factory.mktemp("app")

    def run(folder, sites=None, **settings):
        output = root / folder
        settings = Settings(device="cpu", output_dir=str(output), **settings)
        grid = LocalGrid(sites or on(sharded, store()), state=root / "state")
        output.mkdir()
        with grid, pytest.MonkeyPatch.context() as patch:
            patch.setenv("TP_FLOWER_HOME", str(root / "home"))
            completed = act(settings, lambda _: None, grid, output)
            page_line(output)
        report = read_json(output / "report.json")
        assert completed.report == report
        return report, console_text(run_view(report), width=200), output

    run("train", sql=store_sql("logistic"), model_name="late", num_epochs=1)
    return run


def test_predict_writes_a_file_and_a_report(run):
    report, shown, folder = run(
        "predict", mode="predict", model_name="late", sql=UNLABELLED, row_key="o.day"
    )
    table = pq.read_table(folder / "predictions.parquet")
    model = f"late@{report['model']['version']}"
    facts = {k.decode(): v.decode() for k, v in table.schema.metadata.items()}
    assert facts["tp_flower.model"] == model
    assert facts["tp_flower.query"] == report["query"]
    assert facts["tp_flower.run"] == "predict"
    assert report["mode"] == "predict"
    assert report["status"] == "completed"
    assert report["missing"] == []
    file = str(folder / "predictions.parquet")
    assert report["predictions"] == {"file": file, "columns": table.column_names}
    rows = report["rows"]
    assert (rows["joined"], rows["partial"]) == (table.num_rows, 0)
    assert 0 < rows["label-table"] < rows["joined"]
    phases = [item["phase"] for item in report["history"]]
    assert phases == ["seal", "extract", "score", "finish"]
    totals = report["privacy"]["totals"]
    uncovered = {name for own in totals for name in own["uncovered"]}
    assert uncovered == {"counts", "keys", "scores"}
    messages = report["privacy"]["messages"]
    carried = [own["carries"] for own in messages]
    assert "the row key of each row of o" in carried
    assert not any("label of" in text for text in carried)
    # every message of the run says what it tells
    told = {own["message"].split(".")[1] for own in messages}
    assert told == {"describe", *phases}
    assert all(own["protection"] for own in messages)
    assert file in shown.replace("\n", "")
    assert model in shown
    assert (folder / "report.html").exists()


def test_a_run_may_be_renamed_and_asked_again(run):
    first = run("first", mode="predict", model_name="late")
    trained = first[2].with_name("train")
    trained.rename(trained.with_name("elsewhere"))
    version = first[0]["model"]["version"]
    again = run("again", mode="predict", model_name=f"late@{version}")
    tables = [pq.read_table(own[2] / "predictions.parquet") for own in (first, again)]
    assert tables[0].equals(tables[1])


def test_evaluate_reports_metrics(run):
    report, shown, folder = run("evaluate", mode="evaluate", model_name="late")
    assert set(report["metrics"]) == {"loss", "log_loss", "auc", "accuracy"}
    assert report["predictions"] is None
    assert report["baseline"]["test"].keys() == report["metrics"].keys()
    correct = sum(row[name] for name, row in report["confusion"].items())
    count = sum(sum(row.values()) for row in report["confusion"].values())
    assert correct / count == pytest.approx(report["metrics"]["accuracy"])
    assert not (folder / "predictions.parquet").exists()
    assert "log loss" in shown
    carried = [own["carries"] for own in report["privacy"]["messages"]]
    assert "the label of every row of o" in carried
    page = Page((folder / "report.html").read_text()).text
    assert "all rows: constant" in page
    assert "those held out in its training had: " in page
    assert "not trained on them" not in page
    assert f"AUC {report['metrics']['auc']:.4f}" in page
    assert f"late@{report['model']['version']}" in page


def test_sites_that_are_gone_are_told(run):
    sites = on(sharded, store())
    del sites["items"]
    report, shown, folder = run(
        "gone", sites, mode="predict", model_name="late", on_missing="mean"
    )
    assert report["missing"] == [{"table": "i", "sites": ["items"]}]
    assert report["rows"]["partial"] == report["rows"]["joined"]
    assert "Sites of the model that were not there" in shown
    page = Page((folder / "report.html").read_text()).text
    partial = f"{report['rows']['partial']:,}"
    assert f"joined rows in which a mean stands for a table's score {partial}" in page
    assert "were not there table sites i items" in page


def test_refusals(run):
    with pytest.raises(ModelError, match="Did you mean late"):
        run("unknown", mode="predict", model_name="lat")
    with pytest.raises(QueryError, match="has no label"):
        run("unlabelled", mode="evaluate", model_name="late", sql=UNLABELLED)
