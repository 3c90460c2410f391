"""The columns that name a row of the predictions: the setting ``row-key``."""

from collections.abc import Sequence

from tp_flower.errors import QueryError
from tp_flower.query.binding.scope import Scope
from tp_flower.query.expressions import parse_expression


def row_key_columns(
    columns: Sequence[str], scope: Scope, table: str
) -> list[tuple[str]]:
    """Return each column as a key of the fragments of a table.

    Args:
        columns: as they are written, with or without the table.
        scope: the tables of the query.
        table: alias of the table whose rows are predicted.

    Raises:
        QueryError: a column is unknown, or of another table.
    """
    found = []
    for written in columns:
        what = f"row-key {written}"
        local = scope.local(parse_expression(written, what), what)
        if local.table != table:
            raise QueryError(
                f"{what} is a column of table {local.table!r}, but the rows of "
                f"{table!r} are predicted: name columns of {table}"
            )
        found.append((local.sql,))
    return found
