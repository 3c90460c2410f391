"""The seconds of a round of SGD, in this process and in Flower's simulation.

In this process: the flights with every table cut in two halves, one per site, linear
models. In the simulation: the built-in flights at five organisations, by a real `flwr
run`.
"""

import importlib.util
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import mean

import pandas as pd

from scripts.bench.datasets import Tables, flights
from scripts.bench.harness import Options, Outcome, SkippedSuite, train_timed
from scripts.checks.checkouts import ROOT, run_python
from tp_flower.settings import Settings
from tp_flower.sources.flights import FLIGHTS_SQL

BATCH_ROWS = 10_000
SECONDS_IN_PROCESS = 0.005
SECONDS_IN_SIMULATION = 0.15
REPEATS = 2
PARTS = ("server-seconds", "client-seconds", "wait-seconds")


def measure_rounds(_: Options) -> Outcome:
    """Time rounds in this process."""
    apart = flights().two_shards()
    together: dict[str, Tables] = {"0": {}, "1": {}}
    for name, half in apart.items():
        together[name[-1]].update(half)
    outcome = Outcome()
    for title, sites in (("2 sites", together), ("8 sites", apart)):
        runs = [_run(sites) for _ in range(REPEATS)]
        fastest, cpu = (
            min(run[clock].mean() for run in runs) for clock in ("seconds", "cpu")
        )
        outcome.facts[f"rounds per second, {title}"] = 1 / fastest
        outcome.facts[f"rounds per second of CPU, {title}"] = 1 / cpu
        if sites is together:
            text = f"round of {BATCH_ROWS:,} rows in this process"
            outcome.check(text, fastest, SECONDS_IN_PROCESS, "s")
    return outcome


def _run(sites: Mapping[str, Tables]) -> pd.DataFrame:
    """Return the rounds of the epochs of a run in this process."""
    chosen = Settings(strategy="sgd", task="classification", batch_size=BATCH_ROWS)
    _, rounds = train_timed(FLIGHTS_SQL, chosen, sites)
    return rounds[rounds["epoch"] > 0]


def measure_simulation(_: Options) -> Outcome:
    """Time rounds in Flower's simulation, which needs Ray."""
    if importlib.util.find_spec("ray") is None:
        raise SkippedSuite("no ray, which Flower's simulations need")
    with tempfile.TemporaryDirectory(prefix="tp-flower-") as folder:
        config = "strategy=sgd task=classification num-epochs=2 progress=false"
        config += f" batch-size={BATCH_ROWS} output-dir={folder}/run"
        command = [str(ROOT / "scripts" / "run_app.py"), "train"]
        command += [word for setting in config.split() for word in ("--set", setting)]
        status, output = run_python(command, ROOT, {"TP_FLOWER_HOME": f"{folder}/home"})
        if status:
            raise RuntimeError(f"the simulation failed:\n{output[-2000:]}")
        report = json.loads(Path(folder, "run", "report.json").read_text("utf-8"))
    rounds = [item for item in report["history"] if item["epoch"]]
    outcome = Outcome()
    seconds = mean(sum(item[part] for part in PARTS) for item in rounds)
    title = f"round of {BATCH_ROWS:,} rows in Flower's simulation"
    outcome.check(title, seconds, SECONDS_IN_SIMULATION, "s")
    return outcome
