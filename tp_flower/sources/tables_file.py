"""The tables file: which shards a site hosts, and where their rows are.

A *shard* is one piece of one table, held by one organisation. A site's tables file
lists the shards it hosts (docs/how-to/connect-sources.md has all keys)::

    [tables.orders]              # one shard: the short form
    path = "orders.csv"          # relative to this file

    [[tables.customers.shards]]  # several shards
    path = "customers_us/"
    site = "us"                  # the organisation that holds it

    [[tables.customers.shards]]
    uri = "postgresql://reader:${PASSWORD}@db.example.org/shop"
    table = "public.customers"

    [tables.baskets]             # a derived table: a SELECT over the site's others
    sql = "SELECT customer, count(*) AS orders FROM orders GROUP BY customer"

The rules of what may leave a table are its policy (``policy.py``); a real site's table
takes part in runs only if it has one.
"""

import os
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tp_flower.errors import PolicyError, SourceError
from tp_flower.protocol.text_readings import TextReading
from tp_flower.query.fragment import spell
from tp_flower.sources import entries
from tp_flower.sources.entries import Count, Flag, Names, Text, Texts
from tp_flower.sources.policy import MISSING, OPEN, Policy
from tp_flower.sources.policy_entries import read_policy
from tp_flower.sources.text_values import DETECTED, TextFormat, null_for_missing

if TYPE_CHECKING:
    from tp_flower.sources.databases.session import DatabaseUrl

DEFAULT_NULLS: Final = ("", "NA", "NaN", "nan", "NULL", "null")
DUCKDB = "duckdb"
SQLITE = "sqlite"
OWN_SQL = "sql"  # of the owner, over tables of the site
DEFAULT_CHUNK_ROWS: Final = 50_000
CSV_SUFFIXES: Final = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
PARQUET_SUFFIXES: Final = (".parquet",)

_TYPE_TEXT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*([ ][A-Za-z]+)*(\([0-9, ]+\))?")


@dataclass(frozen=True)
class DatabaseShard:
    """The rows of a shard in a database: a table, or a query that yields them.

    ``order_by`` gives the rows a fixed order; ``fingerprint`` is a query of one value
    that changes when the rows do; ``chunk_rows`` are in memory at a time.
    """

    url: "DatabaseUrl"
    table: tuple[str, ...] | None = None
    sql: str | None = None
    order_by: tuple[str, ...] = ()
    fingerprint: str | None = None
    chunk_rows: int = DEFAULT_CHUNK_ROWS
    is_pushed_down: bool = True

    def __str__(self) -> str:
        """The shard in words, without secrets; different queries differ."""
        if self.table is not None:
            return f"table {'.'.join(self.table) or 'there'} of {self.url}"
        # the owner's SQL does not leave the site
        digest = sha256((self.sql or "").encode()).hexdigest()[:8]
        return f"query {digest} of {self.url}"


@dataclass(frozen=True)
class DerivedShard:
    """The rows of a shard that are the answer to its owner's SELECT, run by DuckDB.

    Attributes:
        file: of an entry with a path, the shard that it is without its SELECT, which
            reads it under the table's own name.
        tables: the shards of the tables that the SELECT reads, by the names that it has
            for them.
    """

    sql: str
    file: "ShardSource | None" = None
    tables: Mapping[str, tuple["ShardSource", ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        """The shard in words; different queries differ."""
        names = [name for name in self.tables if self.file not in self.tables[name]]
        places = [self.file.place] if self.file else []
        # the owner's SQL does not leave the site
        digest = sha256(self.sql.encode()).hexdigest()[:8]
        return f"query {digest} of {', '.join([*places, *names]) or 'no table'}"


@dataclass(frozen=True)
class ShardSource:
    """One shard and where its rows are.

    They are in a file or folder, a data frame or a database, or derived from others.

    Attributes:
        site: the organisation that holds the shard; "<table>-<index>" if not named.
        types: DuckDB types by column, to override the detected types.
        rename: names of the table's columns by their names in the source; all other
            settings are about the table's.
        absent: columns of the table that the source lacks, and that are missing in all
            of its rows.
        token: key of the data frames in this process's registry, or None.
        relation: the table in a DuckDB file, with its schema if one is named; () for
            the only one.
        min_count: categories with fewer rows never leave the site.
        readings: how columns of texts are read, by name, where it is not their best
            reading but what a run or a saved model has chosen for all shards of the
            table.
    """

    table: str
    site: str
    index: int
    path: str | None = None
    types: Mapping[str, str] = field(default_factory=dict)
    token: str | None = None
    nulls: tuple[str, ...] = DEFAULT_NULLS
    relation: tuple[str, ...] | None = None
    database: DatabaseShard | None = None
    derived: DerivedShard | None = None
    min_count: int = 1
    policy: Policy = field(default_factory=Policy)
    text: TextFormat = DETECTED
    rename: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    readings: Mapping[str, TextReading] = field(default_factory=dict)

    @property
    def has_policy(self) -> bool:
        """Whether the owner has written a policy, strict or open."""
        return self.policy is not MISSING

    def check_policy(self) -> None:
        """Raise PolicyError if the owner has not written a policy."""
        if not self.has_policy:
            raise PolicyError(
                f"table {self.table!r} at site {self.site!r} has no policy, and takes "
                "part in nothing without one. Its owner adds to the tables file\n"
                f"  [tables.{entries.quote_toml(self.table)}.policy]\n"
                "  columns = []  # the columns that features may read\n"
                "  keys = []     # the columns that may be joined on\n"
                f'or policy = "{OPEN}" to its table, which allows everything but rows; '
                "`tp-flower policy --tables FILE` writes a first policy"
            )

    def spelled(
        self, key: str, names: Collection[str], columns: Collection[str]
    ) -> list[str]:
        """Return the columns that a setting names in any case; refuse unknown ones."""
        for name in names:
            if spell(name, columns) is None:
                listed = ", ".join(columns)
                raise SourceError(
                    f"{self}: {key!r} names column {name!r}, but the columns are "
                    f"{listed}"
                )
        return [spell(name, columns) or name for name in names]

    def types_of(self, columns: Collection[str]) -> dict[str, str]:
        """Return the owner's types by the columns' own spelling."""
        names = self.spelled(
            "types", self.types, list(dict.fromkeys((*columns, *self.absent)))
        )
        return dict(zip(names, self.types.values(), strict=True))

    def renamed(self, columns: Collection[str]) -> dict[str, str]:
        """Return the names of the table's columns by those of the source's."""
        names = {name: name for name in columns}
        old_names = self.spelled("rename", self.rename, columns)
        names |= zip(old_names, self.rename.values(), strict=True)
        if self.rename and len({name.lower() for name in names.values()}) < len(names):
            raise SourceError(f"{self}: 'rename' gives two columns one name")
        for name in self.absent:
            if present := spell(name, names.values()):
                raise SourceError(
                    f"{self}: 'absent' names column {name!r}, but the source has a "
                    f"column {present!r}: leave it out of 'absent', or 'rename' the "
                    "source's"
                )
        return names

    def read_text(self, sql: str, kind: str, *, is_strict: bool = False) -> str:
        """Return the SQL of a column of texts in a type of the tables file."""
        return self.text.read(
            null_for_missing(sql, self.nulls), kind, is_strict=is_strict
        )

    @property
    def engine(self) -> str:
        """The kind of database that holds the rows; DuckDB reads all others."""
        if self.derived is not None:
            return OWN_SQL
        return self.database.url.name if self.database else DUCKDB

    @property
    def has_order(self) -> bool:
        """Whether every reading has the rows in the same order."""
        return self.database is None and self.derived is None

    @property
    def place(self) -> str:
        """Where the rows are, in words, for the site only."""
        if self.database is not None:
            return str(self.database)
        if self.derived is not None:
            return str(self.derived)
        where = "a data frame"
        if self.path is not None:
            where = self.path
        if self.relation is None:
            return where
        return f"table {'.'.join(self.relation) or 'there'} of {where}"

    def __str__(self) -> str:
        """The shard in words, as error messages name it."""
        return f"table {self.table!r} at site {self.site!r} ({self.place})"

    def redact_place(self, text: str) -> str:
        """Return a message for others, without any path or address."""
        if self.database is not None:
            kind = f"its {self.engine}"
            text = text.replace(self.place, kind).replace(str(self.database.url), kind)
        elif self.derived is not None:
            text = text.replace(self.place, "its query")
            if self.derived.file is not None:
                text = self.derived.file.redact_place(text)
        elif self.path is not None:
            text = text.replace(self.place, "its file").replace(self.path, "its file")
        return text


def read_tables_file(path: str) -> tuple[ShardSource, ...]:
    """Return the shards of a tables file."""
    file = Path(path).expanduser()
    document = _read_toml(file)
    entries.refuse_unknown(document, ("tables",), f"the tables file {file}")
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


def _read_toml(file: Path) -> dict[str, object]:
    """Return the content of a tables file; SourceError if it cannot be read."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "" if file.is_absolute() else f" in {Path.cwd()} (use an absolute path)"
        raise SourceError(f"the tables file {file} does not exist{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"the tables file {file} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise SourceError(f"the tables file {file} is not TOML: {error}") from error


@dataclass(frozen=True)
class _ShardEntry:
    """The keys of a shard in the tables file."""

    path: Text = ""
    site: Text = ""
    types: Mapping[str, str] = field(default_factory=dict)
    nulls: Texts = DEFAULT_NULLS
    uri: Text = ""
    uri_file: Text = ""
    table: Text = ""
    min_count: Count = 1
    policy: Mapping[str, object] = field(default_factory=dict)
    sql: Text = ""
    order_by: Texts = ()
    fingerprint: Text = ""
    chunk_rows: Count = DEFAULT_CHUNK_ROWS
    push_down: Flag = True
    rename: Names = field(default_factory=dict)
    absent: Texts = ()


_SHARD_KEYS: Final = [f.name.replace("_", "-") for f in fields(_ShardEntry)]
_TEXT_KEYS: Final = [f.name for f in fields(TextFormat)]
_LOCATION_KEYS: Final = ("path", "uri", "uri-file")
_CSV_KEYS: Final = ("delimiter", "encoding")
_DATABASE_KEYS: Final = ("order-by", "fingerprint", "chunk-rows", "push-down")


def _table_sources(file: Path, name: str, entry: object) -> list[ShardSource]:
    """Return a table's shards: the entry itself, or those that it lists."""
    where = f"[tables.{name}] of the tables file {file}"
    common = entries.as_table(entry, where)
    entries.refuse_unknown(common, (*_SHARD_KEYS, *_TEXT_KEYS, "shards"), where)
    if "shards" not in common:
        return [_shard_of_file(file, name, 0, common, common)]
    if "path" in common:
        raise SourceError(f"{where} has both 'path' and 'shards': give one of them")
    shards = common["shards"]
    if not isinstance(shards, list) or not shards:
        raise SourceError(f"'shards' in {where} must be a non-empty list of shards")
    common = {key: value for key, value in common.items() if key != "shards"}
    return [
        _shard_of_file(file, name, index, common, shard)
        for index, shard in enumerate(shards)
    ]


def _shard_of_file(
    file: Path, table: str, index: int, common: Mapping[str, object], value: object
) -> ShardSource:
    """Return one shard; keys that it lacks are taken from its table's entry."""
    where = f"shard {index} of table {table!r} in the tables file {file}"
    shard = entries.as_table(value, where)
    return _shard_source(table, index, (common, shard), file.absolute().parent, where)


def shard_in_code(
    table: str,
    index: int,
    site: str,
    value: "str | os.PathLike[str] | Mapping[str, object]",
) -> ShardSource:
    """Return a shard that a program names: a path, a URI, or keys of a tables file.

    Relative paths start at the working directory. A URI alone is that of a database
    with a table of the name ``table``. Dashes in keys may be underscores.

    >>> print(shard_in_code("orders", 0, "shop", "/data/orders.csv"))
    table 'orders' at site 'shop' (/data/orders.csv)
    """
    where = f"shard {index} of table {table!r} at site {site!r}"
    if isinstance(value, Mapping):
        entry = {str(key).replace("_", "-"): item for key, item in value.items()}
    elif "://" in str(value):
        name = table.replace('"', '""')
        entry = {"uri": str(value), "table": f'"{name}"'}
    else:
        entry = {"path": os.fspath(value)}
    if "site" in entry:
        raise SourceError(f"{where} has a 'site', which the dictionary of sites names")
    return _shard_source(table, index, ({}, {**entry, "site": site}), Path.cwd(), where)


def _shard_source(
    table: str,
    index: int,
    levels: tuple[Mapping[str, object], Mapping[str, object]],
    folder: Path,
    where: str,
) -> ShardSource:
    """Return a shard from the entries of its table and of itself, which wins."""
    common, shard = levels
    raw_entry = {**common, **shard}
    entries.refuse_unknown(raw_entry, (*_SHARD_KEYS, *_TEXT_KEYS), where)
    text = entries.read(
        TextFormat, {k: raw_entry[k] for k in _TEXT_KEYS if k in raw_entry}, where
    )
    merged = {
        **{key: value for key, value in raw_entry.items() if key not in _TEXT_KEYS},
        "types": {**_types(common, where), **_types(shard, where)},
        "policy": {},
    }
    entry = entries.read(_ShardEntry, merged, where)
    policy = read_policy(common, shard, where)
    _check_absent(entry.absent, policy.privacy_unit, where)
    _check_one_location(merged, where)
    location = _locate(entry, folder, where)
    _check_keys(raw_entry, location, where)
    relation = _relation(entry, where)
    if location.is_file and not (location.has_rows or relation):
        _check_format(entry, location, where)
        relation = ()  # the only table there
    if location.database == SQLITE and not (relation or entry.sql):
        relation = ()
    source = ShardSource(
        table=table,
        site=entry.site or f"{table}-{index}",
        index=index,
        types=entry.types,
        nulls=entry.nulls,
        min_count=max(entry.min_count, policy.min_count),
        policy=policy,
        path=location.path if location.is_file else None,
        relation=relation if location.is_file else None,
        text=text,
        rename=entry.rename,
        absent=entry.absent,
    )
    if location.is_database:
        database = _database(entry, location.path, relation, where)
        return replace(source, database=database)
    return _derive(source, entry) if entry.sql else source


def _derive(source: ShardSource, entry: _ShardEntry) -> ShardSource:
    """Return the shard of an entry with a SELECT, whose tables are not known yet.

    The keys about columns are those of the file, if there is one, as without the
    SELECT. "" as site stands for that of the SELECT's tables.
    """
    sql = entry.sql.strip().rstrip(";")
    if source.path is None:
        return replace(source, site=entry.site, derived=DerivedShard(sql))
    return ShardSource(
        table=source.table,
        site=entry.site,
        index=source.index,
        min_count=source.min_count,
        policy=source.policy,
        derived=DerivedShard(sql, file=replace(source, policy=MISSING)),
    )


def _check_format(entry: _ShardEntry, location: "_Location", where: str) -> None:
    """Refuse a file of rows that is neither of a known extension nor a database."""
    if not location.database:
        raise SourceError(
            "cannot tell the format of 'path' "
            f"({Path(entry.path).suffix or 'no extension'}) of {where}: known "
            f"extensions are {', '.join((*CSV_SUFFIXES, *PARQUET_SUFFIXES))}; a "
            "folder of Parquet files ends in /, and a file of SQLite or DuckDB is "
            "known by its content"
        )


def _check_one_location(merged: Mapping[str, object], where: str) -> None:
    """Refuse a shard without a path, URI or SELECT, or with two of the former."""
    locations = [key for key in _LOCATION_KEYS if merged.get(key)]
    if not locations and not merged.get("sql"):
        raise SourceError(
            f"{where} has no 'path': give one of {', '.join(_LOCATION_KEYS)}, or the "
            "'sql' that makes it of other tables"
        )
    if len(locations) > 1:
        raise SourceError(
            f"{where} has both {locations[0]!r} and {locations[1]!r}: give one of "
            f"{', '.join(_LOCATION_KEYS)}"
        )


@dataclass(frozen=True)
class _Location:
    """The location of a shard's rows.

    Attributes:
        path: absolute; without a path of its own, the folder of relative paths.
        has_rows: whether the path is of rows, in CSV or Parquet.
        database: the kind of database in the file of the path; "" for none.
        is_file: whether DuckDB reads the path itself.
        is_database: whether the rows are in a database that DuckDB does not read.
    """

    path: str
    has_rows: bool
    database: str
    is_file: bool
    is_database: bool


def _locate(entry: _ShardEntry, folder: Path, where: str) -> _Location:
    """Return where a shard's rows are; refuse the path of a file that is not there."""
    path = str(folder / Path(entry.path).expanduser())
    is_folder = entry.path.endswith(("/", os.sep)) or (
        bool(entry.path) and Path(path).is_dir()
    )
    has_suffix = path.lower().endswith((*CSV_SUFFIXES, *PARQUET_SUFFIXES))
    has_rows = is_folder or has_suffix
    names_table = bool(entry.sql or entry.table)
    if entry.path and names_table and not (has_rows or Path(path).exists()):
        raise SourceError(f"'path' of {where}: there is no file {entry.path!r}")
    database = ""
    if entry.path and not has_rows:
        database = _database_kind(path)
    is_file = bool(entry.path) and database != SQLITE
    is_database = bool(entry.uri or entry.uri_file) or database == SQLITE
    return _Location(path, has_rows, database, is_file, is_database)


def _check_keys(
    raw_entry: Mapping[str, object], location: _Location, where: str
) -> None:
    """Refuse keys that do not go with the kind of source."""
    is_allowed = {
        **dict.fromkeys(_DATABASE_KEYS, location.is_database),
        **dict.fromkeys(_CSV_KEYS, location.is_file and is_csv(location.path)),
        "table": location.is_database or (location.is_file and not location.has_rows),
    }
    for key in raw_entry:
        if not is_allowed.get(key, True):
            purpose = "databases"
            if key in _CSV_KEYS:
                purpose = "CSV files"
            raise SourceError(f"{key!r} of {where} is for {purpose}, which this is not")


def _check_absent(names: Collection[str], unit: Collection[str], where: str) -> None:
    """Refuse names that are equal but for case, and columns of the privacy unit."""
    lower = [name.lower() for name in names]
    for name in lower:
        if not name or lower.count(name) > 1:
            problem = "twice" if name else "which is no column"
            raise SourceError(f"'absent' of {where} names {name!r} {problem}")
    for name in unit:
        # without it all rows would be one unit
        if name.lower() in lower:
            raise SourceError(
                f"'absent' of {where} names {name!r}, which 'privacy-unit' of its "
                "policy needs: a shard without it needs a policy of its own"
            )


def _database_kind(path: str) -> str:
    """Return the kind of database in a file, "" for none, by its first bytes."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(16)
    except OSError:
        return ""
    if head == b"SQLite format 3\0":
        return SQLITE
    return DUCKDB if head[8:12] == b"DUCK" else ""


def _database(
    entry: _ShardEntry, path: str, table: tuple[str, ...] | None, where: str
) -> DatabaseShard:
    """Return the database of a shard, and its table or SQL."""
    # SQLAlchemy is slow to import, and most sites have files
    from tp_flower.sources.databases.session import parse_url

    folder = Path(path)
    if entry.uri:
        url = parse_url(entry.uri, os.environ, folder, where)
    else:
        file = folder / Path(entry.uri_file).expanduser()
        uri = f"sqlite:///{path}" if entry.path else _read_uri(file, where)
        url = parse_url(uri, {}, folder, where)
    if (table is None) == (not entry.sql):
        raise SourceError(f"{where}: a database needs either 'table' or 'sql'")
    return DatabaseShard(
        url=url,
        table=table,
        sql=entry.sql.strip().rstrip(";") or None,
        order_by=entry.order_by,
        fingerprint=entry.fingerprint.strip().rstrip(";") or None,
        chunk_rows=entry.chunk_rows,
        is_pushed_down=entry.push_down,
    )


def _read_uri(file: Path, where: str) -> str:
    """Return the URI that a file holds."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise SourceError(
            f"'uri-file' of {where}: {file} cannot be read: {reason}"
        ) from None
    if "${" in text:
        raise SourceError(
            f"'uri-file' of {where}: {file} must hold the URI, no ${{...}}"
        )
    return text


def _relation(entry: _ShardEntry, where: str) -> tuple[str, ...] | None:
    """Return the parts of a table's name: "schema.table", or "table"."""
    name = entry.table
    if not name:
        return None
    # a name that contains a dot or a quote is written in double quotes
    parts = re.findall(r'"((?:[^"]|"")+)"|([^".]+)', name)
    parts_of_name = [(quoted.replace('""', '"'), bare) for quoted, bare in parts]
    if ".".join(f'"{q}"' if q else bare for q, bare in parts) != name or len(parts) > 3:
        raise SourceError(
            f"'table' of {where} is {name!r}: expected a name, or schema.name"
        )
    return tuple(quoted or bare for quoted, bare in parts_of_name)


def _types(entry: Mapping[str, object], where: str) -> dict[str, str]:
    """Return the owner's types by column; SourceError if one is no type's name."""
    types = entries.as_table(entry.get("types", {}), f"'types' of {where}")
    for column, name in types.items():
        if not isinstance(name, str) or not _TYPE_TEXT.fullmatch(name):
            raise SourceError(
                f"'types' of {where}: {name!r} for column {column!r} is not the name "
                "of a DuckDB type, such as DOUBLE, BIGINT, VARCHAR or TIMESTAMP"
            )
    return {column: str(name) for column, name in types.items()}


def is_csv(path: str) -> bool:
    """Whether a file's name is that of a CSV file."""
    return path.lower().endswith(CSV_SUFFIXES)
