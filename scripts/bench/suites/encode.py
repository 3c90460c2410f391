"""Encode a CSV shard, against DuckDB's own scan and numpy standardisation.

::

    python scripts/bench/suites/encode.py --rows 5000000 --repeat 3

Each measurement is a process of its own. *Ours* is all that a site does from the file
to the float32 matrix on disk: find the types of the columns, extract, statistics,
encode. The *baseline* scans the file with DuckDB into numpy arrays and standardises
them in memory. With ``--mixed`` six of the columns are texts and dates; the baseline
then encodes the numbers alone.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import numpy as np

if TYPE_CHECKING:
    from scripts.bench.runs import Outcome

COLUMNS = 60
SUITE_ROWS = 1_000_000
MIXED = 6


def write_file(path: Path, rows: int, *, mixed: bool) -> None:
    """Write the file, unless it is there."""
    if path.exists():
        return
    columns = [
        f"round(random() * {10 ** (i % 5)}::DOUBLE, {4 + i % 9}) AS x{i}"
        for i in range(COLUMNS)
    ]
    if mixed:
        for i in range(0, MIXED, 2):
            text = f"'value ' || CAST(random() * {10 ** (i + 1)} AS INT)"
            day = "DATE '2000-01-01' + CAST(random() * 9e3 AS INT)"
            columns[i : i + 2] = [f"{text} AS x{i}", f"{day} AS x{i + 1}"]
    part = path.with_suffix(".part")
    with duckdb.connect() as connection:
        connection.execute("SELECT setseed(0.5)")
        connection.execute(
            f"COPY (SELECT {', '.join(columns)} FROM range({rows})) "
            f"TO '{part}' (FORMAT csv, HEADER)"
        )
    part.rename(path)


def baseline(path: Path) -> dict[str, float]:
    """Scan and standardise in memory."""
    started = time.perf_counter()
    with duckdb.connect() as connection:
        columns = connection.execute(f"SELECT * FROM read_csv('{path}')").fetchnumpy()
    scanned = time.perf_counter()
    numbers = [values for values in columns.values() if values.dtype == np.float64]
    features = np.empty((len(numbers[0]), len(numbers)), np.float32)
    for number, values in enumerate(numbers):
        features[:, number] = (values - values.mean()) / values.std()
    return {"scan": scanned - started, "standardise": time.perf_counter() - scanned}


def ours(path: Path) -> dict[str, float]:
    """Encode the file as a site does."""
    from client_apps.data.features import KeptFeatures
    from client_apps.data.run_store import SiteStore
    from client_apps.data.tables import SiteTables
    from tp_flower.features.choice import TableChoice
    from tp_flower.features.fitting import fit
    from tp_flower.features.statistics import Sample, feature_statistics
    from tp_flower.keyed_hash import KeyedHasher
    from tp_flower.query.fragment import Feature, Fragment
    from tp_flower.sources.shards import ShardSource

    hasher, seconds = KeyedHasher(bytes(32)), {}
    source = ShardSource("t", "site", 0, str(path))
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        store = SiteStore(folder, "1", "1")
        kept = KeptFeatures(folder, int(1e12), store)
        tables = SiteTables(kept, is_simulated=True)
        started = time.perf_counter()
        schema = tables.describe(source)
        seconds["describe"] = time.perf_counter() - started
        features = tuple(Feature(name, f'"{name}"') for name in schema.columns)
        extracted = tables.extract(0, source, Fragment("t", "t", features))
        seconds["extract"] = time.perf_counter() - started - sum(seconds.values())
        sample = Sample(hasher)
        choices = {info.name: None for info in extracted.features}
        choice = TableChoice("t", choices)
        statistics = {
            info.name: feature_statistics(
                choice, info.name, info.kind, extracted.column(info.name), sample
            )
            for info in extracted.features
        }
        seconds["statistics"] = time.perf_counter() - started - sum(seconds.values())
        encoder = fit("t", statistics).at_site(hasher)
        tables.encode(0, encoder, np.arange(extracted.rows))
        seconds["encode"] = time.perf_counter() - started - sum(seconds.values())
    return seconds


def measure(name: str, path: Path) -> dict[str, float]:
    """Run one side in a process of its own."""
    answer = subprocess.run(
        [sys.executable, __file__, "--file", str(path), "--only", name],
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    return found


def compare(path: Path, repeat: int) -> None:
    """Print seconds, the ratio of the speeds, and the peak memory."""
    for _ in range(repeat):
        sides = {name: measure(name, path) for name in ("baseline", "ours")}
        for name, found in sides.items():
            parts = ", ".join(
                f"{part} {seconds:.2f}"
                for part, seconds in found.items()
                if part not in {"total", "megabytes"}
            )
            print(
                f"{name:9} {found['total']:7.2f} s  peak {found['megabytes']:6.0f} MB"
                f"  ({parts})"
            )
        ratio = sides["baseline"]["total"] / sides["ours"]["total"]
        print(f"speed of ours / baseline: {ratio:.2f}", flush=True)


def measure_encode() -> "Outcome":
    """Encode a file once on both sides."""
    # not at the top: the measured processes must not import it
    from scripts.bench.runs import Check, Outcome

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard.csv"
        write_file(path, SUITE_ROWS, mixed=False)
        sides = {name: measure(name, path) for name in ("baseline", "ours")}
    facts: dict[str, object] = {"rows": SUITE_ROWS, "columns": COLUMNS}
    for name, title in (("ours", "a site"), ("baseline", "DuckDB's scan into numpy")):
        facts[f"{title}: seconds"] = sides[name]["total"]
        facts[f"{title}: peak memory, MiB"] = sides[name]["megabytes"]
    memory = sides["ours"]["megabytes"] / sides["baseline"]["megabytes"]
    return Outcome(
        [Check("a site's peak memory over DuckDB + numpy's", memory, 1.0)], facts
    )


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=("baseline", "ours"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        found = {"baseline": baseline, "ours": ours}[given.only](given.file)
        # not before: what it imports takes memory too
        from scripts.bench.processes import peak_memory

        peak = peak_memory() / 2**20
        print(json.dumps({**found, "total": sum(found.values()), "megabytes": peak}))
        return
    kind = "mixed" if given.mixed else "floats"
    path = given.folder / f"bench-encode-{kind}-{given.rows}.csv"
    write_file(path, given.rows, mixed=given.mixed)
    compare(path, given.repeat)


if __name__ == "__main__":
    main()
