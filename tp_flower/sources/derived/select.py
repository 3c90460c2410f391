"""The owner's SELECT, as DuckDB parses it: which tables it reads.

It is no query from the network: whatever DuckDB can run over the site's tables is
allowed. Refused is what would read rows that no entry of the tables file has, and what
yields other rows at every reading: a row's position names it in all runs.
"""

import json
import re
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any, Final

from tp_flower import duckdb_engine
from tp_flower.errors import SourceError
from tp_flower.sources.entries import DUCKDB_SAYS

Node = Any
"""A part of a statement as DuckDB's JSON of it: an object, a list or a value."""

_READERS: Final = re.compile(r"(read|parquet|sniff)_\w+|glob|\w+_scan|query(_table)?")
"""Functions in FROM that read files, or tables by names that no parser knows."""
_CLOCKS: Final = frozenset(
    ("current_date", "current_time", "current_timestamp", "localtime", "localtimestamp")
)
"""Functions that may be written without parentheses, as columns are."""


def parse_select(sql: str, where: str) -> tuple[str, ...]:
    """Return the names of the tables that a SELECT reads, in lower case.

    >>> parse_select("WITH w AS (FROM A) SELECT * FROM w JOIN b USING (k)", "'sql'")
    ('a', 'b')
    """
    ((text,),) = (
        duckdb_engine.shared_cursor()
        .execute("SELECT json_serialize_sql(?)", [sql])
        .fetchall()
    )
    parsed = json.loads(text)
    if parsed["error"]:
        raise SourceError(
            f"{where} is not a SELECT (a PIVOT needs the list of its values)"
            f"{DUCKDB_SAYS}{parsed['error_message']}"
        )
    statements = parsed["statements"]
    if len(statements) != 1:
        raise SourceError(f"{where} has {len(statements)} statements: write one SELECT")
    for node in _nodes(statements):
        _check_repeatable(node, where)
        _check_function(node, where)
    names = tuple(dict.fromkeys(_tables(statements[0], frozenset(), where)))
    if not names:
        raise SourceError(f"{where} reads no table of the site: name one in FROM")
    return names


def _nodes(node: Node) -> Iterator[dict[str, Any]]:
    """Yield all objects of a statement."""
    if isinstance(node, dict):
        yield node
    for child in _children(node):
        yield from _nodes(child)


def _children(node: Node) -> Collection[Node]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _tables(node: Node, in_scope: frozenset[str], where: str) -> Iterator[str]:
    """Yield the tables that a part of a statement reads, but not names of its WITH."""
    if isinstance(node, dict) and (listed := node.get("cte_map")):
        node = {key: value for key, value in node.items() if key != "cte_map"}
        for entry in listed["map"]:
            name = entry["key"].lower()
            is_recursive = any(
                part.get("cte_name") == entry["key"] for part in _nodes(entry["value"])
            )
            visible = in_scope | {name} if is_recursive else in_scope
            yield from _tables(entry["value"], visible, where)
            in_scope |= {name}
    if isinstance(node, dict) and node.get("type") == "BASE_TABLE":
        yield from _table(node, in_scope, where)
    for child in _children(node):
        yield from _tables(child, in_scope, where)


def _table(node: dict[str, Any], in_scope: frozenset[str], where: str) -> Iterator[str]:
    """Yield a table's name, unless WITH makes it; refuse one with a schema."""
    name = node["table_name"]
    if schema := node.get("schema_name") or node.get("catalog_name"):
        raise SourceError(
            f"{where} reads {schema}.{name}: tables of the site have no schema; write "
            "the name that the tables file has for it"
        )
    if name.lower() not in in_scope:
        yield name.lower()


@lru_cache(maxsize=1)
def _varying_functions() -> frozenset[str]:
    """Return the functions whose result is another one at every reading."""
    rows = duckdb_engine.shared_cursor().execute(
        "SELECT DISTINCT function_name FROM duckdb_functions() "
        "WHERE stability <> 'CONSISTENT' AND function_name <> 'error'"
    )
    return frozenset(name for (name,) in rows.fetchall()) | _CLOCKS


def _check_repeatable(node: dict[str, Any], where: str) -> None:
    """Refuse a sample, and functions of the time or of chance."""
    name = str(node.get("function_name", "")).lower()
    column = [text.lower() for text in node.get("column_names", ())]
    arguments = node.get("arguments") or node.get("children") or ()
    varying = ""
    if node.get("sample"):
        varying = "a sample"
    elif name in _varying_functions() or (name == "age" and len(arguments) == 1):
        varying = f"{name}()"
    elif len(column) == 1 and column[0] in _CLOCKS:
        varying = column[0]
    if varying:
        raise SourceError(
            f"{where} takes {varying}, which is another one at every reading, and a "
            "table's rows must be the same in all runs: write the date itself, "
            "DATE '2024-12-31', for that of the day, and hash(key) % 10 = 0 for a "
            "share of the rows"
        )


def _check_function(node: dict[str, Any], where: str) -> None:
    """Refuse a function in FROM that reads what is no table of the site."""
    if node.get("type") != "TABLE_FUNCTION":
        return
    name = str(node["function"].get("function_name", "")).lower()
    if _READERS.fullmatch(name):
        raise SourceError(
            f"{where} reads by {name}(): give the file an entry of its own in the "
            "tables file, and name that in FROM"
        )
