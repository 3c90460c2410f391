"""Real deployments for tests, which are skipped where they cannot be had."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.deploy import deployment
from strategies import STRATEGIES
from tests.support.federated import LocalGrid
from tp_flower.query import Query
from tp_flower.settings import Settings


@contextmanager
def deployed(folder: Path) -> Iterator[deployment.Deployment]:
    for program in ("bash", "openssl", "ssh-keygen"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    with deployment.deployed(folder) as running:
        yield running


def train_in_this_process(
    running: deployment.Deployment, settings: dict[str, object]
) -> dict[str, float]:
    """Train with the sites' tables and state folders, over no network.

    Returns the metrics on the rows that are trained on.
    """
    paths = [running.folder / site / "tables.toml" for site in deployment.STORE_FILES]
    grid = LocalGrid(list(map(str, paths)))
    for site, context in zip(
        deployment.STORE_FILES, grid.contexts.values(), strict=True
    ):
        context.node_config["state-dir"] = str(running.state(site))
    found = Settings.from_run_config(settings)
    strategy = STRATEGIES[found.strategy](Query.from_sql(str(settings["sql"])), found)
    strategy.start(grid)
    return strategy.report.final_train
