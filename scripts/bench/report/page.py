"""One page with everything that the benchmark found; it needs no other file."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from matplotlib.figure import Figure

from scripts.bench.report.coreset_tables import CORESET_SUITE, coreset_tables
from scripts.bench.report.plots import DOTS_PER_INCH, figures_of
from scripts.bench.report.tables import Table, checks_table, dataset_tables, facts_table

TEMPLATE = "benchmark.html.jinja"
PAGE_FILE = "benchmark.html"
METHODS_SUITE = "methods"

Results = Mapping[str, Any]


def render_page(results: Results, figures: Mapping[str, tuple[str, Figure]]) -> str:
    """Return the page as HTML."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    images = {
        name: {"title": title, "data": _base64(figure)}
        for name, (title, figure) in figures.items()
    }
    suites = results["suites"]
    datasets = suites.get(METHODS_SUITE, {"facts": {}})["facts"]
    content = {
        "failed": results["failed"],
        "datasets": [
            {
                "name": name,
                "title": dataset["title"],
                "settings": dataset["settings"],
                "failed": dataset["failed"],
                "tables": dataset_tables(dataset),
                "images": [
                    images[key]
                    for key in (f"methods-{name}", f"methods-{name}-networks")
                ],
            }
            for name, dataset in datasets.items()
        ],
        "suites": [
            {
                "name": name,
                "suite": suite,
                "tables": suite_tables(name, suite),
                "images": [
                    images[key]
                    for key in images
                    if key.startswith(f"{name}-") and name != METHODS_SUITE
                ],
            }
            for name, suite in suites.items()
        ],
    }
    return environment.get_template(TEMPLATE).render(content)


def suite_tables(name: str, suite: Results) -> list[Table]:
    """Return the tables of a suite; data sets have theirs in places of their own."""
    tables = [checks_table(suite)]
    if name == CORESET_SUITE:
        tables += coreset_tables(suite["facts"])
    elif name != METHODS_SUITE:
        tables.append(facts_table(suite))
    return [table for table in tables if table.rows]


def write_page(folder: Path, results: Results) -> None:
    """Write the page and every plot as a PNG."""
    figures = figures_of(results)
    for name, (_, figure) in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=DOTS_PER_INCH)
    page = render_page(results, figures)
    (folder / PAGE_FILE).write_text(page, encoding="utf-8")


def _base64(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH)
    return base64.b64encode(buffer.getvalue()).decode("ascii")
