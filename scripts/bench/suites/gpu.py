"""Seconds per epoch on the CPU and on a GPU, on tables of the papers' sizes.

    python scripts/bench/suites/gpu.py FOLDER [--factor F] [--epochs E]
        [--name yelp|mimic]

writes the tables to FOLDER if they are not there (10 GB at factor 1, and as much again
for the encoded features, which later runs find), trains by each method on each device
in a process of its own, and prints one JSON. Nothing outside the machine is needed.
Without a GPU it measures the CPU and says so.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from client_apps.app import app
from scripts.bench.processes import in_process_of_its_own
from scripts.bench.runs import Check, Outcome
from scripts.data.paper_scale import PAPER_SCALES, write_paper_scale
from strategies import STRATEGIES
from strategies.run.grid import InProcessGrid
from tp_flower.learning.models.local_model import AUTO, CPU, CUDA, resolve
from tp_flower.query import Query
from tp_flower.reports.records import RoundReport
from tp_flower.settings import Settings

NO_GPU = "no GPU here: CUDA was not measured"
EPOCHS = 4
SAME = 1e-4
"""How much the training loss on a GPU may differ from the CPU's, relative to it."""

METHODS: Mapping[str, Mapping[str, Any]] = {
    "admm": {"strategy": "admm"},
    "sgd": {"strategy": "sgd"},
    "admm, mlp": {"strategy": "admm", "model": "mlp"},
}
LINEAR = ("admm", "sgd")
"""Whose iterates are the CPU's; an MLP's minibatches amplify the last bits."""

Measured = dict[str, Any]


def measure_gpu(
    folder: Path, factor: float = 1.0, name: str = "yelp", epochs: int = EPOCHS
) -> Outcome:
    """Measure every method on the CPU and, where there is one, on a GPU.

    Args:
        folder: of the tables, written if they are not there.
        factor: share of the papers' row counts.
        name: of the data set.
        epochs: to train; the first one is not counted.
    """
    tables = _tables(folder, factor, name)
    has_gpu = resolve(AUTO) == CUDA
    outcome = Outcome()
    outcome.facts |= {
        "data": f"{name} at factor {factor:g}",
        "gpu": _name_of_gpu() if has_gpu else NO_GPU,
    }
    for method in METHODS:
        found = {
            device: in_process_of_its_own(
                __file__, [str(tables), name, epochs, method, device]
            )
            for device in ([CPU, CUDA] if has_gpu else [CPU])
        }
        for device, measured in found.items():
            outcome.facts |= {
                f"{method}, {device}: {key}": value for key, value in measured.items()
            }
        if has_gpu:
            outcome.facts[f"{method}: times as fast as on the CPU"] = (
                found[CPU]["seconds per epoch"] / found[CUDA]["seconds per epoch"]
            )
        if has_gpu and method in LINEAR:
            own, other = (found[device]["train loss"] for device in (CUDA, CPU))
            difference = abs(own - other) / abs(other)
            label = f"{method}: training loss on the GPU, relative to the CPU's"
            outcome.checks.append(Check(label, difference, SAME))
    return outcome


def _tables(folder: Path, factor: float, name: str) -> Path:
    """Return the tables file of this size, written if it is not there."""
    own = folder / f"{name}-{factor:g}"
    tables = own / "tables.toml"
    # which is written last
    return tables if tables.exists() else write_paper_scale(name, own, factor)


def _name_of_gpu() -> str:
    import torch

    return torch.cuda.get_device_name()


def measure_one(
    tables: Path, name: str, epochs: int, method: str, device: str
) -> Measured:
    """Train by one method on one device; return its seconds and where it got."""
    how = METHODS[method]
    settings = Settings(
        **how,
        # stars are classes, as in the paper
        task="classification",
        num_epochs=epochs,
        device=device,
    )
    scale = PAPER_SCALES[name]
    strategy = STRATEGIES[settings.strategy](Query.from_sql(scale.sql), settings)
    # one site has all tables; their features lie in files, which the next run finds
    grid = InProcessGrid(app, {"all": tables}, state=tables.parent / "state")
    with closing(grid):
        strategy.start(grid)
    history = strategy.report.history
    seconds = [_seconds(history, epoch) for epoch in range(epochs + 1)]
    # the first epoch also copies to the device, and warms up
    steady = range(2 if epochs > 1 else 1, epochs + 1)
    return {
        "joined rows": strategy.report.joined_rows_train,
        "seconds per epoch": median(sum(seconds[epoch]) for epoch in steady),
        "of them at the server": median(seconds[epoch][0] for epoch in steady),
        "of them at the site": median(seconds[epoch][1] for epoch in steady),
        "seconds of the first epoch": sum(seconds[1]),
        "seconds of set-up": sum(seconds[0]),
        "train loss": strategy.report.final_train["loss"],
        "test accuracy": strategy.report.final_test["accuracy"],
    }


def _seconds(history: Sequence[RoundReport], epoch: int) -> tuple[float, float, float]:
    """Return an epoch's seconds at the server, at the site, and between."""
    rounds = [item for item in history if item.epoch == epoch]
    return (
        sum(item.server_seconds for item in rounds),
        sum(item.client_seconds for item in rounds),
        sum(item.wait_seconds for item in rounds),
    )


def main() -> None:
    """Measure all, or one run for the process that measures all."""
    if sys.argv[1:] and sys.argv[1].startswith("["):
        tables, *how = json.loads(sys.argv[1])
        print(json.dumps(measure_one(Path(tables), *how)))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="for the tables")
    parser.add_argument("--factor", type=float, default=1.0, help="share of the rows")
    parser.add_argument("--name", choices=list(PAPER_SCALES), default="yelp")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    given = parser.parse_args()
    outcome = measure_gpu(given.folder, given.factor, given.name, given.epochs)
    print(json.dumps(outcome.to_json(), indent=2))


if __name__ == "__main__":
    main()
