"""A server weighs joined rows as it likes, and reads single rows from their sums.

Sums of words are exact. A row that weighs 1 beside rows that weigh multiples of 2^15 is
the remainder of a sum, though it has next to none of it.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from strategies.methods.moments import information
from strategies.methods.moments.assembly import matrices
from strategies.methods.moments.information import InformationRound
from tests.support.federated import site_per_table
from tp_flower import api
from tp_flower.errors import TPFlowerError

ROWS, SHOPS = 120, 24
SQL = """SELECT v.bought AS label, v.smoker, s.rich, s.size
FROM visits v JOIN shops s ON v.shop = s.shop"""
ENCODERS = "v.smoker=none missing=zero; s.rich=none missing=zero; s.size=standard"
RULES = """min-rows = {}
min-count = {}
releases = {{ covariance = "clear", statistics = "moments" }}
"""


def tables() -> dict[str, pd.DataFrame]:
    rng = np.random.default_rng(4)
    visits = pd.DataFrame(
        {
            "shop": np.arange(ROWS) % SHOPS,
            "smoker": np.arange(ROWS) % 10 == 0,
            "bought": rng.random(ROWS) < 0.5,
        }
    )
    shops = pd.DataFrame(
        {
            "shop": range(SHOPS),
            "rich": rng.random(SHOPS) < 0.5,
            "size": rng.normal(size=SHOPS),
        }
    )
    return {"visits": visits, "shops": shops}


def read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, weights: np.ndarray, rules: str
) -> dict[str, int]:
    """What rows weigh that have an indicator, as a server of such weights reads it."""
    found: dict[str, int] = {}

    def told(*_: object) -> np.ndarray:
        return weights.astype(np.uint32)[None, :]

    def kept(counts, replies, layout, bits):
        (matrix,) = matrices(counts, replies, layout, bits).values()
        smoker, ones, rich, _ = matrix[layout.intercept].tolist()
        found.update(smoker=int(smoker), rich=int(rich), all=int(ones))
        return {0: matrix}

    monkeypatch.setattr(InformationRound, "_told", told)
    monkeypatch.setattr(information, "matrices", kept)
    frames = tables()
    sites = site_per_table(folder, frames, dict.fromkeys(frames, rules))
    how = {"strategy": "cg", "test_fraction": 0.0, "l2": 0.1}
    api.fit(SQL, sites, encoders=ENCODERS, standard_errors="model", **how)
    return found


def test_a_column_of_rows_that_weigh_nothing_is_refused(tmp_path, monkeypatch):
    """It is 1 in 12 rows, of which all but one weigh 0: its moments are that row's."""
    weights = np.full(ROWS, 1000)
    weights[10::10] = 0
    with pytest.raises(
        TPFlowerError, match=r"min-count.*'smoker', which is the same in"
    ):
        read(tmp_path, monkeypatch, weights, RULES.format(1, 10))


def test_a_row_that_weighs_next_to_nothing_is_the_rest_of_a_sum(tmp_path, monkeypatch):
    """Whatever min-rows is, where a policy allows a covariance."""
    for row in (30, 31):
        weights = np.full(ROWS, 1 << 15)
        weights[row] = 1
        found = read(tmp_path / str(row), monkeypatch, weights, RULES.format(10, 1))
        assert found["all"] % (1 << 15) == 1
        assert found["smoker"] % (1 << 15) == tables()["visits"]["smoker"][row]


def test_the_rows_behind_keys_are_digits_of_a_sum(tmp_path, monkeypatch):
    weights = np.zeros(ROWS, np.int64)
    # of each shop one visit counts
    weights[:SHOPS] = 1 << np.minimum(np.arange(SHOPS), 12)
    found = read(tmp_path, monkeypatch, weights, RULES.format(1, 1))
    digits = [found["rich"] >> place & 1 for place in range(12)]
    assert digits == tables()["shops"]["rich"][:12].astype(int).tolist()


def test_no_weights_are_taken_without_a_release_of_their_own(tmp_path, monkeypatch):
    rules = RULES.format(3, 1).replace("covariance", "moments")
    with pytest.raises(TPFlowerError, match=r"covariance = never\) refuses: the run"):
        read(tmp_path, monkeypatch, np.full(ROWS, 9), rules)
