"""One HTML file of sections of tables, figures and texts, without scripts."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from jinja2 import Environment, StrictUndefined, Template

from tp_flower.reports.blocks import Blocks

STYLES: Final = 8
"""Styles of lines and bars that a reader can tell apart."""

_TEXTS: Final = tomllib.loads(Path(__file__).with_suffix(".toml").read_bytes().decode())
LIGHT, DARK = _TEXTS["light"], _TEXTS["dark"]

STYLE = f"""
:root {{ color-scheme: light dark; {LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}
@media print {{ :root {{ {LIGHT} }} }}
{_TEXTS["style"]}"""


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
    return environment.from_string(_TEXTS["template"])
