"""What suite coreset found, in the layout of the paper's Table 1."""

from collections.abc import Iterator, Mapping
from typing import Any

from scripts.bench.report.plots import MEGABYTE
from scripts.bench.report.tables import NEVER, Table, number

Found = Mapping[str, Any]

CORESET_SUITE = "coreset"
COSTS = {
    "ridge": "squared error on held-out rows",
    "kmeans": "mean squared distance, all joined rows",
}
NAMES = {"ridge": "ridge regression", "kmeans": "k-means"}


def coreset_tables(facts: Found) -> list[Table]:
    """Return a table per data set and problem."""
    return [
        problem_table(dataset, problem)
        for dataset in facts.values()
        for problem in COSTS
    ]


def problem_table(dataset: Found, problem: str) -> Table:
    """Return sizes by methods: cost, deviation over the samples, and units sent."""
    found = dataset[problem]
    methods = list(found["sizes"])
    head = ["rows", *methods, "units, C", "units, U"]
    rows = [
        [
            f"{int(size):,}",
            *(_cost(found["sizes"][method][size]) for method in methods),
            *(_units(found, kind, size) for kind in "CU"),
        ]
        for size in found["sizes"][methods[0]]
    ]
    full = found["full"]
    of_all = [_all(full[method.partition("-")[2]]) for method in methods]
    sent = number(found["full-units"], 4)
    rows.append([f"all {_rows(dataset, problem):,}", *of_all, sent, sent])
    return Table(
        f"{dataset['title']}, {NAMES[problem]}: {COSTS[problem]}",
        head,
        rows,
        " ".join(_runs(found)),
    )


def _rows(dataset: Found, problem: str) -> int:
    train, test = dataset["joined-rows"]
    return int(train if problem == "ridge" else train + test)


def _cost(cell: Found) -> str:
    return f"{number(cell['mean'], 5)} ± {number(cell['std'], 2)}"


def _all(cost: float | None) -> str:
    return NEVER if cost is None else number(cost, 5)


def _units(found: Found, kind: str, size: str) -> str:
    method = next(name for name in found["sizes"] if name.startswith(f"{kind}-"))
    return number(found["sizes"][method][size]["units"], 4)


def _runs(found: Found) -> Iterator[str]:
    """Say what the runs have sent."""
    own = found["runs"]
    choice, rows, other = (
        own["C"][f"{name}_bytes"] / MEGABYTE for name in ("choice", "row", "other")
    )
    yield (
        f"A run with 2,000 rows sends {number(choice)} MB to choose them, "
        f"{number(rows)} MB of rows ({number(own['U']['row_bytes'] / MEGABYTE)} MB "
        f"uniform), and {number(other)} MB that every method over a join sends: "
        "alignment, statistics, scores of evaluation. Its cost is "
        f"{number(own['C']['cost'], 5)} (uniform {number(own['U']['cost'], 5)})."
    )
