"""Run strategies on actors of Ray, some of which are killed; print what came out.

It is a process of its own, for Ray leaves files and processes to the end of one.
"""

import json
import sys

import numpy as np

from strategies import STRATEGIES
from tests.support.federated import LocalGrid, one_per_site, store, store_sql, whole
from tp_flower.joins import ray_workers
from tp_flower.joins import rows as joins
from tp_flower.joins.mapping import TableMapping, TableRows
from tp_flower.joins.spread_rows import SpreadRows, joined_rows
from tp_flower.query import Query

HOW = {"device": "cpu", "num_epochs": 3, "task": "classification"}


def killed_run(ray, workers: int) -> dict:
    """Kill one actor in the set-up, and the other in an epoch."""

    def kill(report) -> None:
        number = 0 if report.phase == "prepare" else 1
        if workers and (number == 0 or report.epoch == 2):
            ray.kill(strategy.workers._actors[number])

    sites = one_per_site(whole(store(150)))
    query = Query.from_sql(store_sql("logistic"))
    strategy = STRATEGIES["cg"](query, on_round=kill, server_workers=workers, **HOW)
    with LocalGrid(sites) as grid:
        strategy.start(grid)
    is_spread = isinstance(strategy.training_problem.rows, SpreadRows)
    return {
        "losses": strategy.losses,
        "metrics": {**strategy.final.train, **strategy.final.test},
        "generations": strategy.workers.generations if is_spread else [],
    }


def failing_kernel() -> dict:
    """Sum a vector, then let a kernel read one that is not there."""
    mapping = TableMapping({"t": TableRows(np.arange(300), 300)})
    vectors = {"x": np.arange(300.0)[:, None]}
    with ray_workers.open_workers(2, lambda _: None) as workers:
        rows = joined_rows(mapping, vectors, workers=workers)
        sums = rows.sums("x")["t"].ravel().tolist()
        try:
            rows.run(lambda v, _: ({}, [v["scores"].sum()]))
        except KeyError as error:
            return {"sums": sums, "error": str(error)}
    return {}


def main() -> None:
    """Print everything as JSON."""
    joins.PART_ROWS = 64
    ray = ray_workers.load_ray()
    raylet = ray._raylet
    # for all runs of this process
    workers = int(sys.argv[1])
    ray_workers.connect(ray, workers)
    results = {
        "runs": [killed_run(ray, number) for number in (0, workers)],
        "kernel": failing_kernel(),
        "is-open": ray.is_initialized(),
        "asks-for-token": raylet.get_authentication_mode()
        == raylet.AuthenticationMode.TOKEN,
    }
    ray.shutdown()
    sys.stdout.write("\n" + json.dumps(results))


if __name__ == "__main__":
    main()
