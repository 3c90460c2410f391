"""Small errors in the product's code: where they are, and how they are planted.

A fault names a function and a fragment of it, an expression or statements, which
another one replaces. Fragments are compared as trees: neither the layout of the code
nor the file that a function is in matters. What is inside a text, as of SQL, is
compared as text, without what a formatter may change.
"""

import ast
import re
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

from scripts.checks.checkouts import ROOT

FAULTS = Path(__file__).with_name("faults.toml")
PACKAGES = ("tp_flower", "strategies", "client_apps")
LAYOUT = re.compile(r'"\s*[rf]?"|,(?=\s*[)\]}])|\s+')

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Fragment = ast.expr | list[ast.stmt]


class StaleFaultError(Exception):
    """The list of faults does not fit the code any more."""


@dataclass(frozen=True)
class Fault:
    """An error as in ``faults.toml``: ``new`` replaces ``old``.

    Attributes:
        function: the qualified name of the function or class that has it, in whichever
            file; of a module's own statements the end of its path, as in "losses.py".
        old: an expression, or statements; a part of the source if ``is_text``.
        tests: the test files that ought to fail, as patterns of the end of their paths.
    """

    name: str
    function: str
    old: str
    new: str
    tests: Sequence[str]
    is_text: bool = False

    @property
    def fragments(self) -> tuple[Fragment, Fragment]:
        """``old`` and ``new`` as trees: two expressions, or two lists of statements."""
        texts = [textwrap.dedent(text).strip() for text in (self.old, self.new)]
        try:
            old, new = (ast.parse(text, mode="eval").body for text in texts)
        except SyntaxError:
            pass
        else:
            return old, new
        try:
            statements, others = (ast.parse(text).body for text in texts)
        except SyntaxError as error:
            raise StaleFaultError(f"a fragment is no Python: {error}") from error
        return statements, others


@dataclass(frozen=True)
class Scope:
    """A function, class or module of the product; ``name`` is its qualified name."""

    name: str
    path: Path
    tree: ast.Module
    node: ast.Module | Definition

    def source(self) -> tuple[str, str, str]:
        """Return the text of the file before the scope, of the scope, and behind it."""
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        if isinstance(self.node, ast.Module):
            return "", "".join(lines), ""
        first, last = self.node.lineno - 1, self.node.end_lineno
        return "".join(lines[:first]), "".join(lines[first:last]), "".join(lines[last:])

    def count(self, fault: Fault) -> int:
        """Return how often the scope has the fault's snippet."""
        if fault.is_text:
            snippet = Layoutless.of(fault.old).text
            return Layoutless.of(self.source()[1]).text.count(snippet)
        old, _ = fault.fragments
        if isinstance(old, list):
            return sum(1 for _ in _runs(self.node, old))
        return sum(_is_equal(node, old) for node in ast.walk(self.node))


@dataclass(frozen=True)
class Layoutless:
    """A program's text without what a formatter may change.

    White space, commas before a closing bracket and the joints of adjacent string
    literals are left out; ``positions`` are those of the characters that stay.
    """

    text: str
    positions: Sequence[int]

    @classmethod
    def of(cls, source: str) -> Self:
        """Leave the layout out of a source."""
        skipped = {i for match in LAYOUT.finditer(source) for i in range(*match.span())}
        positions = [i for i in range(len(source)) if i not in skipped]
        return cls("".join(source[i] for i in positions), positions)


def read_faults(path: Path = FAULTS) -> list[Fault]:
    """Return the faults of a file, whichever of its groups they are in."""
    groups = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        Fault(**{name.replace("-", "_"): value for name, value in fault.items()})
        for group in groups.values()
        for fault in group
    ]


@cache
def read_scopes(root: Path = ROOT) -> dict[str, list[Scope]]:
    """Return all scopes of the product by name; modules by the names of their files.

    They are those of the first call.
    """
    scopes: dict[str, list[Scope]] = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            for scope in scopes_of(path):
                scopes.setdefault(scope.name, []).append(scope)
    return scopes


def scopes_of(path: Path) -> Iterator[Scope]:
    """Yield the module of a file, its functions and its classes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield Scope(path.name, path, tree, tree)
    pending: list[tuple[str, ast.AST]] = [("", tree)]
    while pending:
        prefix, parent = pending.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, Definition):
                name = f"{prefix}{node.name}"
                yield Scope(name, path, tree, node)
                pending.append((f"{name}.", node))
            elif isinstance(node, ast.stmt):
                pending.append((prefix, node))


def find_scope(fault: Fault, root: Path = ROOT) -> Scope:
    """Return the one scope of the fault's name that has its snippet, once."""
    named = read_scopes(root).get(fault.function.rpartition("/")[2], [])
    if fault.function.endswith(".py"):
        named = [scope for scope in named if scope.path.match(fault.function)]
    places = [scope for scope in named for _ in range(scope.count(fault))]
    if len(places) != 1:
        raise StaleFaultError(
            f"the snippet is found {len(places)} times in the {len(named)} that are "
            f"called {fault.function!r}: {fault.old!r}"
        )
    return places[0]


def plant(fault: Fault, scope: Scope) -> str:
    """Return the text of a scope's file with the fault in place of its snippet."""
    if fault.is_text:
        before, text, behind = scope.source()
        part, snippet = Layoutless.of(text), Layoutless.of(fault.old).text
        at = part.text.index(snippet)
        first, last = (part.positions[i] for i in (at, at + len(snippet) - 1))
        return before + text[:first] + fault.new.strip() + text[last + 1 :] + behind
    old, new = fault.fragments
    # together, so that the one is still in the other
    tree, node = deepcopy((scope.tree, scope.node))
    if isinstance(old, list) and isinstance(new, list):
        ((body, at),) = _runs(node, old)
        body[at : at + len(old)] = new
    elif isinstance(old, ast.expr) and isinstance(new, ast.expr):
        _Replacement(old, new).visit(node)
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


class _Replacement(ast.NodeTransformer):
    """Replaces an expression by another one."""

    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self._old, self._new = old, new

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Return the other expression in place of the one."""
        return self._new if _is_equal(node, self._old) else super().generic_visit(node)


def _is_equal(node: ast.AST, other: ast.AST) -> bool:
    return type(node) is type(other) and ast.dump(node) == ast.dump(other)


def _runs(node: ast.AST, old: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], int]]:
    """Yield where a list of statements of a scope has these, one after the other."""
    for parent in ast.walk(node):
        for _, body in ast.iter_fields(parent):
            if not (isinstance(body, list) and body and isinstance(body[0], ast.stmt)):
                continue
            for at in range(len(body) - len(old) + 1):
                if all(map(_is_equal, body[at:], old)):
                    yield body, at
