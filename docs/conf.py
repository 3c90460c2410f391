"""The site that `scripts/docs.sh` builds from the pages of the whole checkout.

The source folder is the checkout itself, so that a page's links are the same here and
on a code host. Nothing is loaded from elsewhere: fonts are the system's, equations are
MathML.
"""

import tomllib
from pathlib import Path

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]

project = "tp_flower"
release = PROJECT["version"]
copyright = "the authors of tp_flower, Apache License 2.0"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
include_patterns = ["*.md", "docs/**.md", "examples/**.md", "examples/**.ipynb"]
exclude_patterns = [
    ".*",
    "build",
    "dist",
    "runs",
    "tests",
    "scripts",
    "strategies",
    "tp_flower",
]
root_doc = "docs/index"

myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_dmath_allow_digits = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
smartquotes = False  # pages quote what is typed
default_role = "code"  # docstrings write code in single backticks
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_typehints_description_target = "documented_params"

html_theme = "furo"
html_title = f"tp_flower {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "redirect.html"}
templates_path = ["_templates"]
html_copy_source = False
html_show_sphinx = False
html_math_renderer = "mathml"


def write_math(
    translator: HTML5Translator, node: nodes.math | nodes.math_block
) -> None:
    """Write an equation as MathML, which browsers draw without a script."""
    is_block = isinstance(node, nodes.math_block)
    tree = latex2mathml.tex2mathml(node.astext(), as_block=is_block)
    translator.body.append(f'<div class="equation">{tree}</div>' if is_block else tree)
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Draw equations by `write_math`."""
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
