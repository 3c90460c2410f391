"""One HTML file of sections of tables, figures and texts, without scripts."""

from collections.abc import Mapping
from functools import cache
from typing import Final

from jinja2 import Environment, StrictUndefined, Template

from tp_flower.reports.blocks import Blocks

STYLES: Final = 8
"""Styles of lines and bars that a reader can tell apart."""

# Eight colours that colour-blind readers can tell apart, too (after Okabe and Ito),
# dark or light enough for a contrast of 3 to the background; a test measures it.
LIGHT = """--bg: #fcfcfb; --fg: #1b1d20; --soft: #5b6068; --rule: #e0e1e4;
  --panel: #f3f3f1; --accent: #0b62a8; --bad: #a3230f; --shade: #0002;
  --s1: #0b62a8; --s2: #c44e00; --s3: #00805c; --s4: #a83f83;
  --s5: #8a6500; --s6: #3b8ec4; --s7: #5a5f66; --s8: #7a4fc9;"""
DARK = """--bg: #15171a; --fg: #e7e8ea; --soft: #a4a9b1; --rule: #30343a;
  --panel: #1e2125; --accent: #6cb2f2; --bad: #ff9583; --shade: #0009;
  --s1: #6cb2f2; --s2: #ff9a57; --s3: #3fc79a; --s4: #e58bc4;
  --s5: #e3bd4f; --s6: #9fd4f5; --s7: #b3b8c0; --s8: #b79af5;"""

PALETTES = f"""
:root {{ color-scheme: light dark; {LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}
@media print {{ :root {{ {LIGHT} }} }}
"""

STYLE = (
    PALETTES
    + """
.s1 { color: var(--s1); } .s2 { color: var(--s2); } .s3 { color: var(--s3); }
.s4 { color: var(--s4); } .s5 { color: var(--s5); } .s6 { color: var(--s6); }
.s7 { color: var(--s7); } .s8 { color: var(--s8); }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 64rem; padding: 0 1rem 4rem; background: var(--bg);
  color: var(--fg);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue",
  "DejaVu Sans", sans-serif; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono",
  monospace; }
header { padding: 2.5rem 0 .5rem; }
.eyebrow { margin: 0; color: var(--soft); font-size: .875rem; }
h1 { margin: .35rem 0 .6rem; font-size: clamp(1.45rem, 1.1rem + 1.6vw, 2.1rem);
  line-height: 1.25; font-weight: 650;
  letter-spacing: -.012em; text-wrap: balance; overflow-wrap: anywhere; }
h1 code { font-size: .88em; letter-spacing: -.03em; color: var(--accent); }
.lead { margin: 0 0 .4rem; font-size: 1.1rem; max-width: 44rem; }
.failure { margin: .8rem 0; padding: .7rem .9rem; border-left: 4px solid var(--bad);
  background: var(--panel);
  color: var(--bad); font-weight: 600; overflow-wrap: anywhere; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, auto));
  gap: 1.2rem 1.5rem; margin: 1.8rem 0 0; padding: 0; }
.facts div { border-top: 2px solid var(--fg); padding-top: .45rem; }
.facts dt { color: var(--soft); font-size: .875rem; }
.facts dt::first-letter { text-transform: uppercase; }
.facts dd { margin: 0; }
.facts .value { font-size: 1.55rem; font-weight: 600; line-height: 1.3;
  letter-spacing: -.02em; font-variant-numeric: tabular-nums; }
.facts .more { color: var(--soft); font-size: .875rem; }
nav { margin: 1.8rem 0 0; font-size: .925rem; display: flex; flex-wrap: wrap;
  gap: .1rem 1.2rem; }
nav a { color: var(--accent); text-decoration: none; padding: .3rem 0; }
nav a:hover { text-decoration: underline; }
section { margin-top: 3rem; border-top: 1px solid var(--rule); padding-top: 1.3rem;
  display: grid; gap: 1.7rem 3rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)); }
section > * { min-width: 0; grid-column: 1 / -1; }
section > figure { grid-column: auto; }
h2 { margin: 0; font-size: 1.3rem; line-height: 1.3; font-weight: 650;
  letter-spacing: -.01em; }
h3 { margin: 0; font-size: 1rem; line-height: 1.4; font-weight: 600;
  text-wrap: balance; }
.note { margin: .15rem 0 0; color: var(--soft); font-size: .875rem; line-height: 1.45;
  max-width: 46rem; }
.prose { margin: 0; max-width: 44rem; }
figure { margin: 0; max-width: 36rem; }
.plot { display: block; width: 100%; height: auto; margin-top: .55rem;
  overflow: visible; }
.plot text { font-size: 11.5px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.plot .name, .plot .amount { font-size: 12px; fill: var(--fg); }
.plot .label { fill: currentColor; font-weight: 600; }
.plot .end { text-anchor: end; } .plot .middle { text-anchor: middle; }
.plot line { stroke-width: 1; vector-effect: non-scaling-stroke; }
.plot .grid { stroke: var(--rule); } .plot .base, .plot .mark { stroke: var(--soft); }
.line { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round;
  stroke-linecap: round; }
.d2, .d6 { stroke-dasharray: 6 4; } .d3, .d7 { stroke-dasharray: 1.5 4; } .d4,
  .d8 { stroke-dasharray: 9 3 1.5 3; }
.dot { fill: currentColor; stroke: var(--bg); stroke-width: 1; }
.dot.alone { fill: var(--soft); }
.dot.hidden { fill: transparent; stroke: none; }
.dot:hover { stroke: var(--fg); r: 5px; }
.bar { fill: currentColor; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; margin: .35rem 0 0;
  padding: 0; list-style: none; font-size: .875rem; }
.legend li { display: flex; align-items: center; gap: .45rem; }
.legend span { color: var(--fg); }
.legend svg { width: 26px; height: 10px; flex: none; }
.scroll { overflow-x: auto; margin-top: .35rem;
  background: linear-gradient(to right, var(--bg) 40%,
  transparent) 0 0 / 2.5rem 100% no-repeat local,
    linear-gradient(to left, var(--bg) 40%,
    transparent) 100% 0 / 2.5rem 100% no-repeat local,
    linear-gradient(to right, var(--shade),
    transparent) 0 0 / .7rem 100% no-repeat scroll,
    linear-gradient(to left, var(--shade),
    transparent) 100% 0 / .7rem 100% no-repeat scroll; }
.scroll:focus-visible, summary:focus-visible,
  a:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
table { border-collapse: collapse; font-size: .875rem; line-height: 1.4;
  font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 500; vertical-align: bottom;
  border-bottom: 1px solid var(--soft); }
th, td { padding: .34rem 1.3rem .34rem 0; text-align: right; white-space: nowrap; }
th { white-space: normal; min-width: 3.5rem; max-width: 9rem; }
td { vertical-align: top; border-bottom: 1px solid var(--rule); }
th.w, td.w { text-align: left; }
td.long { white-space: normal; min-width: 13rem; max-width: 26rem;
  overflow-wrap: break-word; }
th:last-child, td:last-child { padding-right: 0; }
figure details { margin-top: .45rem; }
summary { cursor: pointer; color: var(--accent); font-size: .875rem;
  width: fit-content; padding: .2rem 0; }
.block > summary { font-size: 1rem; font-weight: 600; }
.data { max-height: 22rem; overflow: auto; }
.code { margin: .4rem 0 0; padding: .8rem 1rem; background: var(--panel);
  border-radius: 4px; font-size: .84rem; line-height: 1.6; }
.code code { display: block; padding-left: 2em; text-indent: -2em;
  overflow-wrap: anywhere; white-space: pre-wrap; }
footer { margin-top: 4rem; color: var(--soft); font-size: .875rem; }
@media print { body { max-width: none; } figure, tr { break-inside: avoid; }
nav { display: none; } }
"""
)


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
<footer>{{ footer }}</footer>
</body>
</html>
"""


def render_page(
    head: Mapping[str, object], contents: Mapping[str, Blocks], footer: str
) -> str:
    """Return a page of sections by title; every text in it is escaped.

    ``head`` has the values of the template's ``head``. Empty blocks and sections are
    left out.
    """
    filled = {title: [*filter(None, blocks)] for title, blocks in contents.items()}
    return _template().render(
        head=head,
        sections={title: blocks for title, blocks in filled.items() if blocks},
        footer=footer,
        style=STYLE,
        styles=STYLES,
    )


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(TEMPLATE)
