"""The training set of a query as one matrix, made where all tables are at hand.

`join_tables` makes what a run must equal: the raw tables joined by DuckDB with the very
SQL, the same encoding, the same split. `join_frames`, `encode_dense`, `encode_sparse`
are the quick way, as one would train without tp_flower. Runs use nothing of this.

Notation
    N   joined rows, held-out ones included
    d   encoded columns of all tables
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import duckdb
import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import scipy.sparse as sp
import sqlglot
from sqlglot import exp

from strategies.setup.labels import choose_objective, read_labels
from tp_flower import splits
from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.duckdb_engine import new_engine, quote_name
from tp_flower.errors import SourceError
from tp_flower.extraction.extracted import ExtractedKey, LabelColumn
from tp_flower.extraction.select_plan import (
    TypedColumn,
    as_number,
    canonical_text,
    comparable_sql,
    kind_of,
)
from tp_flower.features.choice import TableChoice, choose_encoders
from tp_flower.features.columns import CategoricalColumn, FeatureColumn, NumericColumn
from tp_flower.features.encoder import SiteEncoder
from tp_flower.features.encodings import CategoryEncoding
from tp_flower.features.fitting import fit
from tp_flower.features.statistics import CountedRows, feature_statistics
from tp_flower.keyed_hash import KeyedHasher
from tp_flower.objectives import Objective
from tp_flower.privacy.key_agreement import GroupSecret
from tp_flower.query import BoundQuery, Fragment, Query
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
Connection = duckdb.DuckDBPyConnection


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
        objective: the loss of the joined rows, all of which count alike.
        subset: (N,), whether a row is trained on, validates or is tested on.
        rows: by table, the row behind each joined row, counted over its shards
            before any filter, -1 for none; (N,).
        categorical: the columns of ``features`` that are codes of categories.
    """

    features: Float32Array
    columns: Mapping[str, slice]
    objective: Objective
    subset: splits.SubsetArray
    rows: Mapping[str, IntArray]
    categorical: Sequence[int] = ()

    @property
    def is_test(self) -> BoolArray:
        """Which joined rows are tested on, (N,)."""
        is_test: BoolArray = self.subset == splits.TEST
        return is_test

    @property
    def labels(self) -> FloatArray:
        """Numbers or class indices, (N,)."""
        return self.objective.target.numbers

    def part(self, *, test: bool) -> tuple[Float32Array, FloatArray]:
        """Return features and labels of the training or of the held-out rows."""
        chosen = self.subset == (splits.TEST if test else splits.TRAIN)
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
    with new_engine() as connection:
        schemas = dict(_load(connection, sources, query.names))
        bound = query.bind(schemas, split=settings.split.columns)
        label, rows = _run_query(connection, query, bound.tables, bound.label_table)
        read = {f.table: _read_fragment(connection, f) for f in bound.fragments}
        passing, _ = read[bound.label_table]
        subset, _ = _split(connection, bound, settings, rows, passing)
    names = {table: list(values) for table, (_, values) in read.items()}
    choices = choose_encoders(
        settings.encoders,
        names,
        settings.max_categories,
        for_trees=settings.method.takes_codes,
    )
    hasher, blocks, columns, left = simulated_hasher(settings.seed), [], {}, 0
    categorical: list[int] = []
    for table, (ids, values) in read.items():
        # a row counts as often as it is joined to train on
        row_of = rows[table][(subset == splits.TRAIN) & (rows[table] >= 0)]
        counts = np.bincount(np.searchsorted(ids, row_of), minlength=len(ids))
        sample = CountedRows(hasher, rows=counts > 0, counts=counts[counts > 0])
        encoder = fit_encoder(choices[table], values, sample)
        width = encoder.encoder.width
        # a last row of zeros is that of joined rows without a row of this table
        encoded = np.zeros((len(ids) + 1, width), np.float32)
        encoder.transform(_raw(values), out=encoded[:-1])
        place = np.searchsorted(ids, rows[table])
        blocks.append(encoded[np.where(rows[table] < 0, len(ids), place)])
        categorical += [left + place for place in encoder.encoder.coded]
        columns[table] = slice(left, left := left + width)
    objective = read_label(label, subset != splits.TRAIN, settings)
    features = np.hstack(blocks)
    return JoinedTable(features, columns, objective, subset, rows, categorical)


def _split(
    connection: Connection,
    bound: BoundQuery,
    settings: Settings,
    rows: Mapping[str, IntArray],
    passing: IntArray,
) -> tuple[splits.SubsetArray, BoolArray]:
    """Return the subset of each joined row, and which label rows are held out."""
    labelled = np.searchsorted(passing, rows[bound.label_table])
    if not bound.split_table:
        rng = generator(settings.seed, Stream.SPLIT)
        of_rows = splits.split_at_random(
            np.ones(len(passing), np.bool_), _shares(settings), rng
        )
        return of_rows[labelled], of_rows != splits.TRAIN
    key = _split_key(connection, bound.fragments_of(bound.split_table)[0])
    # the last value is that of a missing one, and of joined rows without a row
    codes = np.append(key.codes, -1)[rows[bound.split_table]]
    if settings.split.kind == splits.GROUP:
        hasher = simulated_hasher(settings.seed).purpose(f"split {settings.seed}")
        of_values = splits.split_by_hash(
            hasher.hash_texts(key.texts), _shares(settings)
        )
        subset = np.append(of_values, np.uint8(splits.TRAIN))[codes]
    else:
        times = np.append(key.numbers(), np.nan)[codes]
        subset = splits.split_by_order(times, _shares(settings))
    held_out = np.zeros(len(passing), np.bool_)
    held_out[labelled] = True
    held_out[labelled[subset == splits.TRAIN]] = False
    return subset, held_out


def _shares(settings: Settings) -> splits.Shares:
    return splits.Shares(settings.test_fraction, settings.validation_share)


def _split_key(connection: Connection, fragment: Fragment) -> ExtractedKey:
    """Return the last key of all rows of a table, as a site extracts it."""
    select = f"SELECT {', '.join(fragment.keys[-1])} FROM {quote_name(fragment.name)}"
    typed = [
        TypedColumn(f"k{number}", kind_name, kind_of(kind_name) or "text")
        for number, (_, kind_name, *_) in enumerate(
            connection.execute(f"DESCRIBE {select}").fetchall()
        )
    ]
    names = ", ".join(column.sql for column in typed)
    values = ", ".join(f"{comparable_sql(column)} AS {column.sql}" for column in typed)
    text = canonical_text(typed, null_is_value=False)
    texts = connection.sql(
        f"SELECT {text} AS t FROM (SELECT {values} FROM ({select}) AS result({names}))"
    ).to_arrow_table()["t"]
    coded = texts.combine_chunks().dictionary_encode()
    codes = np.asarray(coded.indices.fill_null(-1))
    kind = "+".join(column.kind for column in typed)
    return ExtractedKey(codes, coded.dictionary, kind)


def _load(
    connection: Connection, sources: Sequence[ShardSource], wanted: Sequence[str]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Create the wanted tables from their shards, in the run's order of shards.

    Yields the columns and types of each table.
    """
    lower = {name.lower() for name in wanted}
    ordered = sorted(sources, key=lambda s: (s.table, s.index, s.site))
    for table, shards in groupby(ordered, key=lambda source: source.table):
        if table.lower() not in lower:
            continue
        pieces, names = [], []
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
            names.append(column_types(connection, pieces[-1]))
        # a query can read the columns that all shards have
        others = [{name.lower() for name in of_shard} for of_shard in names]
        common = [
            name for name in names[0] if all(name.lower() in other for other in others)
        ]
        columns = ", ".join(map(quote_name, common))
        union = " UNION ALL BY NAME ".join(
            f"SELECT {columns} FROM ({p})" for p in pieces
        )
        connection.execute(f"CREATE TABLE {quote_name(table)} AS {union}")
        yield table, column_types(connection, f"SELECT * FROM {quote_name(table)}")


def _run_query(
    connection: Connection, query: Query, tables: Sequence[str], label_table: str
) -> tuple[Column, dict[str, IntArray]]:
    """Return the label and the tables' row ids of the SQL's rows, ordered by these."""
    tree, label = _parse(query)
    ids = [exp.column("rowid", table=table, quoted=True) for table in tables]
    tree = tree.select(tree.selects[label], *ids, append=False)
    # c0 is the label, c1, c2, ... are the row ids
    first = tables.index(label_table) + 1
    order = [first, *(k for k in range(1, len(ids) + 1) if k != first)]
    values, *rows = read_columns(
        connection, tree.sql(dialect="duckdb"), ", ".join(f"c{k}" for k in order)
    )
    return values, dict(zip(tables, map(_row_ids, rows), strict=True))


def _parse(query: Query) -> tuple[exp.Select, int]:
    """Return the parsed SELECT, and which of its items is the label."""
    tree = sqlglot.parse_one(query.to_sql(), dialect="duckdb").assert_is(exp.Select)
    names = [item.alias_or_name.lower() for item in tree.selects]
    return tree, names.index("label")


def _row_ids(column: Column) -> IntArray:
    values = np.asarray(column.values.values)  # type: ignore[union-attr]
    return np.where(np.isnan(values), -1, values).astype(np.int64)


def _read_fragment(
    connection: Connection, fragment: Fragment
) -> tuple[IntArray, dict[str, Column]]:
    """Return a table's row ids that pass its filters, and their features by name."""
    items = ", ".join(["rowid", *(feature.sql for feature in fragment.features)])
    condition = " AND ".join(f"({text})" for text in fragment.filters) or "true"
    select = f"SELECT {items} FROM {quote_name(fragment.name)} WHERE {condition}"
    ids, *columns = read_columns(connection, select, order="c0")
    names = [feature.name for feature in fragment.features]
    return _row_ids(ids), dict(zip(names, columns, strict=True))


def read_columns(connection: Connection, select: str, order: str = "") -> list[Column]:
    """Return the columns of a SELECT; ``order`` is by c0, c1, ...

    Raises:
        SourceError: a column is of a type that cannot be used.
    """
    described = connection.execute(f"DESCRIBE {select}").fetchall()
    columns = []
    for number, (_, duckdb_type, *_) in enumerate(described):
        kind = kind_of(duckdb_type)
        if kind is None:
            raise SourceError(f"a value of type {duckdb_type} cannot be used")
        columns.append(TypedColumn(f"c{number}", duckdb_type, kind))
    names = ", ".join(column.sql for column in columns)
    items = ", ".join(
        f"{comparable_sql(column) if column.kind == 'text' else as_number(column)} AS "
        f"{column.sql}"
        for column in columns
    )
    sorting = f" ORDER BY {order}" if order else ""
    table = connection.sql(
        f"SELECT {items} FROM ({select}) AS result({names}){sorting}"
    ).to_arrow_table()
    return [
        Column(column.kind, _from_arrow(table[column.sql].combine_chunks()))
        for column in columns
    ]


def _from_arrow(values: pa.Array) -> FeatureColumn:
    """Return numbers, or texts with their distinct values sorted."""
    if not pa.types.is_string(values.type):
        return NumericColumn(np.asarray(values))
    coded = values.dictionary_encode()
    order = np.asarray(pc.sort_indices(coded.dictionary))
    # -1, which is the last one, stays what it is
    place = np.append(np.argsort(order), -1).astype(np.int32)
    codes = np.asarray(coded.indices.fill_null(-1))
    return CategoricalColumn(place[codes], coded.dictionary.take(order))


def simulated_hasher(seed: int) -> KeyedHasher:
    """Return the hasher of all sites of a simulation with this seed."""
    return KeyedHasher(GroupSecret.of_simulation(seed).value)


def fit_encoder(
    choice: TableChoice, columns: Mapping[str, Column], sample: CountedRows
) -> SiteEncoder:
    """Fit a table's encoder to its columns, by feature."""
    statistics = {
        name: feature_statistics(choice, name, column.kind, column.values, sample)
        for name, column in columns.items()
    }
    return fit(choice.table, statistics).for_site(sample.hasher)


def read_label(label: Column, is_test: BoolArray, settings: Settings) -> Objective:
    """Return the task's objective of all joined rows."""
    categories: Sequence[str] = ()
    if isinstance(label.values, CategoricalColumn):
        codes, categories = label.values.codes, label.values.texts.to_pylist()
        values = np.where(codes < 0, np.nan, codes)
    else:
        values = np.asarray(label.values.values, np.float64)
    labels = read_labels(
        [LabelColumn(label.kind, values, tuple(categories))], settings, "label"
    )
    return choose_objective(labels, ~is_test, settings)


def join_frames(
    query: Query, tables: Mapping[str, pd.DataFrame], mark: exp.Column
) -> tuple[dict[str, Column], Column, BoolArray]:
    """Join data frames by DuckDB.

    Returns the features and the label of the joined rows, and where ``mark``, a column
    of booleans besides, is true.
    """
    with new_engine() as connection:
        for table, frame in tables.items():
            connection.register(table, frame)
        tree, label = _parse(query)
        columns = read_columns(connection, tree.select(mark).sql(dialect="duckdb"))
    marked = np.asarray(columns.pop().values.values)  # type: ignore[union-attr]
    labels = columns.pop(label)
    return {f"c{k}": column for k, column in enumerate(columns)}, labels, marked > 0.0


def fit_joined(columns: Mapping[str, Column], rows: BoolArray) -> SiteEncoder:
    """Fit the default encoders to these of the joined rows."""
    choice = choose_encoders((), {"joined": list(columns)})["joined"]
    return fit_encoder(choice, columns, CountedRows(simulated_hasher(0), rows=rows))


def encode_dense(
    encoder: SiteEncoder, columns: Mapping[str, Column], rows: BoolArray
) -> Float32Array:
    """Return these joined rows as a float32 matrix (N, d)."""
    chosen = {name: values.take(rows) for name, values in _raw(columns).items()}
    return encoder.transform(chosen)


def encode_sparse(
    encoder: SiteEncoder, columns: Mapping[str, Column], rows: BoolArray
) -> sp.csr_matrix:
    """Return the same matrix as CSR: one non-zero per category, numbers as they are."""
    chosen = np.flatnonzero(rows)
    blocks = []
    for encoding in encoder.encoder.encodings:
        name, column = encoding.name, columns[encoding.name].values
        alone = replace(encoder.encoder, encodings=(encoding,))
        one = SiteEncoder(alone, encoder.keys)
        is_text = isinstance(encoding, CategoryEncoding)
        if not is_text or not isinstance(column, CategoricalColumn):
            blocks.append(sp.csr_matrix(one.transform({name: column.take(chosen)})))
            continue
        # row k of this small matrix is how local category k is encoded
        codes = np.append(np.arange(len(column.texts)), -1).astype(np.int32)
        categories = CategoricalColumn(codes, column.texts)
        small = sp.csr_matrix(one.transform({name: categories}))
        blocks.append(small[column.codes[chosen]])
    return sp.hstack(blocks, format="csr", dtype=np.float32)


def _raw(columns: Mapping[str, Column]) -> dict[str, FeatureColumn]:
    return {name: column.values for name, column in columns.items()}
