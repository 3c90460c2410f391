"""Runs over what the scripts that prepare data have written."""

import tomllib
from pathlib import Path
from typing import Any

import pandas as pd

from client_apps.app import app
from strategies.run.grid import InProcessGrid
from tests.support.federated import train
from tp_flower.reports.records import RunReport
from tp_flower.settings import Settings


def run_prepared(output: Path, **changes: Any) -> RunReport:
    """Train two epochs in process, on two nodes, as OUTPUT/my-run.toml says."""
    config = tomllib.loads((output / "my-run.toml").read_text(encoding="utf-8"))
    settings = Settings.from_run_config({**config, "num-epochs": 2, **changes})
    grid = InProcessGrid(app, 2, run_config={"tables": settings.tables})
    return train(grid, settings.sql, settings.strategy, settings=settings).report


def table(output: Path, name: str) -> pd.DataFrame:
    """Read a table that was written."""
    return pd.read_parquet(output / f"{name}.parquet")
