"""Train over a CSV file and a SQLite database of two organisations, in this process.

    python own_tables.py [FOLDER]

FOLDER is a copy of this one: put your own files there, and say in tables.toml and
my-run.toml where they are and what to train on. The reports go to FOLDER/report.
"""

import sqlite3
import sys
import tomllib
from contextlib import closing
from pathlib import Path

from flwr.app import Context, RecordDict

from client_apps.app import app as site_app
from strategies.app import app as server_app
from strategies.run.grid import InProcessGrid

SITES = 2


def make_database(folder: Path) -> None:
    """Write crm.db from customers.sql, unless it is there."""
    if not (folder / "crm.db").exists():
        with closing(sqlite3.connect(folder / "crm.db")) as database:
            database.executescript((folder / "customers.sql").read_text(encoding="utf-8"))


def run(folder: Path) -> None:
    """Train as my-run.toml says, over the tables of tables.toml."""
    make_database(folder)
    config = tomllib.loads((folder / "my-run.toml").read_text(encoding="utf-8"))
    config["tables"] = str(folder / "tables.toml")
    config["output-dir"] = str(folder / "report")
    grid = InProcessGrid(site_app, SITES, run_config=config)
    server_app(grid, Context(grid.run.run_id, 1, {}, RecordDict(), config))


if __name__ == "__main__":
    run(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent).resolve())
