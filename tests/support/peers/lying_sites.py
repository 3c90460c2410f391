"""The organisations whose sites a lying server asks: a shop, its customers in two, a
laboratory.
"""

import os

import numpy as np
import pandas as pd
import pytest

ORDERS = 16
OWN_LABELS = "SELECT c.age AS label, c.pay, c.kind FROM customers c"
SQL = (
    "SELECT o.qty AS label, o.price, o.day, c.age, c.kind, i.cost, i.size FROM orders "
    "o JOIN customers c ON o.cust = c.id JOIN items i ON o.item = i.item"
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Log nothing, and wait for no disk."""
    caplog.set_level("CRITICAL", "flwr")
    monkeypatch.setattr(os, "fsync", lambda _: None)


def customers(*ids: int) -> pd.DataFrame:
    columns = {
        "id": ids,
        "age": [20.0 + 7 * k * k for k in ids],
        "kind": [f"k{k % 2}" for k in ids],
    }
    return pd.DataFrame({**columns, "pay": [1.5 * k for k in ids]})


def tables() -> dict[str, dict[str, pd.DataFrame]]:
    rng = np.random.default_rng(3)
    row = np.arange(ORDERS)
    orders = {"cust": row % 8, "friend": row * 3 % 8, "item": row % 5}
    numbers = {name: rng.normal(size=ORDERS) for name in ("price", "qty", "salary")}
    items = {name: rng.normal(size=5) for name in ("cost", "size")}
    return {
        "shop": {
            "orders": pd.DataFrame(
                {**orders, **numbers, "day": rng.integers(1, 29, ORDERS)}
            )
        },
        "us": {"customers": customers(0, 1, 2, 3)},
        "uk": {"customers": customers(4, 5, 6, 7)},
        "lab": {"items": pd.DataFrame({"item": np.arange(5), **items})},
    }


RULES = (
    "min-rows = 3\n"
    'releases = { models = "sealed", scores = "masked", statistics = "moments" }'
)
STRICT = {
    "orders": 'columns = ["price", "day", "cust", "item", "friend"]\nlabels = ["qty"]\n'
    f"most-unmatched = 0\n{RULES}",
    "customers": "coefficients = true\nmost-unmatched = 0\n"
    + RULES.replace(" }", ', categories = "clear" }'),
    "items": f"most-unmatched = 0\n{RULES}",
}
RANKED = {**STRICT, "orders": f"{STRICT['orders']}\ncover = 1\nscores-per-rank = 0.5"}
AGGREGATES = {
    table: text.replace(" }", ', moments = "clear" }') for table, text in STRICT.items()
}
# of so few rows no policy that counts them allows moments of two sets of joined rows
UNCOUNTED = {
    table: text.replace("min-rows = 3", "min-rows = 1")
    for table, text in AGGREGATES.items()
}
POLICIES = {
    "strict": STRICT,
    "ranked": RANKED,
    "aggregates": AGGREGATES,
    "uncounted": UNCOUNTED,
}
"""The sites' policies, by kind; those that ask for ranks let no scores of so few rows
leave, and only the last two let second moments."""
