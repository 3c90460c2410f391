"""The query for people: a line per clause, and the label by itself."""

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

DIALECT = "duckdb"
LABEL = "label"


def sql_lines(query: str) -> list[str]:
    """Return a query with a line per clause; text that is no query as it is.

    >>> sql_lines("SELECT a.x AS label, b.y FROM a JOIN b ON a.k = b.k WHERE a.x > 1")
    ['SELECT a.x AS label, b.y', 'FROM a', 'JOIN b ON a.k = b.k', 'WHERE a.x > 1']
    >>> sql_lines("not ( SQL")
    ['not ( SQL']
    """
    tree = _parse(query)
    if tree is None:
        return [query] if query else []
    columns = ", ".join(item.sql(DIALECT) for item in tree.expressions)
    tail = tree.select("*", append=False).sql(DIALECT, pretty=True)
    lines = [f"SELECT {columns}"]
    for line in tail.split("\n")[2:]:
        # what is indented belongs to the clause above
        if line.startswith(" "):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    return lines


def label_of(query: str) -> str:
    """Return the expression that is the label, or "" if there is none.

    >>> label_of("SELECT a.x > 3 AS label, a.y FROM a")
    'a.x > 3'
    """
    tree = _parse(query)
    if tree is None:
        return ""
    found = (item for item in tree.expressions if item.alias == LABEL)
    return next((str(item.this.sql(DIALECT)) for item in found), "")


def _parse(query: str) -> exp.Select | None:
    try:
        tree = sqlglot.parse_one(query, read=DIALECT)
    except SqlglotError:
        return None
    return tree if isinstance(tree, exp.Select) else None
