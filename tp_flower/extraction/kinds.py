"""Kinds of a fragment's features, told from the types of its table's columns alone."""

from collections.abc import Mapping
from contextlib import closing
from typing import Final

import duckdb

from tp_flower.errors import SourceError
from tp_flower.extraction.canonical import kind_of
from tp_flower.extraction.plan import RELATION, make_plan
from tp_flower.query.fragment import Fragment
from tp_flower.sources.engine import shared_cursor
from tp_flower.sources.scan import Scan
from tp_flower.sources.sql_text import quote_name
from tp_flower.sources.tables_file import ShardSource

_UNSAID: Final = {'"NULL"': "INTEGER"}
"""Types that DuckDB names but does not read: of columns without a value."""


def feature_kinds(fragment: Fragment, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the kind of value of each feature; {} where the types do not tell.

    The fragment is planned over an empty table: nothing of it is evaluated.

    Args:
        fragment: of the query.
        columns: DuckDB type by column, as sites have described their table.
    """
    # types came over the wire and are put into SQL: only those that are known are
    typed = {
        name: _UNSAID.get(kind, kind)
        for name, kind in columns.items()
        if kind_of(kind) is not None and not kind.startswith("ENUM")
    }
    if not typed:
        return {}
    listed = ", ".join(f"{quote_name(name)} {kind}" for name, kind in typed.items())
    nowhere = ShardSource(fragment.name, site="", index=0)
    with closing(shared_cursor()) as connection:
        try:
            connection.execute(f"CREATE TEMP TABLE {RELATION} ({listed})")
            plan = make_plan(nowhere, Scan(connection, fragment, typed))
        except (duckdb.Error, SourceError):
            # the site will say what is wrong, of its own data
            return {}
    return {piece.name: piece.kind for piece in plan.features}
