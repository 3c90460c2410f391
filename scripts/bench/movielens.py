"""MovieLens-100K in the schema of the TablePuppet papers, if its files are at hand.

Ratings join movies, which have one row per genre (so the join is many-to-many), and
users. `prepare_movielens.py` reads the files. The published time is without titles.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd

from scripts.bench.runs import Check, Outcome, first_within, run_traced
from scripts.data.prepare_movielens import (
    SQL,
    TEST_FRACTION,
    has_movielens,
    read_movielens,
)
from scripts.joined.centralized import join_tables
from scripts.joined.optima import fit_linear
from tp_flower.learning.metrics import evaluate
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.sources.shards import (
    MEMORY_PREFIX,
    load_tables,
    register_frames,
    release,
)

__all__ = [
    "SQL",
    "TEST_FRACTION",
    "has_movielens",
    "measure_movielens",
    "read_movielens",
]

EPOCHS_TO_OPTIMUM = 8
RMSE_MARGIN = 0.0005

PUBLISHED_SECONDS = 1.42
"""An epoch of the papers' TP-Join-ADMM, linear, by the authors' code on two cores."""
SPEED_UP = 50.0


def measure_movielens(folder: Path) -> Outcome:
    """Run linear ADMM with default settings; compare speed and test RMSE."""
    tables = read_movielens(folder)
    settings = Settings(task="regression", test_fraction=TEST_FRACTION)
    sites: Mapping[str, Mapping[str, pd.DataFrame]] = {
        name: {name: frame} for name, frame in tables.items()
    }
    trace = run_traced(SQL, settings, sites)
    token = register_frames(tables, site="all")
    joined = join_tables(
        Query.from_sql(SQL), settings, load_tables(MEMORY_PREFIX + token)
    )
    release(token)
    fitted = fit_linear(joined.loss, *joined.part(test=False), l2=0.0)
    features, labels = joined.part(test=True)
    optimum = evaluate(joined.loss, fitted.scores(features), labels)["rmse"]
    above = [float(metrics["rmse"]) - optimum for metrics in trace.test]
    seconds = median(np.diff(trace.seconds).tolist())
    report = trace.strategy.report
    return Outcome(
        checks=[
            Check(
                f"epochs to the optimum's test RMSE + {RMSE_MARGIN:g}",
                first_within(above, RMSE_MARGIN),
                EPOCHS_TO_OPTIMUM,
            ),
            Check(
                f"seconds per epoch, {PUBLISHED_SECONDS:g} s over {SPEED_UP:.0f}",
                seconds,
                PUBLISHED_SECONDS / SPEED_UP,
                "s",
            ),
        ],
        facts={
            "joined rows": [report.joined_rows_train, report.joined_rows_test],
            "features": {item.table: item.features for item in report.tables},
            "test RMSE of the optimum": optimum,
            "times faster than published": PUBLISHED_SECONDS / seconds,
            "server seconds per epoch": median(
                item.server_seconds for item in report.history if item.train
            ),
        },
        curves={"MovieLens, linear: test RMSE above the optimum's": {"ADMM": above}},
    )
