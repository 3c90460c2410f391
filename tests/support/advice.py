"""The messages of the program that advise: the texts in its source, found by their
verbs.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("tp_flower", "strategies", "client_apps")
VERBS = (
    "add|aggregate|ask|cast|CAST|check|choose|compare|convert|declare|divide|encode|filter|give"
    "|hold|install|join|JOIN|keep|leave|LEFT JOIN|list|lower|Lower|name|put|raise"
    "|rename|repeat"
    "|replace|set|start|take|try|use|Use|write|Write"
)
ADVICE = re.compile(rf"([:;,.(]|\bor) (only |for \w+ |for [\w ]+ group )?({VERBS}) ")
ADVICE_FIRST = re.compile(rf"^({VERBS.lower()}) [a-zA-Z{{'`\"]")
REMEDY = re.compile(
    r"^[^ ]+\(x|/ NULLIF|such as WHERE|JOIN \(SELECT| is a (number|text)\b|: It is|It "
    r"is "
)
"""What stands in place of something refused, without a verb."""
NO_ADVICE = re.compile(
    r"^(filter|set-up) \W|^join (key|of)|^set-up|^(SELECT|CREATE|INSERT|\* REPLACE) "
)
"""Names of what a message is about, and SQL."""
NO_MESSAGES = ("setting", "Discloses", "Option", "Argument", "Typer", "Meta", "compile")
"""Functions whose texts describe what is."""


def text_of(node: ast.AST) -> str | None:
    """A text as the source writes it, with {} for what is put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            "{}" if (part := text_of(v)) is None else part for v in node.values
        )
    return None


def _texts(tree: ast.Module) -> Iterator[str]:
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(node.values)
        # documentation
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            refusals = [k.value for k in node.keywords if k.arg == "refusal"]
            if name in NO_MESSAGES:
                described = [*node.args, *(k.value for k in node.keywords)]
                skipped.update(
                    n for tree in described for n in ast.walk(tree) if n not in refusals
                )
    for node in ast.walk(tree):
        text = text_of(node)
        if text and node not in skipped:
            yield text


def _advises(text: str) -> bool:
    is_advice = ADVICE.search(text) or ADVICE_FIRST.search(text) or REMEDY.search(text)
    return bool(is_advice) and not NO_ADVICE.search(text)


@cache
def texts() -> tuple[str, ...]:
    """All texts of the program but its documentation."""
    files = (
        file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))
    )
    parsed = (ast.parse(file.read_text("utf-8")) for file in files)
    return tuple(dict.fromkeys(text for tree in parsed for text in _texts(tree)))


def advising() -> list[str]:
    """The texts that advise."""
    return list(filter(_advises, texts()))
