"""No secret of a tables file shows in anything that a run puts out.

Whole runs against real servers, with debug logging on everywhere, those that fail
included: what is logged, printed, raised, reported, kept in files or sent is searched.
"""

import logging
import re
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import pytest
from flwr.app import Context, RecordDict

from client_apps.app import app as client_app
from strategies.app import app as server_app
from strategies.run.grid import InProcessGrid
from tests.support.database_tables import fill, run, url_of
from tests.support.federated import store, store_sql
from tests.support.files import case_table
from tests.support.servers import PASSWORD, USER
from tp_flower.errors import TPFlowerError
from tp_flower.protocol.packet import unpack
from tp_flower.sources.shards import load_tables

OPTION = "Opti0n-s3cret"
WRONG = "Wr0ng/s3cret@x"
SECRETS = (USER, PASSWORD, OPTION, WRONG)
TYPES = {
    "int64": "BIGINT",
    "int32": "INTEGER",
    "float64": "DOUBLE PRECISION",
    "bool": "BOOLEAN",
    "str": "VARCHAR(40)",
}
LOGGERS = ("", "flwr", "sqlalchemy", "sqlalchemy.engine", "sqlalchemy.pool", "psycopg")


@dataclass
class Output:
    """All that a run showed, as one text."""

    pieces: list[str] = field(default_factory=list)
    error: str = ""

    def check(self, *, expected: str) -> None:
        text = "\n".join([*self.pieces, self.error])
        assert expected in text
        for secret in SECRETS:
            for form in (secret, quote(secret), quote(secret, safe=""), repr(secret)):
                assert form not in text


def fill_frame(url, table, frame):
    columns = {name: TYPES[str(kind)] for name, kind in frame.dtypes.items()}
    rows = frame.astype(object).where(frame.notna(), None).to_numpy().tolist()
    return fill(url, table, columns, rows)


@pytest.fixture
def places(postgresql, mariadb, request, tmp_path):
    """Name of each table of the store in its database."""
    sqlite = url_of("sqlite", request, tmp_path)
    frames = store(orders=40)
    urls = {"orders": postgresql, "customers": mariadb, "items": sqlite}
    return {
        name: (url, fill_frame(url, name, frames[name])) for name, url in urls.items()
    }


@pytest.fixture
def tables(places, tmp_path, monkeypatch):
    """A tables file whose secrets are in the environment and in a file."""
    monkeypatch.setenv("TP_TEST_USER", USER)
    monkeypatch.setenv("TP_TEST_PASSWORD", PASSWORD)
    monkeypatch.setenv("TP_TEST_OPTION", OPTION)
    address = places["customers"][0].render_as_string(hide_password=False)
    (tmp_path / "uri").write_text(f"{address}?program_name={OPTION}\n")
    file = tmp_path / "tables.toml"
    urls = {name: url for name, (url, _) in places.items()}
    names = {name: table for name, (_, table) in places.items()}
    file.write_text(case_table(__file__)["tables"].format(names=names, **urls))
    return file


def run_app(tables: Path, folder: Path, caplog, capfd, **settings) -> Output:
    """One run of the whole app; debug messages of everything are recorded."""
    output = Output()

    def seen(message):
        output.pieces.append(f"{message.metadata} {unpack(message.content)!r}")

    grid = InProcessGrid(client_app, [tables], observe=seen, state=folder / "state")
    config = {
        "sql": store_sql("squared"),
        "num-epochs": 2,
        "device": "cpu",
        "output-dir": str(folder / "out"),
        **settings,
    }
    context = Context(1, 0, {}, RecordDict(), config)
    try:
        with caplog.at_level(logging.DEBUG):
            for name in LOGGERS:
                caplog.set_level(logging.DEBUG, name)
            server_app(grid=grid, context=context)
    except TPFlowerError as error:
        output.error = "".join(traceback.format_exception(error))
    finally:
        grid.close()
    printed = capfd.readouterr()
    output.pieces += [caplog.text, printed.out, printed.err]
    for file in folder.rglob("*"):
        if file.is_file() and file.parent != tables.parent:
            output.pieces.append(file.read_bytes().decode("latin-1"))
    output.pieces += [repr(grid.contexts), repr(vars(grid))]
    return output


@pytest.mark.parametrize("mode", ["train", "explain"])
def test_run_that_succeeds(tables, tmp_path, caplog, capfd, mode):
    output = run_app(tables, tmp_path / "run", caplog, capfd, mode=mode)
    assert not output.error
    output.check(expected="report.json")
    assert (tmp_path / "run" / "out" / "report.json").exists()


@pytest.fixture
def check(tables, tmp_path, caplog, capfd):
    """Run, and see that it failed with these words, and without a secret."""

    def checked(expected):
        output = run_app(tables, tmp_path / "run", caplog, capfd)
        output.check(expected=expected)
        assert output.error

    return checked


def test_wrong_password(check, monkeypatch):
    monkeypatch.setenv("TP_TEST_PASSWORD", WRONG)
    check("user or password are wrong: check the 'uri'")


def test_missing_table(check, places):
    run(places["orders"][0], f"DROP TABLE {places['orders'][1]}")
    check("the table does not exist: check 'table', with its schema")


def test_server_that_is_down(check, tables):
    tables.write_text(re.sub(r"@127.0.0.1:\d+", "@127.0.0.1:1", tables.read_text()))
    check("it cannot be reached: check host and port")


def test_bad_cast(check, tables):
    types = 'types = { region = "INTEGER" }\n[tables.items]'
    tables.write_text(tables.read_text().replace("[tables.items]", types))
    check("Conversion Error (to INT32)")


def test_missing_variable(check, monkeypatch):
    monkeypatch.delenv("TP_TEST_OPTION")
    check("needs the environment variable 'TP_TEST_OPTION', which is")


def test_sources_in_words(tables):
    shown = "".join(
        f"{s} {s!r} {s.database} {s.database!r} {s.database.url} {s.database.url!r}"
        for s in load_tables(str(tables))
    )
    Output([shown]).check(expected="postgresql://***@127.0.0.1:")
