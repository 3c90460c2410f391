"""The flights federation runs unchanged from databases and files, with one report."""

import json
from pathlib import Path

import pytest

from scripts.data.load_flights import load_flights
from strategies.app import choose_sql
from tests.support.federated import LocalGrid, train
from tests.support.servers import uri
from tp_flower.reports.records import report_dict, write_json
from tp_flower.settings import Settings

SITES = 3  # five organisations on three nodes
# what a report says of places and times
OF_THE_RUN = {
    *("started", "seconds", "output-dir", "settings", "history", "totals"),
    # its times, and the places that the rows are at
    *("privacy", "model"),
}


def report_of(tables: str, folder: Path, **fields: object) -> dict[str, object]:
    """Train with a tables file, or the built-in one, and read the report."""
    settings = Settings(num_epochs=3, **fields)
    settings = settings.with_fields(sql=choose_sql(settings), tables=tables)
    grid = LocalGrid(SITES, run_config={"tables": tables})
    done = train(grid, settings.sql, settings.method_name, settings=settings)
    return json.loads(write_json(report_dict(done.report), folder).read_text())


def flat(value: object, path: str = "") -> dict[str, object]:
    """Every number and text of a report by its path."""
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value)
    else:
        return {path: value}
    return {k: v for name, own in pairs for k, v in flat(own, f"{path}/{name}").items()}


@pytest.mark.cases("regression")
@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_databases_give_the_report_of_files(
    task, tmp_path, monkeypatch, postgresql, mariadb
):
    monkeypatch.setenv("PLANES_URI", uri(postgresql))
    monkeypatch.setenv("WEATHER_URI", uri(mariadb))
    tables = load_flights(tmp_path / "data", uri(postgresql), uri(mariadb))
    from_files = report_of("", tmp_path / "files", task=task)
    from_databases = report_of(str(tables), tmp_path / "databases", task=task)
    for report in (from_files, from_databases):
        rounds = report["history"]
        report["metrics"] = [(r["train"], r["test"], r["bytes-up"]) for r in rounds]
    numbers, expected = (
        flat({key: own for key, own in report.items() if key not in OF_THE_RUN})
        for report in (from_databases, from_files)
    )
    assert numbers.keys() == expected.keys()
    totals = [
        [{**own, "source": ""} for own in report["privacy"]["totals"]]
        for report in (from_databases, from_files)
    ]
    assert totals[0] == totals[1]
    assert expected["/joined-rows/train"] > 200_000
    for path, value in expected.items():
        if isinstance(value, float):
            assert numbers[path] == pytest.approx(value, rel=0, abs=1e-6), path
        else:
            assert numbers[path] == value, path
