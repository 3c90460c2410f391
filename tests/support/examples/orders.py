"""Orders of users and of items, whose makers may lack: for runs by second moments."""

import numpy as np
import pandas as pd

from tests.support.reference.joins import engine_of
from tp_flower import api

FEATURES = ("o.day", "u.age", "i.price", "m.size")
SQL = """SELECT {label} AS label, {features} FROM orders o
JOIN users u ON o.uid = u.uid JOIN items i ON o.iid = i.iid
LEFT JOIN makers m ON i.mid = m.mid"""
L2 = 0.01


def tables(orders: int = 300) -> dict[str, pd.DataFrame]:
    """Orders of users, of items with several rows a key, of makers that may lack."""
    rng = np.random.default_rng(5)
    users = pd.DataFrame({"uid": range(30), "age": rng.normal(40.0, 9.0, size=30)})
    items = pd.DataFrame(
        {
            "iid": rng.integers(10, size=14),
            "price": rng.gamma(2.0, 3.0, size=14),
            "mid": rng.integers(6, size=14),
        }
    )
    makers = pd.DataFrame({"mid": range(4), "size": rng.normal(size=4)})
    keys = {"uid": rng.integers(32, size=orders), "iid": rng.integers(11, size=orders)}
    day = rng.normal(size=orders)
    price = items.groupby("iid")["price"].mean().reindex(keys["iid"]).fillna(5.0)
    qty = 0.3 * price.to_numpy() - day + 0.02 * keys["uid"] + rng.normal(size=orders)
    kind = np.select([qty > 3.0, qty > 1.0], ["many", "some"], "few")
    ordered = pd.DataFrame({**keys, "day": day, "qty": qty, "kind": kind})
    return {"orders": ordered, "users": users, "items": items, "makers": makers}


def sites() -> dict[str, dict[str, pd.DataFrame]]:
    return {f"at {name}": {name: frame} for name, frame in tables().items()}


def sql(label: str = "o.qty", features: str = ", ".join(FEATURES)) -> str:
    return SQL.format(label=label, features=features)


def rows_of(query: str, frames: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """The rows of a query, by DuckDB."""
    with engine_of(frames) as engine:
        return engine.execute(query).fetchdf()


def joined(label: str = "o.qty") -> tuple[np.ndarray, pd.Series]:
    """The standardised features of the join, zeros where a LEFT JOIN finds none."""
    rows = rows_of(sql(label), tables())
    features = rows.drop(columns="label")
    scaled = (features - features.mean()) / features.std(ddof=0)
    return scaled.fillna(0.0).to_numpy(), rows["label"]


def coefficients(model: api.FittedModel) -> np.ndarray:
    """The coefficient of every feature, in the order of the query."""
    found = model.coefficients.set_index(["table", "column"])["coefficient"]
    return np.array([found[tuple(name.split("."))] for name in FEATURES])


def fit(label: str = "o.qty", **how: object) -> api.FittedModel:
    settings = {"strategy": "moments", "l2": L2, "test_fraction": 0.0, **how}
    return api.fit(sql(label), sites(), **settings)
