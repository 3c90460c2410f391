"""Encode a CSV shard, against DuckDB's own scan and numpy standardisation.

Each measurement is a process of its own, which imports no more than it uses. *Ours* is
all that a site does from the file to the float32 matrix on disk: find the types of the
columns, extract, statistics, encode. The *baseline* scans the file with DuckDB into
numpy arrays and standardises them in memory.
"""

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import numpy as np

from scripts.bench.processes import in_process_of_its_own, peak_memory

if TYPE_CHECKING:
    from scripts.bench.harness import Options, Outcome

COLUMNS = 60
SUITE_ROWS = 1_000_000
MIXED = 6


def write_file(path: Path, rows: int, *, mixed: bool) -> None:
    """Write the file; with ``mixed`` six of the columns are texts and dates."""
    columns = [
        f"round(random() * {10 ** (i % 5)}::DOUBLE, {4 + i % 9}) AS x{i}"
        for i in range(COLUMNS)
    ]
    if mixed:
        for i in range(0, MIXED, 2):
            text = f"'value ' || CAST(random() * {10 ** (i + 1)} AS INT)"
            day = "DATE '2000-01-01' + CAST(random() * 9e3 AS INT)"
            columns[i : i + 2] = [f"{text} AS x{i}", f"{day} AS x{i + 1}"]
    with duckdb.connect() as connection:
        connection.execute("SELECT setseed(0.5)")
        connection.execute(
            f"COPY (SELECT {', '.join(columns)} FROM range({rows})) "
            f"TO '{path}' (FORMAT csv, HEADER)"
        )


def baseline(path: Path) -> float:
    """Scan and standardise in memory; return the seconds."""
    started = time.perf_counter()
    with duckdb.connect() as connection:
        columns = connection.execute(f"SELECT * FROM read_csv('{path}')").fetchnumpy()
    numbers = [values for values in columns.values() if values.dtype == np.float64]
    features = np.empty((len(numbers[0]), len(numbers)), np.float32)
    for number, values in enumerate(numbers):
        features[:, number] = (values - values.mean()) / values.std()
    return time.perf_counter() - started


def ours(path: Path) -> float:
    """Encode the file as a site does; return the seconds, without those of imports."""
    from client_apps.data.features import CachedFeatures
    from client_apps.data.run_store import SiteStore
    from client_apps.data.tables import SiteTables
    from tp_flower.features.choice import TableChoice
    from tp_flower.features.fitting import fit
    from tp_flower.features.statistics import CountedRows, feature_statistics
    from tp_flower.keyed_hash import KeyedHasher
    from tp_flower.query.fragment import Feature, Fragment
    from tp_flower.sources.shards import ShardSource

    source = ShardSource("t", "site", 0, str(path))
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        store = SiteStore(folder, "1", "1")
        cached = CachedFeatures(folder, int(1e12), store)
        tables = SiteTables(cached, is_simulated=True)
        started = time.perf_counter()
        schema = tables.describe(source)
        features = tuple(Feature(name, f'"{name}"') for name in schema.columns)
        extracted = tables.extract(0, source, Fragment("t", "t", features))
        hasher = KeyedHasher(bytes(32))
        sample = CountedRows(hasher)
        choice = TableChoice("t", {info.name: None for info in extracted.features})
        statistics = {
            info.name: feature_statistics(
                choice, info.name, info.kind, extracted.column(info.name), sample
            )
            for info in extracted.features
        }
        encoder = fit("t", statistics).for_site(hasher)
        tables.encode(0, encoder, np.arange(extracted.rows))
        return time.perf_counter() - started


def seconds_and_peak(path: str, is_site: bool) -> dict[str, float]:
    """Return the seconds of a side and the process's peak memory."""
    seconds = (ours if is_site else baseline)(Path(path))
    return {"total": seconds, "megabytes": peak_memory() / 2**20}


def measure_encode(_: "Options") -> "Outcome":
    """Encode a file once on both sides."""
    # not at the top: the measured processes must not import it
    from scripts.bench.harness import Outcome

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard.csv"
        write_file(path, SUITE_ROWS, mixed=False)
        plain = in_process_of_its_own(seconds_and_peak, str(path), False)
        site = in_process_of_its_own(seconds_and_peak, str(path), True)
    outcome = Outcome()
    outcome.facts |= {"rows": SUITE_ROWS, "columns": COLUMNS}
    for title, side in (("a site", site), ("DuckDB's scan into numpy", plain)):
        outcome.facts[f"{title}: seconds"] = side["total"]
        outcome.facts[f"{title}: peak memory, MiB"] = side["megabytes"]
    ratio = site["megabytes"] / plain["megabytes"]
    outcome.check("a site's peak memory over DuckDB + numpy's", ratio, 1.0)
    return outcome
