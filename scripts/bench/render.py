"""The results as Markdown tables and plots: the results page, and the README's table.

`write_docs` copies a `benchmark.json` to scripts/bench/results/, draws its plots anew
there, and replaces the text between the two markers in docs/results.md and README.md.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from scripts.bench.harness import RESULTS_FILE, Results, write_results
from scripts.bench.processes import ROOT
from scripts.bench.suites.methods import (
    ADMM_CLAIM,
    HIGHER_IS_BETTER,
    SGD_CLAIM,
    TOLERANCE,
    UCQ,
    US_UK,
)
from tp_flower.reports.console import format_seconds

PAGE: Final = ROOT / "docs" / "results.md"
README: Final = ROOT / "README.md"
FOLDER: Final = ROOT / "scripts" / "bench" / "results"
DECLARED: Final = tomllib.loads(
    (ROOT / "scripts" / "bench" / "results_page.toml").read_text(encoding="utf-8")
)
BEGIN: Final = "<!-- begin; written by scripts/benchmark.py --render, not by hand -->"
END: Final = "<!-- end -->"

NEVER: Final = "-"
MEGABYTE: Final = 1e6
MOST_FACTS: Final = 16
DOTS_PER_INCH: Final = 110
SHOWN_EPOCHS: Final = 12

Found = Mapping[str, Any]
Rows = Sequence[Sequence[str]]


def write_docs(results: Results) -> None:
    """Write the committed file, its plots, the page and the README's table."""
    write_results(FOLDER / RESULTS_FILE, results)
    for old in FOLDER.glob("*.png"):
        old.unlink()
    write_plots(FOLDER, results)
    page, table = render(results, "../scripts/bench/results/"), summary(results)
    for path, section in ((PAGE, page), (README, table)):
        text = path.read_text(encoding="utf-8")
        path.write_text(with_section(text, section), encoding="utf-8")


def with_section(page: str, section: str) -> str:
    """Return the page with the text between its markers, which it must have, new."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page needs one {BEGIN!r} and one {END!r}")
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{END!r} stands before {BEGIN!r}")
    return f"{before}{BEGIN}\n\n{section}\n\n{END}{after}"


def markdown(head: Sequence[str], rows: Rows) -> str:
    r"""Return a table in Markdown.

    >>> print(markdown(["", "a"], [["x|y", "1"]]))
    |  | a |
    |---|---:|
    | x\|y | 1 |
    """
    cells = [[cell.replace("|", "\\|") for cell in line] for line in (head, *rows)]
    first, *lines = (f"| {' | '.join(line)} |" for line in cells)
    return "\n".join([first, f"|---|{'---:|' * (len(head) - 1)}", *lines])


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


def facts_of(facts: Found) -> dict[str, str]:
    """Return figures without a limit as texts, nested ones by their path."""
    return dict(_flat("", facts))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{prefix}: {key}" if prefix else str(key), item)
    elif isinstance(value, list):
        yield prefix, ", ".join(text for item in value for _, text in _flat("", item))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield prefix, number(value, 4)
    else:
        yield prefix, NEVER if value is None else str(value)


def render(results: Results, images: str = "") -> str:
    """Return the section of the results page; ``images`` is the plots' folder."""
    suites = results["suites"]
    blocks = [_introduction(suites)] if suites else []
    blocks += [f"Suite {name} failed: {x}" for name, x in results["failed"].items()]
    # whichever suite was measured last
    for name in dict.fromkeys([*DECLARED["suites"], *suites]):
        if name == "methods" and name in suites:
            blocks += _methods_blocks(suites[name], images)
        elif name in suites:
            blocks.append(suite_block(name, suites[name]))
        if name == "coreset" and name in suites:
            for title, table, note in coreset_tables(suites[name]["facts"]):
                blocks.append(f"*{title}*\n\n{table}\n\n{note}")
    return "\n\n".join(blocks)


def summary(results: Results) -> str:
    """Return the README's table."""
    rows = []
    for row in DECLARED["readme"]:
        checks = results["suites"][row["suite"]]["checks"]
        figure = next(check for check in checks if check["name"] == row["figure"])
        rows.append([row["text"], measured(figure["measured"], figure["unit"])])
    return markdown(["", "measured"], rows)


def _introduction(suites: Found) -> str:
    seconds = sum(suite["seconds"] for suite in suites.values())
    places = dict.fromkeys(
        f"{suite['date']} on {suite['machine']['cores']} cores "
        f"({suite['machine']['processor']}, {suite['machine']['memory-gib']} GiB)"
        for suite in suites.values()
    )
    return (
        f"Measured on {', and on '.join(places)}, with default settings unless a line "
        f"says otherwise.\n`python scripts/benchmark.py --movielens DIR` measures all "
        f"of it ({format_seconds(seconds)}; DIR has the official MovieLens-100K files) "
        "and writes a page\nlike this; `--suite NAME` measures one block. `--render "
        "FILE` writes this section from a benchmark.json."
    )


def suite_block(name: str, suite: Found) -> str:
    """Return title and figures of a suite; a figure beyond its limit is bold."""
    rows = []
    for check in suite["checks"]:
        figure = measured(check["measured"], check["unit"])
        limit = measured(check["limit"], check["unit"])
        rows.append([check["name"], _bold(figure, not check["is-met"]), limit])
    facts = facts_of(suite["facts"])
    declared = DECLARED["suites"].get(name, {"title": f"Suite {name}"})
    # a suite without limits has nothing else to show
    names = declared.get("shown", [] if rows else list(facts)[:MOST_FACTS])
    rows += [[fact, facts[fact], ""] for fact in names if fact in facts]
    title = declared["title"]
    table = markdown(["", "measured", "at most"], rows)
    return f"**{title}** (`--suite {name}`)\n\n{table}"


def _bold(text: str, is_bold: bool) -> str:
    return f"**{text}**" if is_bold else text


def _methods_blocks(suite: Found, images: str) -> Iterator[str]:
    yield (
        "**What a good model costs** (`--suite methods`): epochs, megabytes and "
        f"seconds of modelled communication ({US_UK.name}: "
        f"{1000 * US_UK.round_seconds:.0f} ms per round,\n"
        f"{US_UK.bits_per_second / 1e9:g} Gb/s), set-up included, until the test "
        "metric is within 1 % of the centralised linear model's. VFL is the same on "
        "the vertical\npartitions of the joined table, GD takes full-batch steps, UCQ "
        "has every table in two shards."
    )
    yield markdown(*methods_table(suite["facts"], suite["checks"]))
    for name, dataset in suite["facts"].items():
        title = dataset["title"]
        yield (
            f"![{title}: test metric by epoch, communication, bytes and computing]"
            f"({images}{image_name(name)})\n"
            f"*{title}. Redo: `python scripts/benchmark.py --suite methods --datasets "
            f"{name}{' --movielens DIR' if name == 'movielens' else ''}`*"
        )


def methods_table(
    datasets: Found, checks: Sequence[Found]
) -> tuple[list[str], list[list[str]]]:
    """Return head and rows: methods by data sets, and the papers' claims below."""
    by_name = {check["name"]: check for check in checks}
    titles = {
        method: run["title"]
        for data in datasets.values()
        for method, run in data["methods"].items()
    }
    rows = [
        [title, *(_cost(data["methods"].get(method)) for data in datasets.values())]
        for method, title in titles.items()
    ]
    for of in ("", UCQ):
        for claim in (ADMM_CLAIM, SGD_CLAIM):
            names = [f"{data['title']}{of}: {claim}" for data in datasets.values()]
            cells = [_ratio(by_name.get(name)) for name in names]
            rows.append([f"UCQ: {claim}" if of else claim, *cells])
    goals = [f"{data['title']}: {goal(data)}" for data in datasets.values()]
    return ["", *goals], [row for row in rows if {*row[1:]} != {NEVER}]


def goal(dataset: Found) -> str:
    """Return what a method has to reach, as in ``"test AUC >= 0.6953"``."""
    is_higher = dataset["metric"] in HIGHER_IS_BETTER
    limit = dataset["reference"] * (1.0 + (-TOLERANCE if is_higher else TOLERANCE))
    digits = 4 if abs(limit) < 10.0 else 2
    sign = ">=" if is_higher else "<="
    return f"test {dataset['metric'].upper()} {sign} {limit:.{digits}f}"


def _cost(run: Found | None) -> str:
    if run is None:
        return NEVER
    cost = run.get("to-1%")
    if cost is None:
        return f"not in {len(run['curve']['metric'])} epochs"
    epochs = run["epochs-to-1%"]
    seconds = cost["communication-seconds"][US_UK.name]
    return (
        f"{epochs} {'epoch' if epochs == 1 else 'epochs'}, "
        f"{number(cost['bytes'] / MEGABYTE)} MB, {number(seconds)} s"
    )


def _ratio(check: Found | None) -> str:
    if check is None:
        return NEVER
    value = check["measured"]
    if not check["is-met"]:
        return f"**{number(value) if value is not None else 'not reached'}**"
    return "1 (tie)" if value == 1.0 else number(value)


def coreset_tables(facts: Found) -> Iterator[tuple[str, str, str]]:
    """Yield title, table and note of each data set and problem: sizes by methods."""
    for data in facts.values():
        train, test = data["joined-rows"]
        title = f"{data['title']}, ridge regression: squared error on held-out rows"
        yield title, _sizes(data["ridge"], train), _runs(data["ridge"])
        title = f"{data['title']}, k-means: mean squared distance, all joined rows"
        yield title, _sizes(data["kmeans"], train + test), _runs(data["kmeans"])


def _sizes(problem: Found, total: int) -> str:
    """Return sizes by methods: cost, deviation over the samples, and units sent."""
    sizes, full = problem["sizes"], problem["full"]
    of_kind = [next(name for name in sizes if name[0] == kind) for kind in "CU"]
    rows = []
    for size in next(iter(sizes.values())):
        cells = [by_size[size] for by_size in sizes.values()]
        costs = [f"{number(c['mean'], 5)} ± {number(c['std'], 2)}" for c in cells]
        units = [number(sizes[name][size]["units"], 4) for name in of_kind]
        rows.append([f"{int(size):,}", *costs, *units])
    costs = [number(full[name.partition("-")[2]], 5) for name in sizes]
    rows.append([f"all {total:,}", *costs, *[number(problem["full-units"], 4)] * 2])
    return markdown(["rows", *sizes, "units, C", "units, U"], rows)


def _runs(problem: Found) -> str:
    by_importance, uniform = problem["runs"]["C"], problem["runs"]["U"]
    choice, rows, other = (
        number(by_importance[f"{name}_bytes"] / MEGABYTE)
        for name in ("choice", "row", "other")
    )
    return (
        f"A run with 2,000 rows sends {choice} MB to choose them, {rows} MB of rows "
        f"({number(uniform['row_bytes'] / MEGABYTE)} MB uniform), and {other} MB that "
        "every method over a join sends: alignment, statistics, scores of evaluation. "
        f"Its cost is {number(by_importance['cost'], 5)} "
        f"(uniform {number(uniform['cost'], 5)})."
    )


# Okabe and Ito's colours, which the colour-blind tell apart; markers tell them in grey
STYLES: Mapping[str, tuple[str, str, str]] = {
    "gd": ("#767676", "D", "-."),
    "vfl-admm": ("#56B4E9", "s", "--"),
    "vfl-sgd": ("#E69F00", "s", "--"),
    "ucq-admm": ("#004C78", "^", ":"),
    "ucq-sgd": ("#8F3F00", "^", ":"),
    "admm": ("#0072B2", "o", "-"),
    "sgd": ("#D55E00", "o", "-"),
}
"""In the order of drawing: twins lie on each other, the wider one beneath."""
WIDE = ("vfl-admm", "vfl-sgd")
METRIC_NAMES = {"auc": "test AUC", "rmse": "test RMSE"}

Curve = Mapping[str, "np.ndarray[Any, Any]"]
EPOCH = "epoch"
PANELS: Mapping[str, Callable[[Curve], Any]] = {
    EPOCH: lambda curve: range(1, len(curve["metric"]) + 1),
    f"modelled communication, s\n({US_UK.name}: {1000 * US_UK.round_seconds:.0f} ms, "
    f"{US_UK.bits_per_second / 1e9:.3g} Gb/s)": lambda curve: (
        curve["rounds"] * US_UK.seconds(1, 0) + US_UK.seconds(0, 1) * curve["bytes"]
    ),
    "megabytes sent": lambda curve: curve["bytes"] / MEGABYTE,
    "computing, s (server + slowest site)": lambda curve: (
        curve["server-seconds"] + curve["client-seconds"]
    ),
}
"""The x-axis of a plot by its title; all but the epoch are on a log scale."""


def image_name(dataset: str) -> str:
    """Return the file of a data set's plot."""
    return f"methods-{dataset}.png"


def write_plots(folder: Path, results: Results) -> None:
    """Write the plot of every data set that methods were compared on."""
    suite = results["suites"].get("methods", {"facts": {}})
    for name, dataset in suite["facts"].items():
        plot(dataset).savefig(folder / image_name(name), dpi=DOTS_PER_INCH)


def plot(dataset: Found, columns: int = 2) -> Figure:
    """Return the test metric of all methods against what it cost."""
    rows = -(-len(PANELS) // columns)
    figure = Figure(figsize=(4.9 * columns, 3.1 * rows + 0.9), layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False).ravel()
    curves: dict[str, Curve] = {
        method: {key: np.array(x, float) for key, x in run["curve"].items()}
        for method, run in dataset["methods"].items()
    }
    limits = metric_limits(dataset, curves)
    for axes, (title, costs) in zip(all_axes, PANELS.items(), strict=True):
        for name, (colour, marker, line) in STYLES.items():
            if name not in curves:
                continue
            wide = name in WIDE
            axes.plot(
                *(costs(curves[name]), curves[name]["metric"]),
                label=dataset["methods"][name]["title"],
                color=colour,
                marker=marker,
                linestyle=line,
                markersize=7.0 if wide else 4.0,
                linewidth=3.0 if wide else 1.5,
            )
        _decorate(axes, title, dataset)
        axes.set_ylim(*limits)
    for axes in all_axes[::columns]:
        axes.set_ylabel(METRIC_NAMES.get(dataset["metric"], dataset["metric"]))
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(dataset["title"], fontsize=13, fontweight="bold")
    return figure


def metric_limits(dataset: Found, curves: Mapping[str, Curve]) -> tuple[float, float]:
    """Return the range of the metric that is worth showing.

    From a little beyond the best value to a guess that knows no feature; where epochs
    are worse than that, they leave the diagram.
    """
    metrics = [curve["metric"] for curve in curves.values()]
    values = np.concatenate([[dataset["reference"]], *metrics])
    low, high, guess = np.nanmin(values), np.nanmax(values), dataset["guess"]
    is_higher = dataset["metric"] in HIGHER_IS_BETTER
    low, high = (max(low, guess), high) if is_higher else (low, min(high, guess))
    margin = 0.06 * (high - low) or 0.01 * abs(low)
    return float(low - margin), float(high + margin)


def _decorate(axes: Axes, title: str, dataset: Found) -> None:
    reference = dataset["reference"]
    sign = -1.0 if dataset["metric"] in HIGHER_IS_BETTER else 1.0
    axes.axhline(reference, color="black", linewidth=0.9, label="centralised optimum")
    edge = (1.0 + sign * TOLERANCE) * reference
    if title == EPOCH:
        steps = dataset["baselines"].get("SGD", {}).get("metric", [])
        epochs, dotted = range(1, len(steps) + 1), (0, (1, 2))
        label = "centralised SGD"
        axes.plot(epochs, steps, color="black", linestyle=dotted, label=label)
        axes.set_xlim(0.6, SHOWN_EPOCHS + 0.4)
        axes.set_xticks(range(1, SHOWN_EPOCHS + 1))
    else:
        axes.set_xscale("log")
        # numbers that can be read at a glance
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    low, high = sorted((reference, edge))
    axes.axhspan(low, high, color="#009E73", alpha=0.13, label="within 1 %")
    axes.set_xlabel(title)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
