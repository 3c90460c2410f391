"""The rows of a shard that may take part: of every unit of privacy at most k.

The rows are drawn from the whole shard, before anything of a query: which rows they are
follows from the site's key and the rows' contents alone, so that every run ever reads
the same rows of a unit, whatever the server asks for. Each row's rank in its unit is a
keyed hash of all its columns, and of its number among rows that are equal.

Rows without a unit (NULL in its columns) are one unit together, as in GROUP BY: they
may all be one person's, and to refuse them would tell the server that there are some.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tp_flower.duckdb_engine import quote_name
from tp_flower.errors import PolicyError
from tp_flower.extraction.select_plan import (
    UNIT_OF_ROW,
    canonical_text,
    comparable_sql,
    typed_piece,
)
from tp_flower.query.fragment import Fragment, spell
from tp_flower.sources.shards import Scan, ShardSource, column_types, connect, scan


@contextmanager
def scan_drawn_rows(
    source: ShardSource, fragment: Fragment, key: bytes
) -> Iterator[Scan]:
    """Open a shard to run a fragment on it, or on its drawn rows if it has units.

    Raises:
        PolicyError: a sub-query's groups, or its windows, may have rows of several
            units, so that nothing bounds what one of them adds.
    """
    if not source.policy.privacy_unit:
        with scan(source, fragment) as opened:
            yield opened
        return
    with connect(source) as connection:
        types = column_types(connection, "SELECT * FROM shard")
        checked = fragment.check(types)
        if checked.subquery and checked.subquery.cutoffs:
            raise PolicyError(
                "the table's policy (privacy-unit) refuses: the LATERAL sub-query "
                f"{fragment.table!r} reads a row of {source.table} at every later "
                "cutoff, so that nothing bounds how many of its rows a unit is in"
            )
        names = [spell(name, types) or name for name in source.policy.privacy_unit]
        unit_columns = {quote_name(name) for name in names}
        _check_units(checked, unit_columns, names)
        unit_sql = _unit_text(source, {name: types.get(name, "") for name in names})
        rows = source.policy.rows_per_unit
        connection.execute(_draw(unit_sql, rows, key, list(map(quote_name, types))))
        connection.execute(
            "CREATE OR REPLACE TEMP VIEW shard AS SELECT * FROM drawn_rows"
        )
        yield Scan(connection, checked, needs_sort=not source.has_order)


def _check_units(
    fragment: Fragment, unit_columns: Collection[str], names: Sequence[str]
) -> None:
    """Refuse groups, and windows, of rows of several units."""
    subquery = fragment.subquery
    if subquery is None:
        return
    is_windowed = subquery.is_windowed
    groups = subquery.partitions if is_windowed else (subquery.groups,)
    if all({*unit_columns} <= {*group} for group in groups):
        return
    columns = ", ".join(names)
    problem = (
        f" groups rows of different units; GROUP BY {columns} as well, or group nothing"
    )
    if is_windowed:
        problem = (
            " has windows over rows of different units; PARTITION BY "
            f"{columns} as well in each, or leave them out"
        )
    raise PolicyError(
        "the table's policy (privacy-unit) refuses: the sub-query of table "
        f"{fragment.table!r}{problem}"
    )


def _unit_text(source: ShardSource, types: dict[str, str]) -> str:
    """Return the SQL of a row's unit, from the types of its columns."""
    parts = [
        typed_piece(source, (name, "", quote_name(name)), kind, can_be_vector=False)
        for name, kind in types.items()
    ]
    values = [replace(part, sql=f"({comparable_sql(part)})") for part in parts]
    return canonical_text(values, null_is_value=True)


def _draw(unit: str, rows: int, key: bytes, columns: Sequence[str]) -> str:
    """Return the SQL of a table of the drawn rows of ``shard``, in its order.

    Names in parentheses are no columns that a query can name.
    """
    names = ", ".join(columns)
    return f"""
        CREATE OR REPLACE TEMP TABLE drawn_rows AS SELECT {names}, "{UNIT_OF_ROW}" FROM
            (SELECT *, row_number() OVER (PARTITION BY "{UNIT_OF_ROW}" ORDER BY
                sha256('{key.hex()}' || "(content)" || ' ' || "(copy)")) AS "(turn)"
            FROM (SELECT *, row_number() OVER (PARTITION BY "{UNIT_OF_ROW}", "(content)"
                    ORDER BY "(place)") AS "(copy)"
                FROM (SELECT *, row_number() OVER () AS "(place)",
                        {unit} AS "{UNIT_OF_ROW}",
                        CAST(hash({names}) AS VARCHAR) AS "(content)"
                    FROM shard)))
        WHERE "(turn)" <= {rows} ORDER BY "(place)"
    """
