"""The training set of a query as one matrix, made where all tables are at hand.

What a run must equal: the raw tables joined by DuckDB with the very SQL, the same
encoding, the same split. Only the scripts and tests use this; a run never does.

Notation
    N   joined rows, held-out ones included
    d   encoded columns of all tables
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby

import duckdb
import numpy as np
import numpy.typing as npt
import sqlglot
from sqlglot import exp

from strategies.run.sites import HostedShard, Inventory
from strategies.setup.labels import choose_loss, read_labels
from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.duckdb_engine import quote_name
from tp_flower.errors import SourceError
from tp_flower.extraction.extracted import LabelColumn
from tp_flower.extraction.select_plan import (
    TypedColumn,
    as_number,
    comparable,
    kind_of,
)
from tp_flower.features.choice import TableChoice, choose_encoders
from tp_flower.features.columns import CategoricalColumn, FeatureColumn, NumericColumn
from tp_flower.features.encoder import SiteEncoder
from tp_flower.features.fitting import fit
from tp_flower.features.statistics import CountedRows, feature_statistics
from tp_flower.joins.mapping import split_rows
from tp_flower.keyed_hash import KeyedHasher
from tp_flower.learning.losses import Loss
from tp_flower.privacy.key_agreement import GroupSecret
from tp_flower.query import BoundQuery, Fragment, Query
from tp_flower.query.parsing import is_label
from tp_flower.randomness import Stream, generator
from tp_flower.settings import Settings
from tp_flower.sources.shards import (
    ShardSource,
    column_types,
    create_view,
    describe,
    flights_sources,
    load_tables,
)

IntArray = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Item = tuple[str, str]
"""A SELECT item: the table that it is of, and the name of the feature."""

LABEL: Item = ("", "label")


@dataclass(frozen=True, eq=False)
class Column:
    """A column and its kind of value: number, boolean, time or text."""

    kind: str
    values: FeatureColumn


@dataclass(frozen=True, eq=False)
class JoinedTable:
    """The encoded training set, ordered by the rows of the tables.

    Attributes:
        features: float32 (N, d), the tables' blocks in the order of the query.
        columns: the columns of each table in ``features``.
        labels: (N,), numbers or class indices.
        rows: by table, the row behind each joined row, counted over its shards
            before any filter; (N,).
    """

    features: Float32Array
    columns: Mapping[str, slice]
    labels: FloatArray
    is_test: BoolArray
    rows: Mapping[str, IntArray]
    loss: Loss

    def part(self, *, test: bool) -> tuple[Float32Array, FloatArray]:
        """Return features and labels of the training or of the held-out rows."""
        chosen = self.is_test == test
        return self.features[chosen], self.labels[chosen]


def read_sources(tables: str) -> tuple[ShardSource, ...]:
    """Return all shards of a tables file, or of the built-in flights for ""."""
    return load_tables(tables) if tables else flights_sources()


def join_tables(
    query: Query, settings: Settings, sources: Sequence[ShardSource]
) -> JoinedTable:
    """Join, encode and split all shards as the run with these settings does.

    Raises:
        TPFlowerError: the query does not fit the tables or the label not the task.
        duckdb.Error: DuckDB cannot run the query.
    """
    schemas = _inventory(sources).schemas()
    bound = query.bind(schemas)
    items = select_items(query, schemas)
    with closing(duckdb.connect()) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        _load(connection, sources, {fragment.name for fragment in bound.fragments})
        values, rows = _run_query(connection, query, bound, items)
        passing, held_out = _split(connection, bound, settings)
        choices = choose_encoders(
            settings.encoders,
            {f.table: [item.name for item in f.features] for f in bound.fragments},
            settings.max_categories,
        )
        encoders = {
            fragment.table: fit_encoder(
                connection,
                fragment,
                choices[fragment.table],
                CountedRows(
                    simulated_hasher(settings.seed),
                    rows=~held_out if fragment.label is not None else None,
                ),
            )
            for fragment in bound.fragments
        }
    label_rows = np.searchsorted(passing, rows[bound.label_table])
    is_test = held_out[label_rows]
    labels, loss = read_label(values.pop(LABEL), is_test, settings)
    features, columns = encode(encoders, values)
    return JoinedTable(features, columns, labels, is_test, rows, loss)


def _inventory(sources: Sequence[ShardSource]) -> Inventory:
    """Describe the shards as their sites would."""
    shards = []
    for position, source in enumerate(sources):
        schema = describe(source)
        shards.append(
            HostedShard(
                table=source.table,
                site=source.site,
                index=source.index,
                node=0,
                position=position,
                columns=dict(schema.columns),
                rows=schema.rows,
                all_null=list(schema.all_null),
            )
        )
    return Inventory(tuple(shards))


def _load(
    connection: duckdb.DuckDBPyConnection,
    sources: Sequence[ShardSource],
    wanted: set[str],
) -> None:
    """Create every table from its shards, in the run's order of shards."""
    ordered = sorted(sources, key=lambda s: (s.table, s.index, s.site))
    for table, shards in groupby(ordered, key=lambda source: source.table):
        if table not in wanted:
            continue
        pieces = []
        for number, source in enumerate(shards):
            create_view(connection, source)
            piece = quote_name(f"{table}, shard {number}")
            connection.execute(f"CREATE TABLE {piece} AS SELECT * FROM shard")
            connection.execute("DROP VIEW shard")
            # the type of a column without values must not decide that of the union
            empty = describe(source).all_null
            nulls = ", ".join(f"NULL AS {quote_name(name)}" for name in empty)
            columns = f"* REPLACE ({nulls})" if nulls else "*"
            pieces.append(f"SELECT {columns} FROM {piece}")
        union = " UNION ALL BY NAME ".join(pieces)
        connection.execute(f"CREATE TABLE {quote_name(table)} AS {union}")


def select_items(query: Query, schemas: Mapping[str, Mapping[str, str]]) -> list[Item]:
    """Return the table and the feature of each SELECT item, in order."""
    statement = query.statement
    label = next(item for item in statement.items if is_label(item))
    names = {
        fragment.table: iter([feature.name for feature in fragment.features])
        for fragment in query.bind(schemas).fragments
    }
    items = []
    for item in statement.items:
        if item is label:
            items.append(LABEL)
            continue
        # bound alone, the item shows whose it is
        alone = replace(query, statement=replace(statement, items=(label, item)))
        owner = next(f.table for f in alone.bind(schemas).fragments if f.features)
        items.append((owner, next(names[owner])))
    return items


def _run_query(
    connection: duckdb.DuckDBPyConnection,
    query: Query,
    bound: BoundQuery,
    items: Sequence[Item],
) -> tuple[dict[Item, Column], dict[str, IntArray]]:
    """Run the SQL with row ids added; return the values by item, and the rows."""
    tree = sqlglot.parse_one(query.to_sql(), dialect="duckdb").assert_is(exp.Select)
    for table in bound.tables:
        tree = tree.select(exp.column("rowid", table=table, quoted=True), copy=False)
    ids = {table: f"c{len(items) + k}" for k, table in enumerate(bound.tables)}
    others = [ids[table] for table in bound.tables if table != bound.label_table]
    order = ", ".join([ids[bound.label_table], *others])
    columns = read_columns(
        connection, tree.sql(dialect="duckdb"), len(items) + len(ids), order
    )
    numbers = connection.execute(f"SELECT {', '.join(ids.values())} FROM picked")
    rows = numbers.fetchnumpy()
    return (
        dict(zip(items, columns, strict=False)),
        {table: np.asarray(rows[name]) for table, name in ids.items()},
    )


def read_columns(
    connection: duckdb.DuckDBPyConnection, select: str, width: int, order: str = ""
) -> list[Column]:
    """Return the columns of a SELECT of so many items; ``order`` is by c0, c1, ...

    They stay in table ``picked`` of the connection.

    Raises:
        SourceError: a column is of a type that cannot be used.
    """
    names = [f"c{k}" for k in range(width)]
    sorting = f" ORDER BY {order}" if order else ""
    connection.execute(
        f"CREATE OR REPLACE TEMP TABLE picked AS SELECT * FROM ({select}) "
        f"AS result({', '.join(names)}){sorting}"
    )
    columns = []
    for name, duckdb_type in column_types(connection, "SELECT * FROM picked").items():
        kind = kind_of(duckdb_type)
        if kind is None:
            raise SourceError(f"a value of type {duckdb_type} cannot be used")
        value = TypedColumn(name, duckdb_type, kind)
        if kind == "text":
            columns.append(Column(kind, _text(connection, value)))
            continue
        numbers = connection.execute(
            f"SELECT {as_number(value)} AS number FROM picked"
        ).fetchnumpy()
        columns.append(Column(kind, NumericColumn(np.asarray(numbers["number"]))))
    return columns


def _text(
    connection: duckdb.DuckDBPyConnection, value: TypedColumn
) -> CategoricalColumn:
    """Number the distinct texts in their order: as an ENUM, which DuckDB does fast."""
    text = comparable(value)
    connection.execute(
        f"CREATE TYPE texts AS ENUM (SELECT DISTINCT {text} AS text FROM picked "
        "WHERE text IS NOT NULL ORDER BY text)"
    )
    codes = connection.execute(
        f"SELECT CAST(coalesce(enum_code(CAST({text} AS texts)), -1) AS INTEGER) "
        "AS code FROM picked"
    ).fetchnumpy()["code"]
    names = connection.execute("SELECT enum_range(NULL::texts)").fetchall()[0][0]
    connection.execute("DROP TYPE texts")
    return CategoricalColumn(np.asarray(codes), tuple(names))


def _split(
    connection: duckdb.DuckDBPyConnection, bound: BoundQuery, settings: Settings
) -> tuple[IntArray, BoolArray]:
    """Return the label table's rows that pass its filters, and which are held out."""
    fragment = bound.fragment(bound.label_table)
    passing = connection.execute(
        f"SELECT rowid AS row FROM {quote_name(fragment.name)} "
        f"WHERE {_condition(fragment)} ORDER BY rowid"
    ).fetchnumpy()["row"]
    rng = generator(settings.seed, Stream.SPLIT)
    return np.asarray(passing), split_rows(len(passing), settings.test_fraction, rng)


def _condition(fragment: Fragment) -> str:
    return " AND ".join(f"({text})" for text in fragment.filters) or "true"


def simulated_hasher(seed: int) -> KeyedHasher:
    """Return the hasher of all sites of a simulation with this seed."""
    return KeyedHasher(GroupSecret.of_simulation(seed).value)


def fit_encoder(
    connection: duckdb.DuckDBPyConnection,
    fragment: Fragment,
    choice: TableChoice,
    sample: CountedRows,
) -> SiteEncoder:
    """Fit the encoder to a whole table, or to these of its rows after the filters."""
    features = fragment.features
    if not features:
        return fit(fragment.table, {}).at_site(sample.hasher)
    # rowid keeps the order of the table, which ``rows`` is in
    listed = ", ".join(["rowid", *(feature.sql for feature in features)])
    select = (
        f"SELECT {listed} FROM {quote_name(fragment.name)} WHERE {_condition(fragment)}"
    )
    _, *columns = read_columns(connection, select, len(features) + 1, order="c0")
    names = [feature.name for feature in features]
    return encoder_of(choice, dict(zip(names, columns, strict=True)), sample)


def encoder_of(
    choice: TableChoice, columns: Mapping[str, Column], sample: CountedRows
) -> SiteEncoder:
    """Fit a table's encoder to its columns, by feature."""
    statistics = {
        name: feature_statistics(choice, name, column.kind, column.values, sample)
        for name, column in columns.items()
    }
    return fit(choice.table, statistics).at_site(sample.hasher)


def read_label(
    label: Column, is_test: BoolArray, settings: Settings
) -> tuple[FloatArray, Loss]:
    """Return the labels as numbers or class indices, and the task's loss."""
    categories: Sequence[str] = ()
    if isinstance(label.values, CategoricalColumn):
        codes, categories = label.values.codes, label.values.categories
        values = np.where(codes < 0, np.nan, codes)
    else:
        values = np.asarray(label.values.values, np.float64)
    column = LabelColumn(label.kind, values, tuple(categories))
    labels = read_labels([column], settings.task)
    return labels.values, choose_loss(labels, labels.values[~is_test], settings)


def encode(
    encoders: Mapping[str, SiteEncoder],
    values: Mapping[Item, Column],
    rows: IntArray | None = None,
) -> tuple[Float32Array, dict[str, slice]]:
    """Return these rows encoded, or all of them, and which columns are whose."""
    total = next(iter(values.values())).values.rows if rows is None else len(rows)
    widths = {table: fitted.encoder.width for table, fitted in encoders.items()}
    features = np.zeros((total, sum(widths.values())), dtype=np.float32)
    columns: dict[str, slice] = {}
    left = 0
    for table, encoder in encoders.items():
        raw = {name: value.values for (t, name), value in values.items() if t == table}
        columns[table] = slice(left, left + widths[table])
        if widths[table]:
            encoder.transform(raw, out=features[:, columns[table]], rows=rows)
        left += widths[table]
    return features, columns
