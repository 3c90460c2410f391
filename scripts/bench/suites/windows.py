"""What a site makes for rows before cutoffs, beside DuckDB's answer to the same SQL.

Suite ``windows``: a million events and 100,000 rows that look back on them, from the
data frames in memory to the derived table, a row for each pair of a key and a cutoff,
in all three ways. Ours has everything that sites do for it: the keys and cutoffs of the
rows around, their hashes and seals, the answers, the order of the rows. DuckDB computes
the sub-query for the same pairs. Both have as many threads as there are cores, and CPU
seconds count.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import duckdb
import numpy as np
import pandas as pd

from scripts.bench.harness import Options, Outcome, best_seconds
from tp_flower.extraction.empty_answers import NoRows, answered_key
from tp_flower.extraction.extract import extract
from tp_flower.extraction.extracted import ExtractedShard
from tp_flower.extraction.pairs import merge_pairs, read_pairs
from tp_flower.extraction.sealed_pairs import (
    KeyedPairs,
    hash_pairs,
    match_pairs,
    read_key_texts,
    read_own_keys,
)
from tp_flower.keyed_hash import KeyedHasher
from tp_flower.privacy.shard_seals import ShardSeal
from tp_flower.query import Query
from tp_flower.query.bind import BoundQuery
from tp_flower.query.cutoffs import CUTOFF
from tp_flower.query.lateral_tables import pair_names
from tp_flower.sources.shards import (
    ShardSource,
    load_tables,
    register_frames,
    release,
)

REPEATS: Final = 5
EVENTS: Final = 1_000_000
ROWS: Final = 100_000
KEYS: Final = (2_000, 10_000, 50_000)
DAYS: Final = 1_400
LIMIT: Final = 3.0
FORMS: Final = {
    "window": (
        "SELECT COUNT(*) AS n, SUM(p.x) AS s, AVG(p.x) AS m FROM events p "
        "WHERE p.k = o.k AND p.t < o.day AND p.t >= o.day - INTERVAL 90 DAY"
    ),
    "last row": (
        "SELECT p.x, EPOCH(p.t) AS t FROM events p WHERE p.k = o.k AND p.t < o.day "
        "ORDER BY p.t DESC LIMIT 1"
    ),
}
FIRST: Final = pd.Timestamp("2020-01-01")
GRID: Final = "1 month from 2020-01-01 to 2023-12-31"
WAYS: Final = ("same site", "sealed", "grid")
_PAIRS_OF_ROWS: Final = "SELECT DISTINCT k, day FROM orders"
_PAIRS_OF_GRID: Final = (
    "SELECT k, day FROM (SELECT DISTINCT k FROM events), (SELECT UNNEST("
    "GENERATE_SERIES(TIMESTAMP '2020-01-01', TIMESTAMP '2023-12-31', "
    "INTERVAL 1 MONTH)) AS day)"
)
_SECRET: Final = bytes(32)


@dataclass(frozen=True)
class Case:
    """Rows with a key and a cutoff, and events of these keys."""

    form: str
    keys: int
    events: int = EVENTS
    rows: int = ROWS

    @property
    def sql(self) -> str:
        """The query."""
        lateral = f"LATERAL ({FORMS[self.form]}) w ON TRUE"
        return f"SELECT o.y AS label, w.* FROM orders o LEFT JOIN {lateral}"

    def frames(self) -> dict[str, pd.DataFrame]:
        """Return the tables: times on the minute, cutoffs at midnight."""
        rng = np.random.default_rng(0)
        minutes = rng.integers(0, 60 * 24 * DAYS, self.events)
        events = {
            "k": rng.integers(0, self.keys, self.events),
            "t": FIRST + pd.to_timedelta(minutes, unit="min"),
            "x": rng.normal(size=self.events),
        }
        orders = {
            "k": rng.integers(0, self.keys, self.rows),
            "day": FIRST + pd.to_timedelta(rng.integers(0, DAYS, self.rows), unit="D"),
            "y": rng.normal(size=self.rows),
        }
        return {"orders": pd.DataFrame(orders), "events": pd.DataFrame(events)}


def measure_windows(_: Options) -> Outcome:
    """Compare all ways in every case."""
    outcome = Outcome()
    for form in FORMS:
        for keys in KEYS:
            case = Case(form, keys)
            figures: dict[str, float] = {}
            for way in WAYS:
                ours, duckdb_seconds = measure(case, way)
                ratio = ours / duckdb_seconds
                figures |= {f"{way}: DuckDB": duckdb_seconds, way: ratio}
                name = f"{form}, {keys:,} keys, {way}: CPU time over DuckDB's"
                outcome.check(name, ratio, LIMIT)
            outcome.facts[f"{form}, {keys:,} keys"] = figures
    return outcome


def measure(case: Case, way: str) -> list[float]:
    """Return the CPU seconds of a site and of DuckDB."""
    bound = bind(case, way)
    with sites(case) as sources, duckdb.connect() as engine:
        for table, rows in case.frames().items():
            engine.register(table, rows)
        answer = answer_of_duckdb(case, way)
        return best_seconds(
            lambda: derived_table(bound, way, sources),
            lambda: engine.sql(answer).to_arrow_table(),
            repeats=REPEATS,
        )


def answer_of_duckdb(case: Case, way: str) -> str:
    """Return the SQL of the derived table; on a grid without those of no rows."""
    pairs, where = _PAIRS_OF_ROWS, ""
    if way == "grid":
        pairs = _PAIRS_OF_GRID
        where = " WHERE w.n > 0" if case.form == "window" else ""
    return f"SELECT o.*, w.* FROM ({pairs}) o, LATERAL ({FORMS[case.form]}) w{where}"


@contextmanager
def sites(case: Case) -> Iterator[Mapping[str, ShardSource]]:
    """Yield the tables as shards."""
    token = register_frames(case.frames(), site="site")
    try:
        yield {shard.table: shard for shard in load_tables(f"memory:{token}")}
    finally:
        release(token)


def bind(case: Case, way: str) -> BoundQuery:
    """Return the query as the server binds it, before a site begins."""
    query = Query.from_sql(case.sql).on_grid(GRID if way == "grid" else "")
    return query.sealing_cutoffs(is_set=way == "sealed").bind(
        {
            "orders": {"k": "BIGINT", "day": "TIMESTAMP", "y": "DOUBLE"},
            "events": {"k": "BIGINT", "t": "TIMESTAMP", "x": "DOUBLE"},
        }
    )


def derived_table(
    bound: BoundQuery, way: str, sources: Mapping[str, ShardSource]
) -> ExtractedShard:
    """Return the answers of the sub-query, as a run's sites make them."""
    (fragment,), (around,) = bound.fragments_of("w"), bound.fragments_of("o")
    (join,) = bound.joins
    names = pair_names(fragment, join.right_key)
    pairs = None
    if way == "same site":
        pairs = read_pairs(sources["orders"], around, join.left_key, names, b"")
    elif way == "sealed":
        cutoff = names.index(CUTOFF)
        texts = read_key_texts(sources["orders"], around, join.left_key, cutoff, b"")
        keyed = carried(hash_pairs(*texts, KeyedHasher(_SECRET)))
        own_keys, _ = read_own_keys(sources["events"], fragment, names, b"")
        matched = match_pairs(own_keys, keyed, KeyedHasher(_SECRET))
        pairs = merge_pairs([matched], "o")
    no_rows = NoRows(is_last_row=answered_key(fragment) is not None)
    return extract(sources["events"], fragment, pairs=pairs, no_rows=no_rows)


def carried(keyed: KeyedPairs) -> KeyedPairs:
    """Seal pairs, and open and check them at the other site."""
    seal = ShardSeal(_SECRET, "run", "", ())
    text = keyed.hashes.tobytes() + keyed.cutoffs.tobytes()
    opened = seal.open(seal.seal(text, "pairs", 0, "request"), "pairs", 0)
    words = np.frombuffer(opened, np.uint64)
    count = len(keyed.cutoffs)
    hashes = words[: 2 * count].reshape(-1, 2)
    cutoffs = words[2 * count :].view(np.int64)
    return KeyedPairs(hashes, cutoffs, keyed.type, keyed.kinds).check()
