"""Random schemas that are hard to train on, by how: rows, tables, and what they share.

A schema is its tables, a query and a task.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import pandas as pd

from scripts.bench.datasets import Dataset, lahman
from scripts.bench.harness import SkippedSuite
from tp_flower.arrays import FloatArray

Schema = tuple[Mapping[str, pd.DataFrame], str, str]
TASKS = {"regression": "f.y", "classification": "f.y > 0"}
SNOWFLAKES = 20


def datasets() -> Iterator[Dataset]:
    """Yield the snowflakes, the other schemas by task, and data that are at hand."""
    for number in range(SNOWFLAKES):
        yield dataset(f"snowflake {number}", snowflake(number))
    for task in TASKS:
        for make in (collinear, few_rows, music):
            yield dataset(make.__name__.replace("_", " "), make(task))
    with suppress(SkippedSuite):
        yield lahman()
    with suppress(SkippedSuite):
        yield from (dataset("TPC-H", tpch(target)) for target in TPCH_LABELS)


def dataset(name: str, schema: Schema) -> Dataset:
    """Return a schema as a data set of a name."""
    tables, sql, task = schema
    settings: dict[str, str | float] = {"task": task, "max-categories": 2000}
    return Dataset(name, f"{name}, {task}", "rmse", sql, settings, dict(tables))


def collinear(task: str) -> Schema:
    """Return three tables, each nearly the others' sum, and a label in the rest."""
    draw = np.random.default_rng(3)
    rows, x = 200, draw.normal(size=200)
    a, b = (
        pd.DataFrame({"id": range(rows), "x": x + 1e-3 * draw.normal(size=rows)})
        for _ in "ab"
    )
    c = pd.DataFrame(
        {"id": range(rows), "x": a.x + b.x + 1e-3 * draw.normal(size=rows)}
    )
    keys = draw.integers(0, rows, 1500)
    facts = pd.DataFrame({"k": keys, "q": draw.normal(size=1500)})
    noise = 0.3 * draw.normal(size=1500)
    facts["y"] = 300.0 * (a.x - b.x).to_numpy()[keys] + facts["q"] + noise
    joins = " ".join(f"JOIN {t} ON f.k = {t}.id" for t in "abc")
    sql = f"SELECT {TASKS[task]} AS label, f.q, a.x, b.x, c.x FROM f {joins}"
    return {"f": facts, "a": a, "b": b, "c": c}, sql, task


def few_rows(task: str) -> Schema:
    """Return 150 joined rows of over a hundred columns."""
    draw = np.random.default_rng(5)
    tables = {
        name: pd.DataFrame(
            draw.normal(size=(60, 50)), columns=[f"x{i}" for i in range(50)]
        )
        for name in "ab"
    }
    keys = draw.integers(0, 60, (2, 150))
    facts = pd.DataFrame({"a": keys[0], "b": keys[1], "q": draw.normal(size=150)})
    effects = tables["a"].x0.to_numpy()[keys[0]] + tables["b"].x1.to_numpy()[keys[1]]
    facts["y"] = effects + facts["q"] + 0.1 * draw.normal(size=150)
    columns = ", ".join(f"{name}.x{i}" for name in "ab" for i in range(50))
    joins = " ".join(f"JOIN {t} ON f.{t} = {t}.id" for t in "ab")
    named = {name: frame.assign(id=range(60)) for name, frame in tables.items()}
    return (
        {"f": facts, **named},
        f"SELECT {TASKS[task]} AS label, f.q, {columns} FROM f {joins}",
        task,
    )


def music(task: str) -> Schema:
    """Return a shop of seven tables: 2,240 sold tracks, over a thousand columns."""
    draw = np.random.default_rng(7)
    sizes = {"artist": 275, "album": 347, "genre": 25, "track": 1600, "customer": 59}
    sizes |= {"invoice": 412, "f": 2240}
    up = {"album": ("artist",), "track": ("album", "genre"), "invoice": ("customer",)}
    up["f"] = ("track", "invoice")
    tables: dict[str, pd.DataFrame] = {}
    effects: dict[str, FloatArray] = {}
    for name, rows in sizes.items():
        kinds = (
            draw.integers(0, rows, rows)
            if name in ("track", "invoice")
            else np.arange(rows)
        )
        keys = {
            parent: draw.integers(0, sizes[parent], rows) for parent in up.get(name, ())
        }
        columns = {"id": np.arange(rows), "x": draw.gamma(3.0, size=rows), **keys}
        tables[name] = pd.DataFrame(columns).assign(
            c=[f"{name}{kind % 400}" for kind in kinds]
        )
        inherited = sum(
            (effects[parent][key] for parent, key in keys.items()), np.zeros(rows)
        )
        effects[name] = inherited + 0.5 * draw.normal(size=rows)
    tables["f"]["y"] = effects["f"]
    joins = " ".join(
        f"JOIN {parent} ON {name}.{parent} = {parent}.id"
        for name in ("f", "track", "album", "invoice")
        for parent in up[name]
    )
    features = ", ".join(f"{name}.x, {name}.c" for name in sizes if name != "f")
    return (
        tables,
        f"SELECT {TASKS[task]} AS label, f.x, {features} FROM f {joins}",
        task,
    )


TPCH_LABELS: Final = {
    "regression": "l.l_extendedprice",
    "classification": "l.l_returnflag = 'R'",
}
TPCH_SQL: Final = """
SELECT {} AS label, l.l_quantity, l.l_discount, l.l_tax, l.l_shipmode, l.l_shipinstruct,
  l.l_shipdate, o.o_orderpriority, o.o_orderdate, c.c_mktsegment, c.c_acctbal,
  p.p_brand, p.p_type,
  p.p_container, p.p_size, p.p_retailprice, ps.ps_supplycost, ps.ps_availqty,
  s.s_acctbal, m.n_name, n.n_name
FROM lineitem l JOIN orders o ON l.l_orderkey = o.o_orderkey
JOIN customer c ON o.o_custkey = c.c_custkey JOIN part p ON l.l_partkey = p.p_partkey
JOIN partsupp ps ON l.l_partkey = ps.ps_partkey AND l.l_suppkey = ps.ps_suppkey
JOIN supplier s ON l.l_suppkey = s.s_suppkey
JOIN nation m ON s.s_nationkey = m.n_nationkey
JOIN nation n ON c.c_nationkey = n.n_nationkey"""


def tpch(task: str) -> Schema:
    """Return TPC-H's tables of scale 0.01 with 60,000 joined rows.

    The label is the price, or whether an item was returned.

    Raises:
        SkippedSuite: the package ``tpchgen-cli``, which makes them, is not installed.
    """
    program = shutil.which("tpchgen-cli", path=Path(sys.executable).parent)
    if program is None:
        raise SkippedSuite("pip install tpchgen-cli")
    with TemporaryDirectory() as folder:
        command = [program, "csv", "-s", "0.01", "--output-dir", folder]
        subprocess.run(command, check=True, capture_output=True)
        tables = {path.stem: pd.read_csv(path) for path in Path(folder).glob("*.csv")}
    del tables["region"]
    for frame in tables.values():
        dates = frame.filter(like="date").columns
        frame[dates] = frame[dates].apply(pd.to_datetime)
    return tables, TPCH_SQL.format(TPCH_LABELS[task]), task


def snowflake(number: int) -> Schema:
    """Return the tables, the query and the task of a random schema."""
    draw = np.random.default_rng(1000 + number)
    rows = int(draw.integers(200, 2500))
    facts = pd.DataFrame({"q": draw.normal(size=rows) * 10 ** draw.uniform(-2, 3)})
    tables, features, joins = {}, ["f.q"], []
    label = draw.normal() * facts["q"] / facts["q"].std()
    for place in range(int(draw.integers(2, 5))):
        dimension, outer = _dimension(draw, int(draw.integers(10, max(20, rows // 4))))
        share = 1.0 / np.arange(1, len(dimension) + 1) ** draw.uniform(0, 1.3)
        key = draw.choice(len(dimension), size=rows, p=share / share.sum())
        facts[f"k{place}"] = key
        effect = draw.uniform(0.3, 1.5) * draw.normal(size=len(dimension))
        features += [f"d{place}.x", f"d{place}.c"]
        joins.append(f"JOIN d{place} ON f.k{place} = d{place}.id")
        if outer is not None:
            effect += draw.normal(size=len(outer))[dimension["up"]]
            tables[f"e{place}"] = outer
            features += [f"e{place}.x", f"e{place}.c"]
            joins.append(f"JOIN e{place} ON d{place}.up = e{place}.id")
        tables[f"d{place}"] = dimension
        label = label + effect[key]
    facts["y"] = label + draw.uniform(0.1, 1.5) * draw.normal(size=rows)
    task, target = list(TASKS.items())[number % 2]
    sql = f"SELECT {target} AS label, {', '.join(features)} FROM f {' '.join(joins)}"
    return {"f": facts, **tables}, sql, task


def _dimension(
    draw: np.random.Generator, rows: int
) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """Return a dimension table, and mostly one that its rows nearly determine."""
    kinds = draw.integers(0, draw.integers(2, rows + 1), rows)
    columns = {"id": np.arange(rows), "x": draw.normal(size=rows)}
    table = pd.DataFrame(columns).assign(c=[f"c{kind}" for kind in kinds])
    if draw.random() > 0.6:
        return table, None
    count = max(3, int(rows * draw.uniform(0.3, 0.95)))
    up = np.r_[np.arange(count), draw.integers(0, count, rows - count)]
    columns = {"id": np.arange(count), "x": draw.normal(size=count)}
    outer = pd.DataFrame(columns).assign(c=[f"e{kind}" for kind in range(count)])
    return table.assign(up=up), outer
