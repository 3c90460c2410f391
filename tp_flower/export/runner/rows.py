"""Rows of a table: its columns with the types of the training, and the query's SELECT.

The SELECT is the part of the query that the table answers, as `part.json` has it: it
yields features, and of the join keys *canonical* texts, which are equal where the
values are, whatever their types.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Json = dict[str, Any]
Keys = tuple[Array, Array]
"""Of each row a position in texts, -1 for NULL, (n,); the texts (k,)."""
_HARMLESS = (
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.IOException,
    duckdb.ParserException,
)
"""Raised before a row is read."""


class ExportError(Exception):
    """The archive, a file or an option does not fit the model."""


def read_rows(part: Json, source: Any, keep: Sequence[str] = ()) -> Json:
    """Return the features, keys and offset of a part's rows, by the query's SELECT.

    Numbers are float64 (n,), NaN where missing; texts and keys are ``Keys``; vectors
    are float32 (n, v).

    Raises:
        ExportError: columns are missing, or values do not fit the type of the training;
            the message has no value of a row.
    """
    select = part["select"]
    kept_columns = [
        (f"keep{number}", quote_name(name)) for number, name in enumerate(keep)
    ]
    inner = [
        ["1", "nothing"],
        *select["inner"],
        *([sql, name] for name, sql in kept_columns),
    ]
    outer = [
        ["nothing", "nothing"],
        *select["outer"],
        *([name, name] for name, _ in kept_columns),
    ]
    with duckdb.connect() as connection, _without_values(connection, part, source):
        connection.execute("SET TimeZone = 'UTC'")
        _open(connection, part, source, keep)
        values = f"SELECT {_items(inner)} FROM {select['from']}"
        sql = f"SELECT {_items(outer)} FROM ({values})"
        if empty := select.get("empty"):
            values = f"SELECT {_items(empty['inner'])} FROM {empty['from']}"
            outer = [["1", "nothing"], *empty["outer"]]
            # the last row, whose key is of no rows
            sql += f" UNION ALL BY NAME SELECT {_items(outer)} FROM ({values})"
        columns = connection.execute(sql).fetchnumpy()
    rows: Json = {"rows": np.array(len(columns["nothing"]))}
    rows["features"] = {
        name: _column(name, columns[column], kind, length)
        for name, column, kind, length in select["features"]
    }
    for number, column in enumerate(select["keys"]):
        codes, texts = _texts(columns[column])
        rows[f"key{number}.codes"] = codes
        rows[f"key{number}.texts"] = texts
    if select["offset"]:
        rows["offset"] = columns[select["offset"]]
    for (column, _), name in zip(kept_columns, keep, strict=True):
        rows[f"keep.{name}"] = _plain(columns[column])
    return rows


@contextmanager
def _without_values(
    connection: duckdb.DuckDBPyConnection, part: Json, source: Any
) -> Iterator[None]:
    """Raise what reading the source raises inside the context without its values."""
    try:
        yield
    except _HARMLESS:
        raise
    except duckdb.Error as error:
        relation, place = "source", "the rows"
        if isinstance(source, str | os.PathLike):
            place = os.fspath(source)
            relation = _relation(place, part["nulls"])
        if line := re.search(r"CSV Error on Line: \d+", str(error)):
            raise ExportError(f"{part['part']}: {place}: {line[0]}") from None
        for name, (kind, form) in part["columns"].items():
            cast = _cast(quote_name(name), "VARCHAR", kind, form)
            try:
                connection.execute(f"SELECT max({cast}) FROM {relation}")
            except _HARMLESS:
                # a column that is no text
                continue
            except duckdb.Error:
                raise ExportError(
                    f"{part['part']}: {place}: values of column {name!r} are no "
                    f"{kind}, the type that the model was trained on"
                ) from None
        raise ExportError(
            f"{part['part']}: {place}: {type(error).__name__}, of a value that "
            "does not fit the query"
        ) from None


def _open(
    connection: duckdb.DuckDBPyConnection, part: Json, source: Any, keep: Sequence[str]
) -> None:
    """Make the view `shard` the source's rows, with the training's types.

    Columns to ``keep`` that the query does not read are as they come.
    """
    relation = "source"
    if isinstance(source, str | os.PathLike):
        relation = _relation(os.fspath(source), part["nulls"])
    else:
        connection.register("source", source)
    described = connection.execute(f"DESCRIBE SELECT * FROM {relation}").fetchall()
    types = {name.lower(): kind for name, kind, *_ in described}
    if absent := [name for name in part["columns"] if name.lower() not in types]:
        raise ExportError(
            f"{part['part']}: the rows have no column {', '.join(map(repr, absent))}: "
            f"the query reads {', '.join(part['columns'])}"
        )
    read = {name.lower() for name in part["columns"]}
    others = {name.lower(): name for name in keep if name.lower() in types}
    columns = ["1 AS nothing"]
    columns += [quote_name(others[name]) for name in others if name not in read]
    changes = {}
    for name, (kind, form) in part["columns"].items():
        raw = types[name.lower()]
        sql = _cast(quote_name(name), raw, kind, form)
        columns.append(f"{sql} AS {quote_name(name)}")
        if change := _change(quote_name(name), raw, kind, sql):
            changes[name, raw, kind] = change
    _check_changes(connection, relation, part["part"], changes)
    connection.execute(
        f"CREATE TEMP VIEW shard AS SELECT {', '.join(columns)} FROM {relation}"
    )


def _relation(path: str, nulls: Sequence[str]) -> str:
    """Return the SQL that reads a file or a folder, or SQL as it is."""
    if path.startswith("("):
        return path
    if Path(path).is_dir():
        return f"read_parquet({quote_text(f'{path}/**/*.parquet')})"
    if path.endswith((".parquet", ".pq")):
        return f"read_parquet({quote_text(path)})"
    listed = ", ".join(map(quote_text, nulls))
    return (
        f"read_csv({quote_text(path)}, header = true, all_varchar = true, "
        f"sample_size = -1, nullstr = [{listed}])"
    )


def _cast(column: str, raw: str, kind: str, form: str) -> str:
    """Return the SQL of a column as the type that it had in training."""
    value = _finite(column, raw)
    if raw == kind:
        return value
    if raw == "VARCHAR" and form:
        value = f"strptime(trim({value}), {quote_text(form)})"
    elif raw == "VARCHAR" and kind == "TIMESTAMP WITH TIME ZONE":
        # DuckDB reads no zone behind a space
        zone = r"' ([+-]\d{2}(:?\d{2})?)\s*$', '\1'"
        value = f"regexp_replace({value}, {zone})"
    return _finite(f"CAST({value} AS {kind})", kind)


def _finite(sql: str, kind: str) -> str:
    """Return the SQL of a value that is NULL where it is NaN."""
    if kind in ("FLOAT", "DOUBLE"):
        return f"CASE WHEN isfinite({sql}) OR isinf({sql}) THEN {sql} END"
    return sql


def _change(column: str, raw: str, kind: str, sql: str) -> str:
    """Return the SQL of whether a cast changes a value; "" if it never does."""
    if raw == kind:
        return ""
    before, after = _finite(column, raw), f"CAST({sql} AS {raw})"
    if raw == "VARCHAR":
        # '1.0' is 1, and '1.5' would be 2
        if not (kind.endswith(("INT", "INTEGER")) or kind.startswith("DECIMAL")):
            return ""
        before, after = (f"CAST({each} AS DOUBLE)" for each in (column, sql))
    return f"{after} IS DISTINCT FROM {before}"


def _check_changes(
    connection: duckdb.DuckDBPyConnection,
    relation: str,
    part: str,
    changes: Mapping[tuple[str, str, str], str],
) -> None:
    """Refuse columns whose values are none of the type of the training."""
    if not changes:
        return
    counts = ", ".join(f"count(*) FILTER ({sql})" for sql in changes.values())
    (changed_counts,) = connection.execute(
        f"SELECT {counts} FROM {relation}"
    ).fetchall()
    for (name, raw, kind), changed in zip(changes, changed_counts, strict=True):
        if changed:
            raise ExportError(
                f"{part}: column {name!r} is {raw}, and {changed} of its values are no "
                f"{kind}, the type that the model was trained on"
            )


def _column(name: str, values: Array, kind: str, length: int) -> Array | Keys:
    """Return a feature as it is encoded: numbers, texts, or vectors of a length."""
    if kind == "text":
        return _texts(values)
    if kind != "vector":
        return np.asarray(np.ma.filled(values, np.nan), np.float64)
    present = np.flatnonzero(~np.ma.getmaskarray(values))
    lengths = {len(values[row]) for row in present}
    if lengths - {length or min(lengths, default=0)}:
        raise ExportError(
            f"the vectors of {name!r} have {max(lengths)} numbers, and the model takes "
            f"{length or min(lengths)}"
        )
    vectors = np.full((len(values), max(lengths, default=length)), np.nan, np.float32)
    for row in present:
        vectors[row] = np.ma.filled(values[row], np.nan)
    return vectors


def _texts(values: Array) -> Keys:
    """Return each row's position among the sorted distinct texts, and these."""
    codes = np.full(len(values), -1, np.int64)
    present = ~np.ma.getmaskarray(values)
    texts, inverse = np.unique(
        np.ma.getdata(values)[present].astype(str), return_inverse=True
    )
    codes[present] = inverse
    return codes, texts


def _plain(values: Array) -> Array:
    """Return a kept column as an array that a file without pickle can hold."""
    if values.dtype == object:
        return np.asarray(np.ma.filled(values, ""), str)
    if not np.ma.getmaskarray(values).any():
        return np.ma.getdata(values)
    if values.dtype.kind == "M":
        return np.asarray(np.ma.filled(values, np.datetime64("NaT")))
    return np.asarray(np.ma.filled(values.astype(np.float64), np.nan))


def _items(pairs: Sequence[Sequence[str]]) -> str:
    return ", ".join(f"{sql} AS {name}" for sql, name in pairs)


def quote_name(name: str) -> str:
    """Quote an identifier for DuckDB."""
    return '"' + name.replace('"', '""') + '"'


def quote_text(text: str) -> str:
    """Quote a text for DuckDB."""
    return "'" + text.replace("'", "''") + "'"
