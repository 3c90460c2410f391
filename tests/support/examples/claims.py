"""Claims of people who live in regions of zones, which may lack: a snowflake."""

import numpy as np
import pandas as pd

from tests.support.federated import pieces
from tests.support.reference.joins import engine_of
from tp_flower import api

LABELS = {
    "squared": "c.gain",
    "logistic": "c.is_large",
    "poisson": "c.claims",
    "negative-binomial(0.7)": "c.claims",
    "gamma": "c.cost",
    "tweedie(1.4)": "c.cost",
}
FEATURES = ("c.km", "p.age", "r.density", "z.rain")
SQL = """SELECT {label} AS label, {features} FROM claims c
JOIN people p ON c.pid = p.pid LEFT JOIN regions r ON p.rid = r.rid
LEFT JOIN zones z ON r.zid = z.zid"""


def tables(rows: int = 400) -> dict[str, pd.DataFrame]:
    rng = np.random.default_rng(3)
    people = pd.DataFrame(
        {
            "pid": range(90),
            "age": rng.normal(45.0, 12.0, size=90),
            "rid": rng.integers(14, size=90),
            "job": rng.choice(["baker", "cook", "nurse", "smith"], size=90),
        }
    )
    regions = pd.DataFrame(
        {
            "rid": range(10),
            "density": rng.gamma(2.0, size=10),
            "zid": rng.integers(4, size=10),
        }
    )
    zones = pd.DataFrame({"zid": range(3), "rain": rng.normal(size=3)})
    claims = pd.DataFrame({"pid": rng.integers(95, size=rows)})
    claims["km"] = rng.normal(size=rows)
    claims["times"] = rng.integers(1, 5, size=rows)
    age = people["age"].reindex(claims["pid"]).fillna(45.0).to_numpy()
    score = 0.5 * claims["km"] + 0.02 * age - 1.0
    claims["claims"] = rng.poisson(np.exp(score))
    claims["cost"] = rng.gamma(2.0, np.exp(score) / 2.0) + 1e-3
    claims["is_large"] = rng.random(rows) < 1.0 / (1.0 + np.exp(-score))
    claims["gain"] = score + rng.normal(size=rows)
    return {"claims": claims, "people": people, "regions": regions, "zones": zones}


def sharded(frames: dict[str, pd.DataFrame]) -> dict[str, dict[str, pd.DataFrame]]:
    """Claims in three shards, and people in two, each at a site of its own."""
    where = {name: {name: frames[name]} for name in ("regions", "zones")}
    for name, count in (("claims", 3), ("people", 2)):
        for number, piece in enumerate(pieces(frames[name], count)):
            where[f"{name} {number}"] = {name: piece}
    return where


def sites(**frames: pd.DataFrame) -> dict[str, dict[str, pd.DataFrame]]:
    """Return a site for each table; others' frames go to sites of their own."""
    given = tables() | frames
    return {f"at {name}": {name: frame} for name, frame in given.items()}


def sql(label: str, features: tuple[str, ...] = FEATURES, more: str = "") -> str:
    return SQL.format(label=label, features=", ".join(features)) + more


def joined(query: str) -> tuple[np.ndarray, np.ndarray]:
    """The standardised features of the join, the mean where a row lacks, and labels."""
    with engine_of(tables()) as engine:
        rows = engine.execute(query).fetchdf()
    label = rows.pop("label").to_numpy(np.float64)
    scaled = (rows - rows.mean()) / rows.std(ddof=0)
    return scaled.fillna(0.0).to_numpy(), label


def fit(query: str, where: dict | None = None, **how: object) -> api.FittedModel:
    settings = {"strategy": "cg", "l2": 0.0, "test_fraction": 0.0, **how}
    settings.setdefault("standard_errors", "model")
    return api.fit(query, sites() if where is None else where, **settings)
