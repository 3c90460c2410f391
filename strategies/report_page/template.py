"""The page's HTML. A Flower app is shipped as Python files, so it is one."""

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
