"""The page of a run: a pure function of reports, written beside `report.json`."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from strategies.report_page.blocks import Record
from strategies.report_page.convergence import convergence
from strategies.report_page.costs import costs, privacy
from strategies.report_page.model import model
from strategies.report_page.overview import head_of, result, settings, tables
from strategies.report_page.plots import STYLES
from strategies.report_page.style import STYLE
from tp_flower.errors import TPFlowerError
from tp_flower.reports.records import REPORT_FILE, write_whole

TEMPLATE = """\
{% macro anchor(title) %}{{ title | lower | replace(" ", "-") }}{% endmacro %}
{% macro word_class(table, column, cell="") %}
{% if column in table.words %} class="w{{ " long" if cell | length > 24 }}"{% endif %}
{% endmacro %}
{% macro show_table(table, is_data=False) %}
<div class="scroll{{ " data" if is_data }}" tabindex="0" role="region"
 aria-label="{{ table.title }}"><table>
<thead><tr>
{% for cell in table.head %}
<th scope="col"{{ word_class(table, loop.index0) }}>{{ cell }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for row in table.rows %}
<tr>
{%- for cell in row %}<td{{ word_class(table, loop.index0, cell) }}>{{ cell }}</td>
{%- endfor -%}
</tr>
{% endfor %}
</tbody></table></div>
{% endmacro %}
{% macro show_figure(figure) %}
<figure>
<figcaption><h3>{{ figure.title }}</h3>
{% if figure.note %}<p class="note">{{ figure.note }}</p>{% endif %}
{% if figure.legend %}
<ul class="legend">
{% for name in figure.legend %}
{% set style = loop.index0 % styles + 1 %}
<li class="s{{ style }}"><svg viewBox="0 0 26 10" aria-hidden="true">
{%- if figure.are_lines %}<line class="line d{{ style }}" x1="1" x2="25" y1="5" y2="5"/>
{%- else %}<rect class="bar" width="26" height="10"/>{% endif -%}
</svg><span>{{ name }}</span></li>
{% endfor %}
</ul>
{% endif %}
</figcaption>
{{ figure.svg }}
<details><summary>Data</summary>{{ show_table(figure.table, True) }}</details>
</figure>
{% endmacro %}
{% macro show_block(block) %}
{% if block.kind == "figure" %}
{{ show_figure(block) }}
{% elif block.kind == "prose" %}
<p class="prose">{{ block.text }}</p>
{% elif block.kind == "code" %}
<div class="block"><h3>{{ block.title }}</h3>
<pre class="code">
{%- for line in block.lines %}<code>{{ line }}</code>{% endfor -%}
</pre></div>
{% elif block.is_folded %}
<details class="block"><summary>{{ block.title }}</summary>
{{ show_table(block) }}</details>
{% else %}
<div class="block"><h3>{{ block.title }}</h3>
{% if block.note %}<p class="note">{{ block.note }}</p>{% endif %}
{{ show_table(block) }}</div>
{% endif %}
{% endmacro %}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ (head.label ~ " " ~ head.subject) | trim }}</title>
<style>{{ style | safe }}</style>
</head>
<body>
<header>
<p class="eyebrow">tp_flower{% if head.about %} · {{ head.about }}{% endif %}</p>
<h1>{% if head.label %}<code>{{ head.label }}</code> {% endif %}{{ head.subject }}</h1>
{% if head.result %}<p class="lead">{{ head.result }}</p>{% endif %}
{% if head.failure %}<p class="failure" role="alert">{{ head.failure }}</p>{% endif %}
<dl class="facts">
{% for fact in head.facts %}
<div><dt>{{ fact[0] }}</dt><dd class="value">{{ fact[1] }}</dd>
{% if fact[2] %}<dd class="more">{{ fact[2] }}</dd>{% endif %}</div>
{% endfor %}
</dl>
<nav aria-label="Contents">
{% for title in sections %}<a href="#{{ anchor(title) }}">{{ title }}</a>
{% endfor %}
</nav>
</header>
<main>
{% for title, blocks in sections.items() %}
<section id="{{ anchor(title) }}">
<h2>{{ title }}</h2>
{% for block in blocks %}{{ show_block(block) }}{% endfor %}
</section>
{% endfor %}
</main>
<footer>Made of report.json, which has every figure of this page.</footer>
</body>
</html>
"""


PAGE_FILE = "report.html"
MOST_BYTES = 1 << 28


class ReportError(TPFlowerError):
    """A report cannot be read."""


def render(report: Mapping[str, Any]) -> str:
    """Return the page of a `report.json` of any mode: one HTML file, no scripts."""
    record = Record(report)
    contents = {
        "Result": result(record),
        "Query and tables": tables(record),
        "Convergence": convergence(record),
        "Time and bytes": costs(record),
        "Model": model(record),
        "Privacy": privacy(record),
        "Settings": settings(record),
    }
    sections = {title: list(filter(None, blocks)) for title, blocks in contents.items()}
    return _template().render(
        head=head_of(record),
        sections={title: blocks for title, blocks in sections.items() if blocks},
        style=STYLE,
        styles=STYLES,
    )


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(TEMPLATE)


def write_page(folder: Path) -> Path:
    """Write `report.html` beside a folder's `report.json`, and return its path."""
    return write_whole(folder / PAGE_FILE, render(read_report(folder)))


def read_report(folder: Path) -> dict[str, Any]:
    """Return the report in a folder.

    Raises:
        ReportError: there is none, or it is no report.
    """
    file = folder / REPORT_FILE
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ReportError(f"{file} is larger than {MOST_BYTES} bytes: no report")
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ReportError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict) or "status" not in content:
        raise ReportError(f"{file} is no report of a run")
    return content
