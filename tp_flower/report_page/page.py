"""The page: a pure function of reports."""

from collections.abc import Sequence
from functools import cache
from itertools import groupby

from jinja2 import Environment, StrictUndefined, Template

from tp_flower.report_page.blocks import Block, Section
from tp_flower.report_page.comparison import comparison
from tp_flower.report_page.contributions import contributions
from tp_flower.report_page.convergence import convergence
from tp_flower.report_page.coreset import coreset
from tp_flower.report_page.costs import costs
from tp_flower.report_page.explained import predicted_costs
from tp_flower.report_page.line_plot import STYLES
from tp_flower.report_page.model_run import model_run
from tp_flower.report_page.overview import head_of, result
from tp_flower.report_page.personal import personal
from tp_flower.report_page.privacy import privacy
from tp_flower.report_page.reading import Report
from tp_flower.report_page.settings_table import settings
from tp_flower.report_page.style import STYLE
from tp_flower.report_page.tables import tables
from tp_flower.report_page.template import TEMPLATE


def render(report: Report, others: Sequence[Report] = ()) -> str:
    """Return the page of a run: HTML that needs no other file and no script.

    Args:
        report: the content of a `report.json`, of any mode; what it lacks is left out.
        others: of other runs to compare it with.
    """
    sections = [
        result(report),
        model_run(report),
        tables(report),
        coreset(report),
        predicted_costs(report),
        convergence(report),
        costs(report),
        personal(report),
        contributions(report),
        privacy(report),
        comparison(report, others),
        settings(report),
    ]
    return _template().render(
        head=head_of(report),
        sections=[section for section in sections if section.blocks],
        style=STYLE,
        styles=STYLES,
    )


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["grouped"] = _grouped
    return environment.from_string(TEMPLATE)


def _grouped(section: Section) -> list[tuple[str, list[Block]]]:
    """Return the blocks with those of a kind that follow each other together."""
    groups = groupby(section.blocks, key=lambda block: block.kind)
    return [(kind, list(blocks)) for kind, blocks in groups]
