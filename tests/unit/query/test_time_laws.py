"""Random schemas and queries that look back are DuckDB's answer, in all three ways.

A query has one to three sub-queries over two tables of events, by keys of any type, in
several shards where their keys allow it. Its answer at one site, with sealed cutoffs
and on a grid is compared with DuckDB's to the very SQL, row by row; on a grid, to the
SQL over the last points at or before the cutoffs.
"""

import datetime
import functools
from collections import Counter
from dataclasses import dataclass

import duckdb
import pandas as pd
from hypothesis import strategies as st

from tests.support.examples.laws import law
from tests.support.joined import engine_rows, joined_rows, result_names
from tp_flower.errors import MappingError
from tp_flower.query import Query
from tp_flower.sources.shards import load_tables, register_frames, release

FIRST = datetime.datetime(2020, 1, 1)
GRID = "36 hours from 2020-01-01 to 2020-01-06"
START = "TIMESTAMP '2020-01-01'"
KEY_TYPES = {
    "INTEGER": "{}",
    "BIGINT": "{} - 9007199254740993",
    "VARCHAR": "'key ' || {}",
    "DATE": "DATE '2020-01-01' + CAST({} AS INTEGER)",
    "BOOLEAN": "{} > 0",
    "DECIMAL(9, 3)": "{} / 8",
    "UUID": "'00000000-0000-0000-0000-00000000000' || {}",
}
TIMES = ["DATE", "TIMESTAMP", "TIMESTAMP_S", "TIMESTAMPTZ"]
NUMBERS = ["DOUBLE", "INTEGER", "DECIMAL(9, 2)"]
UPPER = [
    *("{p}.t < o.day", "o.day >= {p}.t", "{p}.t <= o.day - INTERVAL 8 HOUR"),
    "{p}.t BETWEEN o.day - INTERVAL 2 DAY AND o.day",
]
LOWER = ["", "{p}.t >= o.day - INTERVAL 1 DAY", "{p}.t > o.day - INTERVAL 2 DAY"]
OWN = ["", "{p}.kind = 'a'", "{p}.x IS NOT NULL", "kind <> 'b'"]
AGGREGATES = [
    *("COUNT(*)", "COUNT(DISTINCT {p}.kind)", "SUM(x)", "AVG({p}.x)", "MIN({p}.x)"),
    *("EPOCH(MAX({p}.t))", "EPOCH(o.day) - EPOCH(MAX({p}.t))"),
    "COUNT(*) FILTER (WHERE {p}.t < o.day - INTERVAL 1 DAY)",
    "COALESCE(SUM({p}.x), -1) + COUNT({p}.x)",
    "MIN(EPOCH(o.day) - EPOCH({p}.t))",
]
LAST = ["x", "kind", "EPOCH(t)", "EPOCH(o.day) - EPOCH({p}.t)"]


@dataclass(frozen=True)
class SubQuery:
    """A sub-query, the columns of its answer, and what compares its keys."""

    table: str
    form: str
    where: str
    keys: tuple[str, ...]
    outputs: tuple[str, ...]

    def sql(self, alias):
        """What joins it, and its values in the SELECT list."""
        names = [f"{alias}_{n}" for n, _ in enumerate(self.outputs)]
        rows = f"FROM {self.table} {alias}p WHERE {self.where}"
        if self.form == "value":
            values = [f"(SELECT {output} {rows})" for output in self.outputs]
            return "", [*zip(values, names, strict=True)]
        pairs = zip(self.outputs, names, strict=True)
        items = ", ".join(f"{output} AS {name}" for output, name in pairs)
        tail = {
            "last": f"ORDER BY {alias}p.t DESC, {alias}p.x DESC, {alias}p.kind DESC "
            "LIMIT 1",
            "having": "HAVING COUNT(*) >= 2",
        }.get(self.form, "")
        join = f" LEFT JOIN LATERAL (SELECT {items} {rows} {tail}) {alias} ON TRUE"
        return join, [(f"{alias}.{name}", name) for name in names]

    @property
    def has_answer(self):
        nulls = (f"o.{name} IS NULL" for name in self.keys)
        return " OR ".join(("NOT o.is_off", *nulls))


@st.composite
def sub_queries(draw, alias):
    form = draw(st.sampled_from(["aggregates", "value", "having", "last"]))
    keys = draw(st.sampled_from([(), ("a",), ("b",), ("a", "b"), ("b", "a")]))
    conditions = [*map(draw, map(st.sampled_from, (UPPER, LOWER, OWN)))]
    conditions += [f"{{p}}.{key} = o.{key}" for key in keys]
    where = " AND ".join(filter(None, draw(st.permutations(conditions))))
    outputs = draw(
        st.lists(
            st.sampled_from(LAST if form == "last" else AGGREGATES),
            min_size=1,
            max_size=3,
            unique=True,
        )
    )
    name = f"{alias}p"
    return SubQuery(
        draw(st.sampled_from(["events", "visits"])),
        form,
        where.format(p=name),
        keys,
        tuple(output.format(p=name) for output in outputs),
    )


KEYS = st.none() | st.integers(0, 2)
HOURS = st.none() | st.integers(-2, 13).map(
    lambda number: FIRST + datetime.timedelta(hours=8 * number)
)
VALUES = st.none() | st.integers(-2, 2)
ORDERS = st.lists(st.tuples(KEYS, KEYS, HOURS, VALUES), min_size=1, max_size=6)
EVENTS = st.lists(
    st.tuples(KEYS, KEYS, HOURS, VALUES, st.sampled_from("ab")), max_size=9
)


@st.composite
def cases(draw):
    """Tables by name, their columns' types, the sub-queries, and in how many shards."""
    rows = {"orders": draw(ORDERS), "events": draw(EVENTS), "visits": draw(EVENTS)}
    keys = [draw(st.sampled_from([*KEY_TYPES])) for _ in "ab"]
    types = {name: draw(st.sampled_from(TIMES)) for name in rows}
    numbers = {name: draw(st.sampled_from(NUMBERS)) for name in rows}
    queries = [draw(sub_queries(f"w{n}")) for n in range(draw(st.integers(1, 3)))]
    return rows, keys, types, numbers, queries, draw(st.booleans())


@functools.cache
def shared_engine():
    engine = duckdb.connect()
    engine.execute("SET TimeZone = 'UTC'")
    return engine


def make_tables(rows, keys, types, numbers):
    engine = shared_engine()
    for name, listed in rows.items():
        time, *others = ("day", "y") if name == "orders" else ("t", "x", "kind")
        frame = pd.DataFrame(listed, columns=["a", "b", time, *others]).astype(object)
        engine.register("raw", frame.assign(id=range(len(frame))))
        columns = [
            f"CAST({KEY_TYPES[of].format(f'CAST({key} AS BIGINT)')} AS {of}) AS {key}"
            for key, of in zip("ab", keys, strict=True)
        ]
        columns += [f"CAST({time} AS {types[name]}) AS {time}", "id"]
        columns += [f"CAST({others[0]} AS {numbers[name]}) AS {others[0]}"]
        columns += [f"CAST({other} AS VARCHAR) AS {other}" for other in others[1:]]
        engine.execute(
            f"CREATE OR REPLACE TABLE {name} AS SELECT {', '.join(columns)} FROM raw"
        )
    return engine


def shards_of(engine, name, key):
    """A table's rows in two shards: no value of its key is in both."""
    if key is None:
        return [engine.sql(f"FROM {name}").to_arrow_table()]
    is_first = f"coalesce(hash({key}) % 2 = 0, false)"
    return [
        engine.sql(f"FROM {name} WHERE {condition}").to_arrow_table()
        for condition in (is_first, f"NOT {is_first}")
    ]


def dividing_key(queries, table):
    """A key that all sub-queries of a table compare, by which shards divide it."""
    compared = [set(query.keys) for query in queries if query.table == table]
    return min(set.intersection(*compared), default=None) if compared else None


@law(4, 500, case=cases())
def test_a_query_that_looks_back_is_that_of_duckdb_in_all_three_ways(case):
    rows, keys, types, numbers, queries, is_sharded = case
    engine = make_tables(rows, keys, types, numbers)
    parts = [query.sql(f"w{n}") for n, query in enumerate(queries)]
    values = [value for _, listed in parts for value in listed]
    joins = "".join(join for join, _ in parts)
    head = "SELECT o.y AS label, o.id"
    sql = ", ".join([head, *(f"{value} AS {name}" for value, name in values)])
    sql += f" FROM orders o{joins}"
    # a cutoff before the grid has no answer, but one that is NULL, or of a NULL key
    known = [
        f"CASE WHEN {query.has_answer} THEN {value} END AS {name}"
        for query, (_, listed) in zip(queries, parts, strict=True)
        for value, name in listed
    ]
    expected = ", ".join([head, *known]) + f" FROM {{}} o{joins}"
    of_day = "DATE" if types["orders"] == "DATE" else "TIMESTAMP"
    time = "CAST(day AS TIMESTAMP)"
    point = f"TIME_BUCKET(INTERVAL 36 HOUR, {time}, {START})"
    moved = (
        f"(SELECT * REPLACE (CASE WHEN {time} >= {START} THEN CAST({point} AS {of_day})"
        f" END AS day), coalesce({time} < {START}, false) AS is_off FROM orders)"
    )
    here = "(SELECT *, false AS is_off FROM orders)"
    divided = {
        name: dividing_key(queries, name) if is_sharded and name != "orders" else None
        for name in rows
    }
    ways = [({}, here), ({"sealed": True}, here), ({"grid": GRID}, moved)]
    if is_sharded and "DISTINCT" not in sql:
        # rows of one key in both shards
        divided |= dict.fromkeys(("events", "visits"), "id")
        ways = [({**how, "sharing": True}, around) for how, around in ways[1:]]
    for how, around in ways:
        # at one site the parts of one table share its pairs, as a site divides them
        shards = {
            name: shards_of(engine, name, key if how else None)
            for name, key in divided.items()
        }
        found, bound = answers(sql, engine, shards, **how)
        names = result_names(bound)
        assert found == engine_rows(engine, expected.format(around), names), how


def answers(sql, engine, shards, grid="", *, sealed=False, sharing=False):
    """What sites run, joined; and the query that they bound."""
    schemas = {
        name: {c: kind for c, kind, *_ in engine.execute(f"DESCRIBE {name}").fetchall()}
        for name in shards
    }
    query = Query.from_sql(sql).on_grid(grid).sealing_cutoffs(is_set=sealed)
    bound = query.bind(schemas)
    token = register_frames(shards, site="here")
    try:
        sources = {}
        for source in load_tables(f"memory:{token}"):
            sources.setdefault(source.table, []).append(source)
        return joined_rows(bound, sources, sharing=sharing), bound
    except MappingError as error:
        if "the join has no rows" not in str(error):
            raise
        return Counter(), bound
    finally:
        release(token)
