"""Write docs/results.md from the figures of the benchmark.

    python scripts/bench/report/results_page.py FILE

FILE is a benchmark.json. It is copied to scripts/bench/results/, where its plots are
drawn anew, and the text between the two markers in docs/results.md and in README.md is
replaced. Without FILE the one in scripts/bench/results/ is taken.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from scripts.bench.report.coreset_tables import CORESET_SUITE, coreset_tables
from scripts.bench.report.plots import (
    DOTS_PER_INCH,
    MAIN_PANELS,
    MEGABYTE,
    plot_dataset,
)
from scripts.bench.report.tables import (
    NEVER,
    Table,
    facts_table,
    goal,
    measured,
    number,
)
from scripts.bench.results_file import RESULTS_FILE, read_results, write_results
from scripts.bench.suites.methods import ADMM_CLAIM, SGD_CLAIM, UCQ
from scripts.bench.suites.personal import CODE_NAMES, Z_STEP
from strategies.report_page.costs import US_UK
from tp_flower.reports.console import format_seconds

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "results.md"
README = ROOT / "README.md"
FOLDER = Path(__file__).resolve().parents[1] / "results"
BEGIN = "<!-- begin; written by scripts/bench/report/results_page.py, not by hand -->"
END = "<!-- end -->"

METHODS_SUITE = "methods"
TITLES: Mapping[str, str] = {
    "convergence": "How close to the centralised optimum, on flights",
    "bytes": "Bytes of an epoch, against the least that it could send",
    "speed": "Ten epochs on flights with set-up, against the way without tp_flower",
    "centralized": "To a good model, against training on the materialised join; the "
    "store has 2 million joined rows, 12.5 per item, of 54 features (narrow: 22)",
    "coreset": "Coresets: ridge regression and k-means on a few thousand of the joined "
    "rows, by importance (C) and uniform (U), mean of 20 samples",
    "encode": "A site encodes a CSV shard",
    "privacy": "Private models on flights; [PRIVACY.md](../PRIVACY.md) has more, and "
    "what epsilon does not cover",
    "movielens": "MovieLens-100K, against the authors' published code",
    "rounds": "Rounds of SGD",
    "simulation": "Rounds of SGD in Flower's simulation",
    "personal": "Personal models: updates of ten sites with 1,000 coefficients, whose "
    "order has a meaning (steps) or none, until the test loss is within 0.5 % of where "
    "float32 ends; Z-steps over a graph",
    "micro": "The parts that take the time",
    "linearity": "How cost grows with the joined rows",
    "paper-scale": "Tables of the papers' sizes (`--paper-scale DIR`)",
    "gpu": "With a GPU, at the papers' sizes (`--paper-scale DIR`)",
}
SHOWN_FACTS: Mapping[str, Sequence[str]] = {
    "speed": (
        "ten epochs: seconds",
        "ten epochs: peak-mib",
        "DuckDB + dense + scikit-learn: seconds",
        "DuckDB + dense + scikit-learn: peak-mib",
        "DuckDB + CSR + scikit-learn: seconds",
        "DuckDB + CSR + scikit-learn: peak-mib",
    ),
    "encode": (
        "rows",
        "a site: seconds",
        "a site: peak memory, MiB",
        "DuckDB's scan into numpy: seconds",
        "DuckDB's scan into numpy: peak memory, MiB",
    ),
    "privacy": (
        "ADMM, private statistics, no privacy: test AUC",
        "ADMM, private statistics, eps 1: test AUC",
        "ADMM, private statistics, eps 8: test AUC",
        "ADMM, DP-SGD, eps 1: test AUC",
        "SGD, DP-SGD, eps 1: test AUC",
    ),
    "movielens": ("times faster than published",),
    "centralized": (
        "flights: tp-flower: seconds",
        "flights: join, CSR, L-BFGS: seconds",
        "store: tp-flower: seconds",
        "store: tp-flower: peak-mib",
        "store: join, dense, SGD: seconds",
        "store: join, dense, scikit-learn: peak-mib",
        "narrow store: time over the least without tp_flower",
        "narrow store: memory over the least without tp_flower",
    ),
    "personal": tuple(
        f"{name}, {code}: bytes to the test loss over float32's"
        for name in ("steps", "no order")
        for code in CODE_NAMES
    )
    + tuple(
        f"{Z_STEP}, p = {norm}, {kind}: one core, seconds"
        for norm in ("1", "inf")
        for kind in ("cold", "warm")
    ),
    "rounds": (
        "rounds per second, 2 sites",
        "rounds per second, 8 sites",
        "rounds per epoch without staleness",
    ),
    "paper-scale": (
        "yelp, factor 1: joined-rows",
        "yelp, factor 1: set-up-seconds",
        "yelp, factor 1: epoch-seconds",
        "yelp, factor 1: floor-seconds",
    ),
}
"""Figures without a limit that are shown, if the suite has them."""

SUMMARY: Sequence[tuple[str, str, str]] = (
    (
        "flights, 10 epochs of ADMM and set-up: time over DuckDB and scikit-learn",
        "speed",
        "10 epochs over DuckDB + encoding + scikit-learn, time",
    ),
    ("the same: peak memory", "speed", "the same, peak memory"),
    (
        "store, 2 million joined rows: time over the fastest way with a join",
        "centralized",
        "store: time over the least without tp_flower",
    ),
    (
        "flights, ADMM: epochs to 0.1 % of the optimum on the joined table",
        "convergence",
        "classification, ADMM: epochs to 0.1% of the optimum",
    ),
    (
        "bytes that an epoch sends up, over one number per row",
        "bytes",
        "join-only ADMM, an epoch's bytes up over the floor",
    ),
    (
        "flights, test AUC lost at epsilon 1 (features of a table)",
        "privacy",
        "ADMM, private statistics: AUC lost at epsilon 1",
    ),
    (
        "flights, ridge on 2,000 of 217,338 rows: loss over that of all rows",
        "coreset",
        "Flights, minutes late, Central: C(2000) over all rows",
    ),
    (
        "a site encodes a CSV of 1M x 60: peak memory over DuckDB and numpy's",
        "encode",
        "a site's peak memory over DuckDB + numpy's",
    ),
    (
        "time of an epoch by joined rows: slope, log over log",
        "linearity",
        "store, epoch: slope of log time over log rows",
    ),
)
"""Rows of the README's table: what it says, the suite, and the figure's name."""

MOST_FACTS = 16

Found = Mapping[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Write section, plots and the copy of the file; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        default=FOLDER / RESULTS_FILE,
        metavar="FILE",
        help=f"a {RESULTS_FILE} (default: the one in scripts/bench/results/)",
    )
    file = parser.parse_args(arguments).file
    try:
        results = read_results(file)
    except (OSError, ValueError) as error:
        parser.error(f"{str(file)!r} is no {RESULTS_FILE}: {error}")
    write_results(FOLDER / RESULTS_FILE, results)
    for old in FOLDER.glob("*.png"):
        old.unlink()
    for name, dataset in datasets_of(results).items():
        figure = plot_dataset(dataset, MAIN_PANELS)
        figure.savefig(FOLDER / image_name(name), dpi=DOTS_PER_INCH)
    for path, section in ((PAGE, render(results)), (README, summary(results))):
        text = path.read_text(encoding="utf-8")
        path.write_text(with_section(text, section), encoding="utf-8")
    print(f"{PAGE.name} has the results of {len(results['suites'])} suites")
    return 0


def with_section(page: str, section: str) -> str:
    """Return the page with the text between the markers replaced.

    Raises:
        ValueError: the markers are not there, once each and in order.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page needs one {BEGIN!r} and one {END!r}")
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{END!r} stands before {BEGIN!r}")
    return f"{before}{BEGIN}\n\n{section}\n\n{END}{after}"


def render(results: Found) -> str:
    """Return the section in Markdown, without markers."""
    suites = results["suites"]
    blocks = [_introduction(suites)]
    datasets = datasets_of(results)
    if datasets:
        blocks += _methods_blocks(datasets, suites[METHODS_SUITE]["checks"])
    others = [name for name in suites if name != METHODS_SUITE]
    # in the order of the titles, whichever suite was measured last
    order = {name: place for place, name in enumerate(TITLES)}
    others.sort(key=lambda name: order.get(name, len(order)))
    for name in others:
        blocks.append(suite_block(name, suites[name]))
        if name == CORESET_SUITE:
            blocks += coreset_blocks(suites[name]["facts"])
    return "\n\n".join(blocks)


def summary(results: Found) -> str:
    """Return the README's table, of the figures that ``SUMMARY`` names."""
    rows = []
    for text, suite, name in SUMMARY:
        checks = {check["name"]: check for check in results["suites"][suite]["checks"]}
        figure = checks[name]
        rows.append([text, measured(figure["measured"], figure["unit"])])
    return Table("", ["", "measured"], rows).markdown()


def datasets_of(results: Found) -> Found:
    """Return the data sets of suite ``methods``."""
    suite: Found = results["suites"].get(METHODS_SUITE, {"facts": {}})
    facts: Found = suite["facts"]
    return facts


def image_name(dataset: str) -> str:
    """Return the file of a data set's plot."""
    return f"methods-{dataset}.png"


def _introduction(suites: Found) -> str:
    seconds = sum(suite["seconds"] for suite in suites.values())
    places = dict.fromkeys(_place(suite) for suite in suites.values())
    return (
        f"Measured on {', and on '.join(places)}, with default settings unless a line "
        f"says otherwise.\n`python scripts/benchmark.py --movielens DIR` measures all "
        f"of it ({format_seconds(seconds)}; DIR has the official MovieLens-100K files) "
        "and writes a page\nwith every figure and plot; `--suite NAME` measures one "
        "block. `python scripts/bench/report/results_page.py FILE` writes this "
        "section from its JSON."
    )


def _place(suite: Found) -> str:
    machine = suite["machine"]
    return (
        f"{suite['date']} on {machine['cores']} cores ({machine['processor']}, "
        f"{machine['memory-gib']} GiB)"
    )


def _methods_blocks(datasets: Found, checks: Sequence[Found]) -> Iterator[str]:
    found = {check["name"]: check for check in checks}
    yield (
        "**What a good model costs** (`--suite methods`): epochs, megabytes and "
        f"seconds of modelled communication ({US_UK.name}: "
        f"{1000 * US_UK.round_seconds:.0f} ms per round,\n"
        f"{US_UK.bits_per_second / 1e9:g} Gb/s), set-up included, until the test "
        "metric is within 1 % of the centralised linear model's. VFL is the same on "
        "the vertical\npartitions of the joined table, GD takes full-batch steps, UCQ "
        "has every table in two shards."
    )
    yield methods_table(datasets, found).markdown()
    for name, dataset in datasets.items():
        title = dataset["title"]
        alt = f"{title}: test metric by epoch, communication, bytes and computing"
        yield (
            f"![{alt}](../scripts/bench/results/{image_name(name)})\n"
            f"*{title}. Redo: `python scripts/benchmark.py --suite methods --datasets "
            f"{name}{' --movielens DIR' if name == 'movielens' else ''}`*"
        )


def methods_table(datasets: Found, checks: Found) -> Table:
    """Return methods by data sets, and the papers' claims below."""
    head = ["", *(f"{data['title']}: {goal(data)}" for data in datasets.values())]
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
            cells = [_ratio(checks.get(name)) for name in names]
            rows.append([f"UCQ: {claim}" if of else claim, *cells])
    return Table("", head, [row for row in rows if {*row[1:]} != {NEVER}])


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


def suite_block(name: str, suite: Found) -> str:
    """Return title and figures of a suite; a figure beyond its limit is bold."""
    rows = [
        [
            check["name"],
            _marked(measured(check["measured"], check["unit"]), check["is-met"]),
            measured(check["limit"], check["unit"]),
        ]
        for check in suite["checks"]
    ]
    facts = {row[0]: row[1] for row in facts_table(suite).rows}
    # a suite without limits has nothing else to show
    shown = SHOWN_FACTS.get(name, () if rows else tuple(facts)[:MOST_FACTS])
    rows += [[fact, facts[fact], ""] for fact in shown if fact in facts]
    title = TITLES.get(name, f"Suite {name}")
    table = Table(title, ["", "measured", "at most"], rows)
    return f"**{title}** (`--suite {name}`)\n\n{table.markdown()}"


def coreset_blocks(facts: Found) -> Iterator[str]:
    """Yield a table per data set and problem."""
    for table in coreset_tables(facts):
        yield f"*{table.title}*\n\n{table.markdown()}\n\n{table.note}"


def _marked(figure: str, is_met: bool) -> str:
    return figure if is_met else f"**{figure}**"


if __name__ == "__main__":
    mpl.use("agg")
    sys.exit(main(sys.argv[1:]))
