"""The results as Markdown tables and plots: the results page, and the README's table.

`write_docs` copies a `benchmark.json` to scripts/bench/results/, draws its plots anew
there, and replaces the text between the two markers in docs/results.md and README.md.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.bench.harness import RESULTS_FILE, Results, write_results
from scripts.bench.processes import ROOT
from scripts.bench.suites.methods import (
    CG_CLAIM,
    HIGHER_IS_BETTER,
    SGD_CLAIM,
    UCQ,
    US_UK,
    worst_within,
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
CHECKED: Final = ("", "measured", "at most")
DOTS_PER_INCH: Final = 110
IMAGE: Final = "methods.png"
IMAGE_TEXT: Final = "Test metric by modelled communication, each data set"

Found = Mapping[str, Any]
Rows = Sequence[Sequence[str]]


def write_docs(results: Results) -> None:
    """Write the committed file, its plots, the page and the README's table."""
    write_results(FOLDER / RESULTS_FILE, results)
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
    flat = pd.json_normalize(dict(facts), sep=": ").to_dict("records")
    return {
        str(name): _text(value) for record in flat for name, value in record.items()
    }


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return number(value, 4) if is_number else str(value or NEVER)


def render(results: Results, images: str = "") -> str:
    """Return the section of the results page; ``images`` is the plots' folder."""
    suites = results["suites"]
    blocks = [_introduction(suites)] if suites else []
    blocks += [f"Suite {name} failed: {x}" for name, x in results["failed"].items()]
    # whichever suite was measured last
    for name in dict.fromkeys([*DECLARED["suites"], *suites]):
        if name == "methods" and name in suites:
            declared, suite = DECLARED["suites"][name], suites[name]
            blocks.append(
                f"**{declared['title']}** (`--suite {name}`): {declared['text']}"
            )
            blocks.append(markdown(*methods_table(suite["facts"], suite["checks"])))
            blocks.append(f"![{IMAGE_TEXT}]({images}{IMAGE})")
        elif name in suites:
            blocks.append(suite_block(name, suites[name]))
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
    """Return title and figures of a suite; a figure beyond its limit is bold.

    A suite whose declaration has ``columns`` has a table of its facts, a record in each
    row, and then only the checks that are beyond their limits.
    """
    declared = DECLARED["suites"].get(name, {"title": f"Suite {name}"})
    title = f"**{declared['title']}** (`--suite {name}`)"
    if columns := declared.get("columns"):
        missed = [_check_row(x) for x in suite["checks"] if not x["is-met"]]
        table = records_table(suite["facts"], columns)
        blocks = [f"{title}: {declared['text']}", table]
        return "\n\n".join(blocks + [markdown(CHECKED, missed)] * bool(missed))
    rows = [_check_row(check) for check in suite["checks"]]
    facts = facts_of(suite["facts"])
    # a suite without limits has nothing else to show
    names = declared.get("shown", [] if rows else list(facts)[:MOST_FACTS])
    labels = (
        names if isinstance(names, Mapping) else dict(zip(names, names, strict=True))
    )
    rows += [[text, facts[x], ""] for text, x in labels.items() if x in facts]
    return f"{title}\n\n{markdown(CHECKED, rows)}"


def _check_row(check: Found) -> list[str]:
    figure = measured(check["measured"], check["unit"])
    limit = measured(check["limit"], check["unit"])
    return [check["name"], figure if check["is-met"] else f"**{figure}**", limit]


def records_table(records: Found, columns: Mapping[str, str]) -> str:
    """Return figures that have a record for each row, by heading of their columns."""
    rows = [
        [name, *(number(record.get(key), 4) for key in columns.values())]
        for name, record in records.items()
    ]
    return markdown(["", *columns], rows)


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
        for claim in (CG_CLAIM, SGD_CLAIM):
            names = [f"{data['title']}{of}: {claim}" for data in datasets.values()]
            cells = [_ratio(by_name.get(name)) for name in names]
            rows.append([f"UCQ: {claim}" if of else claim, *cells])
    goals = [f"{data['title']}: {goal(data)}" for data in datasets.values()]
    return ["", *goals], [row for row in rows if {*row[1:]} != {NEVER}]


def goal(dataset: Found) -> str:
    """Return what a method has to reach, as in ``"test AUC >= 0.6953"``."""
    limit = worst_within(dataset["metric"], dataset["reference"])
    digits = 4 if abs(limit) < 10.0 else 2
    sign = ">=" if dataset["metric"] in HIGHER_IS_BETTER else "<="
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


def write_plots(folder: Path, results: Results) -> None:
    """Write the plot of the methods, if they were compared."""
    if "methods" in results["suites"]:
        figure = plot(results["suites"]["methods"]["facts"])
        figure.savefig(folder / IMAGE, dpi=DOTS_PER_INCH)


def plot(datasets: Found) -> Figure:
    """Return the test metric of all methods against modelled communication."""
    figure = Figure(figsize=(9.8, 7.1), layout="constrained")
    all_axes = figure.subplots(-(-len(datasets) // 2), 2, squeeze=False).ravel()
    for axes, data in zip(all_axes, datasets.values(), strict=False):
        for name, (colour, marker, line) in STYLES.items():
            run = data["methods"].get(name)
            if run is None:
                continue
            curve = {key: np.array(x, float) for key, x in run["curve"].items()}
            seconds = US_UK.seconds(curve["rounds"], curve["bytes"])
            width = 3.0 if name.startswith("vfl") else 1.5
            axes.plot(
                *(seconds, curve["metric"], f"{marker}{line}"),
                color=colour,
                label=run["title"],
                linewidth=width,
                markersize=2.0 * width,
            )
        _decorate(axes, data)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    return figure


def _decorate(axes: Axes, data: Found) -> None:
    optimum = data["reference"]
    label = "centralised optimum"
    axes.axhline(optimum, color="black", linewidth=0.9, label=label)
    low, high = sorted((optimum, worst_within(data["metric"], optimum)))
    axes.axhspan(low, high, color="#009E73", alpha=0.13, label="within 1 %")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel(f"modelled communication, s ({US_UK.name})")
    axes.set_ylabel(f"test {data['metric'].upper()}")
    axes.set_title(data["title"])
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
