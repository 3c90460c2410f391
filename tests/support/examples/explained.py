"""Small tables that a reader can join in the head, and explain's answer to a query."""

import json

import numpy as np
import pandas as pd
from flwr.app import Context, RecordDict

from strategies import Explain
from strategies.app import main as server_main
from strategies.report_page.page import explanation_view
from tests.support.federated import LocalGrid, train
from tests.support.page_reading import console_text
from tp_flower.reports.results import CONSOLE_WIDTH


def explain(sql, sites, **how):
    return train(sites, sql, Explain, **{"mode": "explain", **how}).explanation


def run_app(folder, **config):
    """Run the server app on the small tables, and return the report that it writes."""
    fixed = {"output-dir": str(folder), "test-fraction": 0.4, "sql": SMALL_SQL}
    with LocalGrid(SMALL) as grid:
        server_main(grid, Context(1, 1, {}, RecordDict(), {**fixed, **config}))
    return json.loads((folder / "report.json").read_text())


def columns(rows, *names):
    """These columns of rows of an explanation, row by row."""
    return [[row[name] for name in names] for row in rows]


def printed(explanation, is_full=True) -> str:
    privacy = {"readings": explanation["privacy"]["readings"]}
    view = explanation_view({**explanation, "privacy": privacy}, is_full)
    return console_text(view, CONSOLE_WIDTH)


ORDERS = pd.DataFrame(
    {
        "item": ["a", "a", "b", None, "z"],
        "cust": [1, 2, 1, 1, 3],
        "day": [1.0, 2.0, 3.0, 4.0, 5.0],
        "same": [7, 7, 7, 7, 7],
        "qty": [1.0, 2.0, 3.0, 4.0, 6.0],
    }
)
ITEMS = pd.DataFrame({"item": ["a", "a", "b", "c"], "price": [1.0, 2.0, 3.0, 4.0]})
SMALL = {
    "shop": {"orders": ORDERS},
    "maker": {"items": ITEMS},
    "us": {"customers": pd.DataFrame({"id": [1.0, np.nan], "kind": ["x", "y"]})},
    "uk": {"customers": pd.DataFrame({"id": [2.0, 4.0], "kind": ["x", "x"]})},
}
SMALL_SQL = (
    "SELECT o.qty AS label, o.day, o.same, i.price, c.kind FROM orders o "
    "JOIN items i ON o.item = i.item LEFT JOIN customers c ON o.cust = c.id"
)
