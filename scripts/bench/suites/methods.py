"""Methods against each other on the same data: what a good test metric costs each.

As in the papers' section 6: figures 5 (epochs), 7 (communication), 8 (computing), 9 and
10 (shards). Every run is a process of its own (`python scripts/bench/suites/methods.py
JSON` runs one and prints what it found), in which the server and all sites take turns:
its peak memory is that of all of them together, over what the process had with the data
loaded. Each run is done once: seconds of computing are as steady as the machine.

What the methods are measured against is the *centralised metric*: the test metric of
the linear model at the optimum of the same objective, on the joined table, with the
same rows held out. A method has *reached* it at the first epoch with a test metric
within 1 % of it (`curves.is_within`).
"""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from client_apps.app import app
from scripts.bench.curves import (
    FINE_TOLERANCE,
    PAPER_NETWORKS,
    TOLERANCE,
    Curve,
    curve_of,
    phase_seconds,
)
from scripts.bench.datasets import DATASETS
from scripts.bench.movielens import has_movielens
from scripts.bench.processes import forget_peak, in_process_of_its_own, peak_memory
from scripts.bench.reference import Found, measure_reference
from scripts.bench.runs import Check, Options, Outcome, SkippedSuite
from scripts.data.dataset import Dataset
from strategies import STRATEGIES
from strategies.run.grid import InProcessGrid
from tp_flower.query import Query
from tp_flower.settings import Settings

MEBIBYTE = 1 << 20
REFERENCE = "reference"
ADMM_CLAIM = (
    "TP-ADMM's communication time to 1 % over the least of the others, any network"
)
SGD_CLAIM = "TP-SGD's epochs to 1 % over the fewest of the others (1: a tie)"
UCQ = ", UCQ"


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        title: for people; the papers' name where there is one.
        strategy: as in the run config.
        is_sharded: whether every table is in two shards.
        settings: run-config keys besides.
    """

    title: str
    strategy: str
    is_sharded: bool = False
    settings: Mapping[str, str | float] = field(default_factory=dict)


METHODS: Mapping[str, Method] = {
    "admm": Method("TP-ADMM", "admm"),
    "sgd": Method("TP-SGD", "sgd"),
    "vfl-admm": Method("VFL-ADMM", "vfl-admm"),
    "vfl-sgd": Method("VFL-SGD", "vfl-sgd"),
    # an epoch is one step: it needs more of them
    "gd": Method("GD", "gd", settings={"num-epochs": 50}),
    "ucq-admm": Method("TP-UCQ-ADMM", "admm", is_sharded=True),
    "ucq-sgd": Method("TP-UCQ-SGD", "sgd", is_sharded=True),
}


def measure_methods(options: Options) -> Outcome:
    """Run every chosen method on every chosen data set."""
    names = _chosen(options.datasets, DATASETS, "data set")
    methods = _chosen(options.methods, METHODS, "method")
    if "movielens" in names and not has_movielens(options.movielens):
        if options.datasets:
            raise SkippedSuite(f"no ml-100k in {options.movielens}")
        names.remove("movielens")
        print("  without movielens: no folder given with --movielens", flush=True)
    outcome = Outcome()
    for name in names:
        found = _measure_dataset(name, methods, options)
        outcome.facts[name] = found
        outcome.checks += claims(found)
    return outcome


def _chosen(asked: Sequence[str], known: Iterable[str], what: str) -> list[str]:
    unknown = sorted({*asked} - {*known})
    if unknown:
        message = f"no {what} {unknown[0]!r}; there are {', '.join(known)}"
        raise ValueError(message)
    return [name for name in known if name in asked or not asked]


def _measure_dataset(name: str, methods: Sequence[str], options: Options) -> Found:
    """Run the reference and the methods, each in a process of its own."""
    task = {
        "dataset": name,
        "movielens": str(options.movielens) if options.movielens else None,
        "settings": dict(options.settings),
    }
    found: Found = in_process_of_its_own(__file__, {**task, "method": REFERENCE})
    print(f"  {name}: centralised {found['metric']} {found['reference']:.4f}")
    found |= {"methods": {}, "failed": {}, "settings": task["settings"]}
    for method in methods:
        try:
            run = in_process_of_its_own(__file__, {**task, "method": method})
        except RuntimeError as error:
            # the other methods' figures are worth as much
            found["failed"][method] = str(error)
            print(f"  {name}, {method} failed: {error}", flush=True)
            continue
        found["methods"][method] = run | summary(found, Curve.from_json(run["curve"]))
        epoch = found["methods"][method]["epochs-to-1%"]
        when = f"within 1 % at epoch {epoch}" if epoch else "never within 1 %"
        print(f"  {name}, {METHODS[method].title}: {when}", flush=True)
    return found


def summary(dataset: Found, curve: Curve) -> Found:
    """Return the figures of the tables: costs until the metric is reached, 0 if never.

    Args:
        dataset: with ``metric``, ``reference`` and ``floor``.
        curve: of the run.
    """
    metric, reference = dataset["metric"], dataset["reference"]
    epoch = curve.reached(metric, reference, TOLERANCE)
    per_epoch = curve.per_epoch
    found: Found = {
        "epochs-to-1%": epoch,
        "epochs-to-0.1%": curve.reached(metric, reference, FINE_TOLERANCE),
        "last": curve.metric[-1],
        "rounds-per-epoch": per_epoch.rounds,
        "bytes-per-epoch": per_epoch.bytes,
        "bytes-over-floor": per_epoch.bytes / dataset["floor"],
        "compute-per-epoch": per_epoch.compute_seconds,
    }
    if epoch:
        cost = curve.costs[epoch - 1]
        found["to-1%"] = {
            "rounds": cost.rounds,
            "bytes": cost.bytes,
            "compute-seconds": cost.compute_seconds,
            "communication-seconds": {
                network.name: cost.communication_seconds(network)
                for network in PAPER_NETWORKS
            },
        }
    return found


def claims(dataset: Found) -> list[Check]:
    """Return the papers' claims as figures, join-only and over shards.

    ADMM over tables needs the least modelled communication time on every network, and
    SGD over tables the fewest epochs, to reach the centralised metric. The figures are
    ratios to the best of the other methods: at most 1, and 1 is a tie.
    """
    checks = []
    for of, admm, sgd in (("", "admm", "sgd"), (UCQ, "ucq-admm", "ucq-sgd")):
        group = {
            name: run
            for name, run in dataset["methods"].items()
            if METHODS[name].is_sharded == bool(of)
        }
        title = f"{dataset['title']}{of}"
        if admm in group and len(group) > 1:
            ratios = [
                _ratio(group, admm, _communication(network.name))
                for network in PAPER_NETWORKS
            ]
            checks.append(Check(f"{title}: {ADMM_CLAIM}", max(ratios), 1.0))
        if sgd in group and len(group) > 1:
            ratio = _ratio(group, sgd, _epochs)
            checks.append(Check(f"{title}: {SGD_CLAIM}", ratio, 1.0))
    failed = ", ".join(dataset["failed"]) or "none"
    name = f"{dataset['title']}: methods that failed ({failed})"
    return [*checks, Check(name, float(len(dataset["failed"])), 0.0)]


def _communication(network: str) -> Callable[[Found], float]:
    def seconds(run: Found) -> float:
        if "to-1%" not in run:
            return math.inf
        return float(run["to-1%"]["communication-seconds"][network])

    return seconds


def _epochs(run: Found) -> float:
    return float(run["epochs-to-1%"] or math.inf)


def _ratio(
    group: Mapping[str, Found], name: str, figure: Callable[[Found], float]
) -> float:
    """Return a method's figure over the least of the others."""
    own = figure(group[name])
    others = min(figure(run) for other, run in group.items() if other != name)
    # who never gets there has lost to all, also to others who do not
    return own / others if math.isfinite(own) else math.inf


def measure_run(dataset: Dataset, method: Method, settings: Settings) -> Found:
    """Train once and return the curve and what it took."""
    sites = dataset.two_shards() if method.is_sharded else dataset.join_only()
    forget_peak()
    before, cpu_before = peak_memory(), time.process_time()
    started = time.perf_counter()
    with closing(InProcessGrid(app, sites)) as grid:
        strategy = STRATEGIES[settings.strategy](Query.from_sql(dataset.sql), settings)
        strategy.start(grid)
    seconds = time.perf_counter() - started
    report = strategy.report
    return {
        "title": method.title,
        "curve": curve_of(report.history, dataset.metric).to_json(),
        "phases": phase_seconds(report.history),
        "seconds": seconds,
        "cpu-seconds": time.process_time() - cpu_before,
        "peak-mib": (peak_memory() - before) / MEBIBYTE,
    }


def run_settings(
    dataset: Dataset, method: Method | None, own: Mapping[str, Any]
) -> Settings:
    """Return the settings of a run; the user's win."""
    config: dict[str, Any] = dict(dataset.settings)
    if method is not None:
        config |= {"strategy": method.strategy, **method.settings}
    return Settings.from_run_config(config | dict(own))


def main(text: str) -> None:
    """Do one measurement and print it as JSON."""
    # Flower tells of every run what the curves tell better
    logging.getLogger("flwr").setLevel(logging.WARNING)
    task = json.loads(text)
    folder = Path(task["movielens"]) if task["movielens"] else None
    dataset = DATASETS[task["dataset"]](folder)
    if task["method"] == REFERENCE:
        found = measure_reference(dataset, run_settings(dataset, None, {}))
    else:
        method = METHODS[task["method"]]
        settings = run_settings(dataset, method, task["settings"])
        found = measure_run(dataset, method, settings)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
