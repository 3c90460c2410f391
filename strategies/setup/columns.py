"""The columns of the query's tables: their types, and how those of text files are read.

Where times may have two formats, a run says which one it takes, and refuses to join,
group or split by the column until its owner has said which is right. A key or a group
is compared as text where texts that differ would be equal as numbers or times.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlglot import exp

from strategies.run.sites import HostedShard, Inventory
from strategies.setup.column_agreement import AgreedColumn, ShardColumn, agree_on_column
from tp_flower.errors import SchemaError
from tp_flower.protocol.text_readings import AS_TEXT, TextReading
from tp_flower.query import BoundQuery, Fragment
from tp_flower.query.expressions import parse_expression
from tp_flower.query.fragment import Role
from tp_flower.query.reads import reads
from tp_flower.query.scope import TableSchema
from tp_flower.sources.entries import quote_toml, type_setting

ColumnName = tuple[str, str]
"""A table as sites call it, and its column, both in lower case."""

TrainedReadings = Mapping[ColumnName, TextReading]
"""How a saved model has read the columns."""

Bind = Callable[[Mapping[str, TableSchema]], BoundQuery]
_COMPARED = (Role.KEY, Role.GROUP)


@dataclass(frozen=True)
class Columns:
    """The columns of the query's tables.

    Attributes:
        schemas: by table, the types of the columns that all its shards have.
        agreed: the columns, as their shards read them.
    """

    schemas: Mapping[str, TableSchema]
    agreed: Mapping[ColumnName, AgreedColumn]

    @property
    def unread(self) -> list[str]:
        """Why queries cannot read columns that some shards have."""
        return [
            text for schema in self.schemas.values() for text in schema.unread.values()
        ]

    def readings_of(self, shard: HostedShard) -> dict[str, TextReading]:
        """Return how the columns of texts of a shard are read, by their names there."""
        readings = {}
        shard_key = (shard.node, shard.position)
        for name in shard.texts:
            agreed = self.agreed.get((shard.table.lower(), name.lower()))
            if agreed is not None and shard_key in agreed.readings:
                readings[name] = agreed.readings[shard_key]
        return readings

    def formats_of(self, table: str) -> dict[str, str]:
        """Return the formats of a table's days by column, except those in ISO 8601."""
        formats = {
            n: self.agreed[table.lower(), n.lower()].format for n in self.schemas[table]
        }
        return {name: day_format for name, day_format in formats.items() if day_format}


def agree(
    inventory: Inventory, trained: TrainedReadings, as_text: Collection[ColumnName] = ()
) -> Columns:
    """Return the columns of every table on which its shards agree.

    Columns of texts are read as a saved model has read them, if all texts fit, and the
    columns in ``as_text`` as texts.
    """
    schemas: dict[str, TableSchema] = {}
    agreed: dict[ColumnName, AgreedColumn] = {}
    for table in inventory.tables:
        shards = inventory.shards_of(table)
        schema = TableSchema()
        unread = _unread_reasons(shards)
        for column in _group_by_name(shards):
            name = (table.lower(), column[0].name.lower())
            if name[1] in unread:
                continue
            try:
                _check_everywhere(column, shards)
                required = trained.get(name)
                if name in as_text:
                    required = AS_TEXT
                agreed[name] = agree_on_column(column, required)
            except SchemaError as error:
                unread[name[1]] = str(error)
            else:
                schema[column[0].name] = agreed[name].type
        unlisted = {name.lower() for shard in shards for name in shard.unlisted}
        schema.unread = unread
        schema.unlisted = frozenset(name for name in schema if name.lower() in unlisted)
        schema.approves_runs = any(shard.rows is None for shard in shards)
        schema.places = frozenset((shard.node, shard.site) for shard in shards)
        schemas[table] = schema
    return Columns(schemas, agreed)


def _unread_reasons(shards: Sequence[HostedShard]) -> dict[str, str]:
    """Return why some site cannot read a column, by the name in lower case."""
    return {
        name.lower(): (
            f"table {shard.table!r}: column {name!r} at site {shard.site!r} {reason}"
        )
        for shard in reversed(shards)
        for name, reason in shard.unread.items()
    }


def _group_by_name(shards: Sequence[HostedShard]) -> list[list[ShardColumn]]:
    """Return each column of a table at the shards that have it, in any spelling."""
    columns: dict[str, list[ShardColumn]] = {}
    for shard in shards:
        for name in shard.columns:
            columns.setdefault(name.lower(), []).append(ShardColumn(shard, name))
    return list(columns.values())


def _check_everywhere(
    column: Sequence[ShardColumn], shards: Sequence[HostedShard]
) -> None:
    """Refuse a column that some shard lacks."""
    first = column[0]
    having = [item.shard for item in column]
    lacking = [repr(s.site) for s in shards if all(s is not other for other in having)]
    if lacking:
        raise SchemaError(
            f"table {first.shard.table!r}: column {first.name!r} is at site "
            f"{first.shard.site!r}, but not at {', '.join(lacking)}: another name of "
            "it there is changed in the tables file (rename = { theirs = "
            f"{quote_toml(first.name)} }}); if there is none, absent = "
            f"[{quote_toml(first.name)}] there makes it missing in all of its rows"
        )


def bind_columns(
    bind: Bind, inventory: Inventory, trained: TrainedReadings | None = None
) -> tuple[BoundQuery, Columns]:
    """Return the query over the sites' columns, and the columns.

    A SchemaError names a key, a group or a split by times of two formats.
    """
    as_text: set[ColumnName] = set()
    while True:
        columns = agree(inventory, trained or {}, as_text)
        bound = bind(columns.schemas)
        merging = {name for name in _compared_columns(bound) if _merges(columns, name)}
        joined_text = _add_joined(bound, as_text | merging)
        if joined_text <= as_text:
            break
        as_text |= joined_text
    for fragment in bound.fragments:
        for read in reads(fragment):
            agreed = columns.agreed.get((fragment.name.lower(), read.column.lower()))
            if agreed is not None and agreed.other_formats and read.role in _COMPARED:
                formats = " and ".join((agreed.format, *agreed.other_formats))
                raise SchemaError(
                    f"table {fragment.name!r}: the query joins, groups or splits by "
                    f"the days of column {read.column!r}, all of which fit the formats "
                    f"{formats}, as other days. {_remedy(read.column, agreed)}"
                )
    return bound, columns


def _merges(columns: Columns, name: ColumnName) -> bool:
    """Return whether texts of a column that differ are read as equal values."""
    agreed = columns.agreed.get(name)
    return agreed is not None and bool(agreed.merges_as) and agreed.type != AS_TEXT.type


def _remedy(column: str, agreed: AgreedColumn) -> str:
    """Return the advice on a date column whose format is ambiguous."""
    formats = (agreed.format, *agreed.other_formats)
    choices = " or ".join(f"dates = {quote_toml(item)}" for item in formats)
    return (
        f"Name the right one in the tables file, {choices}; "
        f"{type_setting(column)} says that they are no days"
    )


def reading_warnings(bound: BoundQuery, columns: Columns) -> Iterator[str]:
    """Yield how the query's columns are read where their reading is uncertain."""
    read = {
        (fragment.name, column.column)
        for fragment in bound.fragments
        for column in reads(fragment)
    }
    compared = _compared_columns(bound)
    for table, column in sorted(read):
        name = (table.lower(), column.lower())
        agreed = columns.agreed.get(name)
        if agreed is None:
            continue
        if agreed.other_formats:
            yield (
                f"table {table!r}: the days of column {column!r} are read as "
                f"{agreed.format}, but all of them fit "
                f"{' and '.join(agreed.other_formats)}, too, as other days. "
                f"{_remedy(column, agreed)}"
            )
        if agreed.merges_as and name in compared and agreed.type == AS_TEXT.type:
            yield (
                f"table {table!r}: column {column!r} is compared as text, as some of "
                "its texts differ but are equal as values, like 1.1 and 1.10; in the "
                f"tables file {type_setting(column, agreed.merges_as)} compares its "
                "values"
            )


def _compared_columns(bound: BoundQuery) -> set[ColumnName]:
    """Return the columns that are keys or groups themselves, not in an expression."""
    return {
        (fragment.name.lower(), read.column.lower())
        for fragment in bound.fragments
        for read in reads(fragment)
        if read.role in _COMPARED and read.is_bare
    }


def _add_joined(bound: BoundQuery, names: Collection[ColumnName]) -> set[ColumnName]:
    """Return columns, and the columns that joins compare them with."""
    connected: set[ColumnName | None] = set(names)
    for join in bound.joins:
        for left in bound.fragments_of(join.left):
            for right in bound.fragments_of(join.right):
                key_pairs = zip(
                    left.keys[join.left_key], right.keys[join.right_key], strict=True
                )
                for left_sql, right_sql in key_pairs:
                    ends = {
                        _hosted_column(left, left_sql),
                        _hosted_column(right, right_sql),
                    }
                    if ends & connected:
                        connected |= ends
    return {name for name in connected if name is not None}


def _hosted_column(fragment: Fragment, sql: str) -> ColumnName | None:
    """Return the column of the hosted table that an expression is; None if none."""
    tree = parse_expression(sql, "join key").unnest()
    if isinstance(tree, exp.Column) and fragment.subquery is not None:
        inner = fragment.subquery.sources.get(tree.name)
        if inner is None:
            return None
        tree = parse_expression(
            inner, "join key", aggregates=True, windows=True
        ).unnest()
    if isinstance(tree, exp.Column):
        return (fragment.name.lower(), tree.name.lower())
    return None
