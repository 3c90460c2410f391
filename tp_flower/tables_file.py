"""The tables file: which shards a site hosts, and where their rows are.

A *shard* is one piece of one table, held by one organisation. A site's tables file
lists the shards it hosts::

    [tables.orders]              # one shard: the short form
    path = "orders.csv"          # relative to this file
    site = "store"               # optional: the organisation that holds it

    [[tables.customers.shards]]  # several shards
    path = "customers_us.parquet"
    site = "us"
    types = { zip = "VARCHAR" }  # optional: override what DuckDB detects
    nulls = ["", "unknown"]      # optional: what stands for NULL in a CSV file
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from tp_flower.errors import SourceError

DEFAULT_NULLS: Final = ("", "NA", "NaN", "nan", "NULL", "null")
CSV_SUFFIXES: Final = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
PARQUET_SUFFIXES: Final = (".parquet",)

_SHARD_KEYS: Final = ("path", "site", "types", "nulls")
_TABLE_KEYS: Final = (*_SHARD_KEYS, "shards")
_TYPE_TEXT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*([ ][A-Za-z]+)*(\([0-9, ]+\))?")


@dataclass(frozen=True)
class ShardSource:
    """One shard and where its rows are.

    Attributes:
        table: the table's name at the sites (not an alias of the query).
        site: the organisation that holds the shard; "<table>-<index>" if not named.
        index: position of the shard among its table's shards.
        path: the file, or None for a data frame.
        types: DuckDB types by column, where the detected type is not wanted.
        token: key of the data frames in this process's registry, or None for a file.
        nulls: the strings that stand for NULL in a CSV file.
    """

    table: str
    site: str
    index: int
    path: str | None = None
    types: Mapping[str, str] = field(default_factory=dict)
    token: str | None = None
    nulls: tuple[str, ...] = DEFAULT_NULLS

    def __str__(self) -> str:
        """The shard in words, as error messages name it."""
        where = "a data frame" if self.path is None else self.path
        return f"table {self.table!r} at site {self.site!r} ({where})"


def read_tables_file(path: str) -> tuple[ShardSource, ...]:
    """Read a tables file.

    Raises:
        SourceError: the file is missing, unreadable, no TOML, names no table, has an
            unknown key or a source of an unknown form.
    """
    file = Path(path).expanduser()
    document = _read_toml(file)
    _refuse_unknown(document, ("tables",), f"the tables file {file}")
    tables = document.get("tables")
    if not isinstance(tables, dict) or not tables:
        raise SourceError(
            f"the tables file {file} names no tables: expected [tables.<name>]"
        )
    return tuple(
        source
        for name, entry in tables.items()
        for source in _table_sources(file, name, entry)
    )


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "" if file.is_absolute() else f" in {Path.cwd()} (use an absolute path)"
        raise SourceError(f"the tables file {file} does not exist{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"the tables file {file} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise SourceError(f"the tables file {file} is not TOML: {error}") from error


def _table_sources(file: Path, name: str, entry: object) -> list[ShardSource]:
    """The shards of one [tables.<name>] entry."""
    where = f"[tables.{name}] of {file}"
    if not isinstance(entry, dict):
        raise SourceError(f"{where} is not a table of settings, but {entry!r}")
    _refuse_unknown(entry, _TABLE_KEYS, where)
    shards = entry.get("shards", [entry])
    if "shards" in entry and "path" in entry:
        raise SourceError(f"{where} has both 'path' and 'shards': give one of them")
    if not isinstance(shards, list) or not shards:
        raise SourceError(f"'shards' in {where} must be a non-empty list of shards")
    common = {key: value for key, value in entry.items() if key != "shards"}
    return [
        _shard_source(file, name, index, common, shard)
        for index, shard in enumerate(shards)
    ]


def _shard_source(
    file: Path, table: str, index: int, common: Mapping[str, Any], shard: object
) -> ShardSource:
    """One shard; what it does not say itself is taken from its table's entry."""
    where = f"shard {index} of table {table!r} in {file}"
    if not isinstance(shard, dict):
        raise SourceError(f"{where} is not a table of settings, but {shard!r}")
    if shard is not common:
        _refuse_unknown(
            shard, _TABLE_KEYS if "shards" in common else _SHARD_KEYS, where
        )
    types = {**_types(common, where), **_types(shard, where)}
    merged = {**common, **shard}
    path = _text(merged, "path", where)
    if not path:
        raise SourceError(f"{where} has no 'path'")
    file_suffix(path)
    return ShardSource(
        table=table,
        site=_text(merged, "site", where) or f"{table}-{index}",
        index=index,
        path=str(file.absolute().parent / Path(path).expanduser()),
        types=types,
        nulls=_nulls(merged, where),
    )


def _text(entry: Mapping[str, Any], key: str, where: str) -> str:
    value = entry.get(key, "")
    if not isinstance(value, str):
        raise SourceError(f"{key!r} of {where} must be a string, not {value!r}")
    return value


def _types(entry: Mapping[str, Any], where: str) -> dict[str, str]:
    types = entry.get("types", {})
    if not isinstance(types, dict):
        raise SourceError(f"'types' of {where} must be a table, not {types!r}")
    for column, name in types.items():
        if not isinstance(name, str) or not _TYPE_TEXT.fullmatch(name):
            raise SourceError(
                f"'types' of {where}: {name!r} for column {column!r} is not the name "
                "of a DuckDB type, such as DOUBLE, BIGINT, VARCHAR or TIMESTAMP"
            )
    return dict(types)


def _nulls(entry: Mapping[str, Any], where: str) -> tuple[str, ...]:
    nulls = entry.get("nulls", list(DEFAULT_NULLS))
    if not isinstance(nulls, list) or not all(isinstance(n, str) for n in nulls):
        raise SourceError(
            f"'nulls' of {where} must be a list of strings, not {nulls!r}"
        )
    return tuple(nulls)


def _refuse_unknown(
    entry: Mapping[str, object], allowed: Sequence[str], where: str
) -> None:
    for key in entry:
        if key not in allowed:
            close = get_close_matches(key, allowed, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise SourceError(
                f"unknown key {key!r} in {where}{hint}: "
                f"valid keys are {', '.join(allowed)}"
            )


def file_suffix(path: str) -> str:
    """The suffix that decides how a file is read."""
    for suffix in (*CSV_SUFFIXES, *PARQUET_SUFFIXES):
        if path.lower().endswith(suffix):
            return suffix
    known = ", ".join((*CSV_SUFFIXES, *PARQUET_SUFFIXES))
    raise SourceError(f"cannot tell the format of {path}: known extensions are {known}")
