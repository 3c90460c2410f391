"""A table of payments, and a partner's that varies as much, for attacks on what scores
tell.
"""

import numpy as np
import pandas as pd

from client_apps.data.score_counts import SCORES
from tests.support.federated import site_per_table
from tests.support.ledgers import ledger_lines

ROWS = 600
NAMES = ("amount", "day", "hour", "shop", "weight", "height")
RULES = "scores-per-rank = 0.5\ncover = 1\n"


def payments(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({name: rng.normal(size=rows).round(3) for name in NAMES})
    frame["secret"] = [f"secret {k}" for k in rng.integers(0, 60, rows)]
    frame["id"], frame["y"] = np.arange(rows), rng.normal(size=rows) + frame["amount"]
    return frame


def others(rows=ROWS, columns=6, seed=1):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({f"x{k}": rng.normal(size=rows) for k in range(columns)})
    frame["id"] = np.arange(rows)
    return frame


def written(folder, rules, **frames):
    """Sites with a table each; the rules are those of the payments."""
    policies = {**dict.fromkeys(frames, ""), "payments": rules}
    return site_per_table(folder, frames, policies)


def features(alias, names):
    return ", ".join(f"{alias}.{name}" for name in names)


OF_OTHERS = features("o", [f"x{k}" for k in range(6)])
JOINED = f"{OF_OTHERS} FROM payments p JOIN clinic o ON p.id = o.id"


def counted(folder, site="payments"):
    """How many score vectors a site's ledger has counted."""
    lines = ledger_lines(folder / "state" / site, SCORES)
    return sum(line["times"] for line in lines)
