"""Compare the numbers of the same runs by an old and a new version of the project.

    python scripts/checks/same_numbers.py --old COMMIT [--new COMMIT] [--runs a,b]
    python scripts/checks/same_numbers.py --old COMMIT --record FILE
    python scripts/checks/same_numbers.py --old-record FILE [--new COMMIT]

A version is a commit, or the folder of a checkout; versions are compared by what users
run: scripts, their options, and the files that they write. Modules may move from one
version to another, so nothing of them is imported. Every run is a real one, started as
a user starts it, in one thread, and with the key of all noise fixed: what a site draws
by a key of its own, such as a coreset, differs from run to run otherwise. --record
writes the figures of the old version (--new is not run), to be compared with by
--old-record. Each side takes about ten minutes on an idle core.

Equal are metrics, residuals, sizes, fan-out, contributions and what was chosen, to
`TOLERANCE`; payload bytes may fall. What depends on host, clock or version is left out.

Exit status: 0 all numbers are equal, 1 some are not or a run failed.
"""

import argparse
import json
import math
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from scripts.checks.checkouts import Checkout, check_out

STORE_SIZES = ("--orders", "2000", "--items", "100", "--customers", "300")

ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
"""Sums over several threads depend on their number in the last digits."""

TOLERANCE = 1e-9
"""Relative."""
NEGLIGIBLE = 1e-12
"""Absolute: a residual of rounding errors alone has no digits to compare."""
SIGNIFICANT_DIGITS = 13
EXCLUDED = frozenset(
    {
        # clock
        *("started", "seconds", "created", "time"),
        *("server-seconds", "client-seconds", "wait-seconds", "site-seconds"),
        # names that are made up for a run, and places on the host
        *("output-dir", "model", "file", "files", "source"),
        # versions: headers, what a run was told, and sentences about messages
        *("schema", "overhead-bytes", "settings", "messages", "ledger"),
        # position in the history: rounds are named by epoch and phase
        "round",
    }
)
BYTES = frozenset({"bytes-up", "bytes-down", "bytes_up", "bytes_down"})
NAMES = ("epoch", "phase", "site", "table", "feature", "output", "on")
"""Fields by which a record of a list is named, as the order may differ."""

FIXED_NOISE = """
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

_init = ChaCha20.__init__


def _init_with_fixed_key(self, key, nonce):
    _init(self, bytes(len(key)), nonce)


ChaCha20.__init__ = _init_with_fixed_key
"""
"""A module that Python imports at every start: the stream cipher gets one key.

All noise, draws and masks of the sites come of this cipher; masks still cancel.
"""

Figures = dict[str, Any]
Record = dict[str, Any]

_DECLARED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
RUNS: Mapping[str, Mapping[str, Any]] = _DECLARED["runs"]
"""The runs that are compared; their file says what is declared of each."""


class FailedRun(Exception):  # noqa: N818 - a run of the version, not of this script
    """A run did not complete."""


def main(arguments: Sequence[str]) -> int:
    """Run what is asked for and compare; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    old_version = parser.add_mutually_exclusive_group(required=True)
    old_version.add_argument("--old", metavar="VERSION")
    old_version.add_argument("--old-record", type=Path, metavar="FILE")
    parser.add_argument("--new", default="HEAD", metavar="VERSION")
    help_text = f"some of: {', '.join(RUNS)} (default: all)"
    parser.add_argument("--runs", default=",".join(RUNS), help=help_text)
    parser.add_argument("--record", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    names = run_names(options.runs)
    if options.old_record:
        old = json.loads(options.old_record.read_text(encoding="utf-8"))
    else:
        old = measure(options.old, names)
    if options.record:
        options.record.write_text(json.dumps(old, indent=0) + "\n", encoding="utf-8")
        return int(any(name not in old["runs"] for name in names))
    return print_comparison(old, measure(options.new, names), names)


def run_names(text: str) -> list[str]:
    """Return the runs of ``"store-2,evaluate"`` in order, with those that they need."""
    names = set(text.split(","))
    if unknown := sorted(names - RUNS.keys()):
        raise SystemExit(f"no run {unknown[0]!r}; there are {', '.join(RUNS)}")
    names |= {RUNS[name].get("after", name) for name in names}
    return [name for name in RUNS if name in names]


def measure(version: str, names: Sequence[str]) -> Record:
    """Return the figures of a version's runs; print the end of a failed run's log."""
    runs: dict[str, Figures] = {}
    with (
        check_out(version) as checkout,
        tempfile.TemporaryDirectory(prefix="same-numbers-") as folder,
    ):
        print(f"version {checkout.commit[:10]} in {checkout.folder}")
        for name in names:
            started = time.perf_counter()
            try:
                runs[name] = run_figures(checkout, name, Path(folder))
            except FailedRun as error:
                print(f"  {name} failed:\n{str(error)[-2000:]}", flush=True)
            else:
                print(f"  {name}: {time.perf_counter() - started:.1f} s", flush=True)
    return {"commit": checkout.commit, "runs": runs}


def run_figures(checkout: Checkout, name: str, folder: Path) -> Figures:
    """Return the figures of one run, in the folder of the version's data and runs."""
    run = RUNS[name]
    output = folder / name
    settings: dict[str, str | float] = {**run["settings"], "output-dir": str(output)}
    if "sql" in settings:
        settings["sql"] = _DECLARED["sql"][settings["sql"]]
    if "data" in run:
        data = make_data(checkout, run["data"], folder)
        file = tomllib.loads((data / "my-run.toml").read_text(encoding="utf-8"))
        settings = {**file, **settings, "tables": str(data / "tables.toml")}
    noise = folder / "fixed-noise"
    noise.mkdir(exist_ok=True)
    (noise / "sitecustomize.py").write_text(FIXED_NOISE, encoding="utf-8")
    config = folder / "run.toml"
    # JSON writes texts, numbers and booleans as TOML does
    lines = (f"{key} = {json.dumps(value)}" for key, value in settings.items())
    config.write_text("\n".join(lines), encoding="utf-8")
    nodes = f"num-supernodes={run.get('supernodes', 5)} client-resources-num-cpus=1"
    options = ["-c", str(config), "--federation-config", nodes]
    environment = {**ONE_THREAD, "PYTHONPATH": str(noise)}
    _run(checkout, "run_app", options, folder, environment)
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    return {**flatten(report), **prediction_figures(output)}


def _run(checkout: Checkout, *arguments: Any) -> None:
    status, printed = checkout.run(*arguments)
    if status:
        raise FailedRun(printed)


def make_data(checkout: Checkout, name: str, folder: Path) -> Path:
    """Return a folder with tables and a run file, made by this version's own script."""
    data = folder / "data" / name
    if not data.exists():
        data.mkdir(parents=True)
        sizes = STORE_SIZES if name.startswith("store") else ()
        script = "make_store" if sizes else "make_carriers"
        _run(checkout, script, [str(data), *sizes], folder, ONE_THREAD)
    return data


def prediction_figures(output: Path) -> Figures:
    """Return what is the same of predictions in any order of their rows."""
    figures: Figures = {}
    for path in output.glob("*.parquet"):
        table = pd.read_parquet(path)
        figures[f"{path.stem}/rows"] = len(table)
        numbers = table.select_dtypes("floating").astype(float)
        summary = numbers.quantile([0.0, 0.25, 0.5, 0.75, 1.0])
        summary.index = pd.Index([f"quartile {k}" for k in range(5)])
        summary.loc["mean"] = numbers.mean()
        for (column, name), value in summary.unstack().items():
            figures[f"{path.stem}/{column}/{name}"] = float(value)
    return figures


def flatten(report: Mapping[str, Any]) -> Figures:
    """Return the figures of a report by their path, without those of `EXCLUDED`.

    >>> history = [{"round": 3, "epoch": 1, "phase": "admm", "train": {"loss": 0.5}}]
    >>> flatten({"seconds": 2.0, "history": history})
    {'history/epoch 1, phase admm/train/loss': 0.5}
    """
    paths = leaves(report, EXCLUDED)
    return {path: value for path, value in paths if value is not None}


def leaves(
    value: Any, excluded: Collection[str] = (), path: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the values in JSON by path; a list of texts is one, in any order."""
    if isinstance(value, list):
        if value and all(isinstance(item, str) for item in value):
            value = ", ".join(sorted(value))
        else:
            value = dict(_named(value))
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key not in excluded:
                yield from leaves(item, excluded, f"{path}/{key}" if path else key)
    else:
        is_finite = isinstance(value, float) and math.isfinite(value)
        # without the digits that are never compared
        yield path, float(f"{value:.{SIGNIFICANT_DIGITS}g}") if is_finite else value


def _named(items: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the items of a list, records without the fields that name them."""
    seen: Counter[str] = Counter()
    for number, item in enumerate(items):
        record = item if isinstance(item, Mapping) else {}
        keys = [key for key in NAMES if isinstance(record.get(key), str | int)]
        name = ", ".join(f"{key} {record[key]}" for key in keys) or str(number)
        seen[name] += 1
        rest = {key: value for key, value in record.items() if key not in keys}
        repeat = f" ({seen[name]})" if seen[name] > 1 else ""
        yield name + repeat, rest if record else item


class Difference(NamedTuple):
    """How a new report differs from an old one.

    Failures are figures that differ, are missing, or bytes that have grown; notes are
    what differs and may; furthest is the largest relative difference of a number that
    must be equal.
    """

    failures: list[str]
    notes: list[str]
    furthest: float


def compare(old: Figures, new: Figures) -> Difference:
    """Return how the figures of a new report differ from those of an old one."""
    failures: list[str] = []
    notes: list[str] = []
    furthest = 0.0
    for path in dict.fromkeys([*old, *new]):
        before: Any = old.get(path)
        now: Any = new.get(path)
        is_equal = before == now
        if path in old and path in new:
            if not BYTES.isdisjoint(path.split("/")):
                is_equal = now <= before
            elif not isinstance(before, str | bool) and not isinstance(now, str | bool):
                difference = relative_difference(float(before), float(now))
                furthest = max(furthest, difference)
                is_equal = difference <= TOLERANCE
        if not is_equal:
            # words may be replaced by others, but for the run's status; so may what
            # concerns a setting that is gone
            is_word = isinstance(before, str) and path != "status"
            is_note = is_word or path not in old or path.startswith("chosen/")
            texts = notes if is_note else failures
            texts.append(f"{path}: {before!r} before, {now!r} now")
    return Difference(failures, notes, furthest)


def relative_difference(old: float, new: float) -> float:
    """Return by how much of the larger one two numbers differ; inf if one is NaN.

    >>> relative_difference(2.0, 1.0), relative_difference(1e-14, -1e-14)
    (0.5, 0.0)
    >>> relative_difference(math.nan, math.nan)
    0.0
    """
    if math.isnan(old) or math.isnan(new):
        return 0.0 if math.isnan(old) and math.isnan(new) else math.inf
    difference = abs(old - new)
    return difference / max(abs(old), abs(new)) if difference > NEGLIGIBLE else 0.0


def print_comparison(old: Record, new: Record, names: Sequence[str]) -> int:
    """Print how a new record differs from an old one; return the exit status."""
    print(f"old {old['commit'][:10]}, new {new['commit'][:10]}")
    is_equal = True
    for name in names:
        if name not in old["runs"] or name not in new["runs"]:
            print(f"NOT COMPARED: {name} is missing or failed")
            is_equal = False
            continue
        before, now = old["runs"][name], new["runs"][name]
        result = compare(before, now)
        is_equal &= not result.failures
        payloads = (run["bytes_up"] + run["bytes_down"] for run in (before, now))
        print(
            f"{name}: {len(before)} figures, furthest apart {result.furthest:.1e}; "
            "payload {:,} bytes before, {:,} now".format(*payloads),
            *(f"  DIFFERS {text}" for text in result.failures),
            *(f"  note: {text}" for text in result.notes),
            sep="\n",
        )
    print("all numbers are equal" if is_equal else "NOT all numbers are equal")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
