"""Results of the benchmark as tables of text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.bench.curves import HIGHER_IS_BETTER, PAPER_NETWORKS
from scripts.bench.report.plots import MEGABYTE

Found = Mapping[str, Any]

NEVER = "-"


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        title: above it.
        head: of the columns.
        rows: the first cell names the row.
        note: below it.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        r"""Return the table without title and note.

        >>> print(Table("t", ["", "a"], [["x|y", "1"]]).markdown())
        |  | a |
        |---|---:|
        | x\|y | 1 |
        """
        lines = [self.head, *self.rows]
        cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
        head, *rows = (f"| {' | '.join(line)} |" for line in cells)
        rule = f"|---|{'---:|' * (len(self.head) - 1)}"
        return "\n".join([head, rule, *rows])


def number(value: float | None, digits: int = 3) -> str:
    """Return a figure with so many significant digits.

    >>> number(1234.5), number(0.0123456), number(2.0), number(None)
    ('1,234', '0.0123', '2', '-')
    """
    if value is None:
        return NEVER
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def measured(value: float | None, unit: str) -> str:
    """Return a figure of a check with its unit; None is infinite or not a number.

    >>> measured(0.0123, "%"), measured(12.0, "s"), measured(None, "s")
    ('1.23 %', '12 s', '-')
    """
    if unit == "%" and value is not None:
        return f"{number(100.0 * value)} %"
    return f"{number(value)} {unit if value is not None else ''}".strip()


def checks_table(suite: Found) -> Table:
    """Return the figures of a suite that have a limit."""
    rows = [
        [
            check["name"],
            measured(check["measured"], check["unit"]),
            measured(check["limit"], check["unit"]),
            "yes" if check["is-met"] else "**no**",
        ]
        for check in suite["checks"]
    ]
    return Table("Figures with a limit", ["", "measured", "at most", "met"], rows)


def facts_table(suite: Found) -> Table:
    """Return the other figures of a suite, nested ones by their path."""
    return Table("Other figures", ["", ""], [*_flat("", suite["facts"])])


def _flat(prefix: str, value: object) -> Iterator[list[str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{prefix}: {key}" if prefix else str(key), item)
    elif isinstance(value, list) and not any(isinstance(v, list | dict) for v in value):
        yield [prefix, ", ".join(_text(item) for item in value)]
    elif isinstance(value, list):
        for place, item in enumerate(value, start=1):
            yield from _flat(f"{prefix} {place}", item)
    else:
        yield [prefix, _text(value)]


def _text(value: object) -> str:
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return NEVER if value is None else str(value)
    return number(value, 4)


def goal(dataset: Found) -> str:
    """Return what a method has to reach, as in ``"test AUC >= 0.6953"``."""
    is_better_higher = dataset["metric"] in HIGHER_IS_BETTER
    limit = dataset["reference"] * (0.99 if is_better_higher else 1.01)
    sign = ">=" if is_better_higher else "<="
    return f"test {dataset['metric'].upper()} {sign} {metric(limit)}"


def metric(value: float | None) -> str:
    """Return a test metric: four decimals below ten, two above."""
    if value is None:
        return NEVER
    return f"{value:.4f}" if abs(value) < 10.0 else f"{value:.2f}"


def reaching_table(dataset: Found) -> Table:
    """Return what it costs each method to reach the centralised metric."""
    head = ["method", "epochs to 1 %", "to 0.1 %", "rounds", "MB", "computing, s"]
    head += [f"{network.name}, s" for network in PAPER_NETWORKS]
    rows = []
    for run in dataset["methods"].values():
        row = [run["title"], *_epochs(run)]
        cost = run.get("to-1%")
        if cost is None:
            row += [NEVER] * (len(head) - len(row))
        else:
            seconds = cost["communication-seconds"]
            row += [f"{cost['rounds']:,}", number(cost["bytes"] / MEGABYTE)]
            row += [number(cost["compute-seconds"])]
            row += [number(seconds[network.name]) for network in PAPER_NETWORKS]
        rows.append(row)
    return Table(
        f"What it costs to reach {goal(dataset)}",
        head,
        rows,
        "Within 1 % of the centralised linear model. Costs count from the start of the "
        "run, set-up included; computing is the server plus the slowest site; seconds "
        "of a network are latency times rounds plus bytes over bandwidth.",
    )


def _epochs(run: Found) -> list[str]:
    return [str(run[f"epochs-to-{share}"] or NEVER) for share in ("1%", "0.1%")]


def epoch_table(dataset: Found) -> Table:
    """Return what an epoch and the whole run took."""
    head = ["method", "rounds / epoch", "MB / epoch", "over the floor"]
    head += ["computing, s / epoch", "epochs", f"last {dataset['metric'].upper()}"]
    head += ["whole run, s", "peak, MiB"]
    rows = [
        [
            run["title"],
            f"{run['rounds-per-epoch']:,}",
            number(run["bytes-per-epoch"] / MEGABYTE),
            number(run["bytes-over-floor"]),
            number(run["compute-per-epoch"]),
            str(len(run["curve"]["metric"])),
            metric(run["last"]),
            number(run["seconds"]),
            number(run["peak-mib"]),
        ]
        for run in dataset["methods"].values()
    ]
    floor = number(dataset["floor"] / MEGABYTE)
    return Table(
        *("An epoch, and the whole run", head, rows),
        f"Floor: 4 bytes per row that takes part, up and down: {floor} MB. Peak memory "
        "is that of the server and all sites in one process, over the loaded tables.",
    )


def phases_table(dataset: Found) -> Table:
    """Return seconds by phase: server / slowest site / waiting."""
    runs = dataset["methods"].values()
    names = list(dict.fromkeys(name for run in runs for name in run["phases"]))
    rows = [
        [
            run["title"],
            *(
                " / ".join(f"{x:.2f}" for x in run["phases"][name])
                if name in run["phases"]
                else NEVER
                for name in names
            ),
        ]
        for run in runs
    ]
    return Table(
        "Seconds by phase: server / slowest site / waiting", ["method", *names], rows
    )


def baselines_table(dataset: Found) -> Table:
    """Return the models of the joined table."""
    optimum = ["optimum of the linear model", metric(dataset["reference"])]
    seconds = dataset["optimum-seconds"]
    rows = [[*optimum, "", number(seconds), ""]]
    for name, found in dataset["baselines"].items():
        if "missing" in found:
            rows.append([f"{name} ({found['missing']} is missing)", *[NEVER] * 4])
            continue
        rows.append(
            [
                name,
                metric(found["last"]),
                str(found["steps"]),
                number(found["seconds"]),
                number(found.get("seconds-to-1%")),
            ]
        )
    metric_name = f"test {dataset['metric'].upper()}"
    head = ["model", metric_name, "steps", "training, s", "to 1 %, s"]
    counts = [f"{count:,} {name}" for name, count in dataset["rows"].items()]
    train, test = dataset["joined-rows"]
    return Table(
        *("Trained on the joined table", head, rows),
        f"{' + '.join(counts)} rows give {train:,} joined rows to train on and "
        f"{test:,} to test, {dataset['features']} features. Join and encoding, "
        f"{number(dataset['join-seconds'])} s, come on top. L-BFGS ends within 0.1 %.",
    )


def dataset_tables(dataset: Found) -> list[Table]:
    """Return all tables of a data set."""
    make = (reaching_table, epoch_table, phases_table, baselines_table)
    return [table(dataset) for table in make]
