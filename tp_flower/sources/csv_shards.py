"""Shards in CSV files: how DuckDB reads them, and what their columns of texts hold."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from tp_flower import duckdb_engine
from tp_flower.errors import SourceError
from tp_flower.protocol.text_readings import BOOLEAN, TEXT, TextColumn, is_time
from tp_flower.sources.csv_files import csv_call, csv_format, merging_columns
from tp_flower.sources.derived.accounts import read_shards
from tp_flower.sources.entries import quote_toml
from tp_flower.sources.tables_file import ShardSource, is_csv


def is_csv_shard(source: ShardSource) -> bool:
    """Return whether a shard is a CSV file."""
    path = source.path or ""
    return source.relation is None and is_csv(path) and not Path(path).is_dir()


def csv_relation(source: ShardSource, path: str) -> str:
    """Return the call that reads a CSV file; a cast would come after '007' became 7."""
    file = csv_format(path, source.nulls, source.text)
    _check_columns(source, list(file.columns))
    names = source.renamed(file.columns)
    wanted = source.types_of(names.values())
    types = {}
    for column, texts in file.columns.items():
        name = names[column]
        # texts are converted later, because some may not be of the owner's type
        is_number = texts.best.type not in (TEXT, BOOLEAN) and not is_time(
            texts.best.type
        )
        kind = wanted.get(name) or source.readings.get(name, texts.best).type
        types[column] = kind if is_number else TEXT
    return csv_call(path, source.nulls, file.dialect, types)


def _check_columns(source: ShardSource, names: Sequence[str]) -> None:
    """Refuse a file of lines of different lengths, which DuckDB reads as one column."""
    if len(names) == 1 and any(mark in names[0] for mark in ",;|\t"):
        raise SourceError(
            f"{source}: the file looks like one column {names[0]!r}: "
            "does every line have as many values as the first one has names?"
        )


def text_columns(source: ShardSource) -> dict[str, TextColumn]:
    """Return the content of a CSV file's columns that have no type from the owner.

    Of a column that the owner takes for times, without a format, the readings are of
    his type.
    """
    if source.path is None or not is_csv_shard(source):
        return {}
    file = csv_format(source.path, source.nulls, source.text)
    names = source.renamed(file.columns)
    wanted = source.types_of(names.values())
    columns = {}
    for column, texts in file.columns.items():
        kind = wanted.get(names[column])
        if kind is None:
            columns[names[column]] = texts
        elif is_time(kind) and is_time(texts.best.type) and not source.text.dates:
            # as DuckDB writes it: an owner may have written "date"
            columns[names[column]] = texts.as_type(
                str(duckdb_engine.shared_cursor().type(kind))
            )
    return columns


def merging_texts(source: ShardSource, names: Collection[str]) -> list[str]:
    """Return which columns of a CSV file have texts that differ, but are equal values.

    A column whose type the owner says is compared by its values.
    """
    if source.path is None or not is_csv_shard(source):
        return []
    file = csv_format(source.path, source.nulls, source.text)
    column_of = {new: old for old, new in source.renamed(file.columns).items()}
    typed = source.types_of(column_of.keys())
    requested = {column_of[name]: name for name in names if name not in typed}
    merging = merging_columns(source.path, source.nulls, source.text, requested.keys())
    return [requested[column] for column in merging]


def text_hints(source: ShardSource) -> Iterator[str]:
    """Yield hints for the owner of CSV files, without quoting values."""
    for stored in read_shards(source):
        yield from text_hints(stored)
    if source.path is None or not is_csv_shard(source):
        return
    file = csv_format(source.path, source.nulls, source.text)
    names = source.renamed(file.columns)
    typed = source.types_of(names.values())
    for column, hint in file.hints.items():
        name = names[column]
        if name in typed:
            continue
        quoted_name = quote_toml(name)
        stray = ""
        if hint.row:
            stray = (
                f", not that of row {hint.row}; others are missing, as those in 'nulls'"
            )
        yield (
            f"{source}: column {name!r} is read as text, but {hint.option}types = "
            f'{{ {quoted_name} = "{hint.kind}" }} reads {hint.read} of its '
            f'{hint.values} values{stray}; types = {{ {quoted_name} = "VARCHAR" }} '
            "says that these are texts"
        )
