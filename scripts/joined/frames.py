"""Data frames joined and encoded the quick way, as one would without tp_flower.

Notation
    N   joined rows        d   encoded columns of all tables
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import duckdb
import numpy as np
import scipy.sparse as sp
import sqlglot
from sqlglot import exp

from scripts.joined.centralized import (
    Column,
    Float32Array,
    Item,
    encode,
    encoder_of,
    read_columns,
    select_items,
    simulated_hasher,
)
from tp_flower.arrays import BoolArray
from tp_flower.features.choice import choose_encoders
from tp_flower.features.columns import CategoricalColumn
from tp_flower.features.encoder import SiteEncoder
from tp_flower.features.encodings import CategoryEncoding
from tp_flower.features.statistics import CountedRows
from tp_flower.query import Query
from tp_flower.sources.shards import column_types

MARK: Item = ("", "mark")
"""The item of a column that is no feature, see ``join_frames``."""


def join_frames(
    query: Query,
    frames: Mapping[str, Mapping[str, Any]],
    marks: Mapping[str, str] | None = None,
) -> dict[Item, Column]:
    """Join the frames by DuckDB; return the columns of the result by item.

    Args:
        query: the training set.
        frames: by site and table; those of one table are its shards.
        marks: a column, by the alias of its table, to take along as item ``MARK``.
    """
    with closing(duckdb.connect()) as connection:
        pieces: dict[str, list[str]] = {}
        for site, tables in frames.items():
            for table, frame in tables.items():
                connection.register(f"{table}_{site}", frame)
                pieces.setdefault(table, []).append(f'SELECT * FROM "{table}_{site}"')
        schemas = {}
        for table, selects in pieces.items():
            select = " UNION ALL ".join(selects)
            connection.execute(f"CREATE VIEW {table} AS {select}")
            schemas[table] = column_types(connection, f"SELECT * FROM {table}")
        items = select_items(query, schemas)
        tree = sqlglot.parse_one(query.to_sql(), dialect="duckdb").assert_is(exp.Select)
        for alias, name in (marks or {}).items():
            items.append(MARK)
            tree = tree.select(exp.column(name, table=alias, quoted=True), copy=False)
        columns = read_columns(connection, tree.sql(dialect="duckdb"), len(items))
    return dict(zip(items, columns, strict=True))


def fit_encoders(
    values: Mapping[Item, Column], rows: BoolArray
) -> dict[str, SiteEncoder]:
    """Fit the default encoders of every table to these of the joined rows."""
    encoders = {}
    for table in dict.fromkeys(table for table, _ in values if table):
        columns = {name: value for (t, name), value in values.items() if t == table}
        choice = choose_encoders((), {table: list(columns)})[table]
        sample = CountedRows(simulated_hasher(0), rows=rows)
        encoders[table] = encoder_of(choice, columns, sample)
    return encoders


def encode_dense(
    encoders: Mapping[str, SiteEncoder],
    values: Mapping[Item, Column],
    rows: BoolArray,
) -> Float32Array:
    """Return these joined rows as a float32 matrix (N, d)."""
    features, _ = encode(encoders, values, np.flatnonzero(rows))
    return features


def encode_sparse(
    encoders: Mapping[str, SiteEncoder],
    values: Mapping[Item, Column],
    rows: BoolArray,
) -> sp.csr_matrix:
    """Return the same matrix as CSR: one non-zero per category, numbers as they are."""
    chosen = np.flatnonzero(rows)
    blocks = []
    for table, encoder in encoders.items():
        for encoding in encoder.encoder.encodings:
            name = encoding.name
            alone = replace(encoder.encoder, encodings=(encoding,))
            column, one = values[table, name].values, SiteEncoder(alone, encoder.keys)
            is_text = isinstance(encoding, CategoryEncoding)
            if not is_text or not isinstance(column, CategoricalColumn):
                dense = one.transform({name: column}, rows=chosen)
                blocks.append(sp.csr_matrix(dense))
                continue
            # row k of this small matrix is how local category k is encoded
            codes = np.append(np.arange(len(column.texts)), -1).astype(np.int32)
            table_of = CategoricalColumn(codes, column.texts)
            small = sp.csr_matrix(one.transform({name: table_of}))
            blocks.append(small[column.codes[chosen]])
    return sp.hstack(blocks, format="csr", dtype=np.float32)
