"""Compare the numbers of the same runs by an old and a new version of the project.

    python scripts/checks/same_numbers.py --old COMMIT [--new COMMIT] [--runs a,b]
    python scripts/checks/same_numbers.py --old COMMIT --record FILE
    python scripts/checks/same_numbers.py --old-record FILE [--new COMMIT]

A version is a commit, or the folder of a checkout. Every run is a real one, started as
a user starts it, in one thread, and with the key of all noise fixed: what a site draws
by a key of its own, such as a coreset, differs from run to run otherwise. --record
writes the figures of the old version (--new is not run), to be compared with by
--old-record; runs that the file has of the same commit stay in it. Each side takes
about ten minutes on an idle core.

Exit status: 0 all numbers are equal, 1 some are not or a run failed, 2 the arguments
are not usable.
"""

import argparse
import json
import re
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from scripts.checks.checkouts import ONE_THREAD, Checkout, CheckoutError, check_out
from scripts.checks.report_figures import Figures, compare, flatten

SCHEMA = 1
STORE_SIZES = ("--orders", "2000", "--items", "100", "--customers", "300")
SUPERNODES = 5
MOST_NOTES = 12
LOG_LINES = 25
_UNKNOWN = re.compile(r"([\w.-]+): unknown setting")

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

Setting = str | int | float | bool
Record = dict[str, Any]


_DECLARED = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
RUNS: Mapping[str, Mapping[str, Any]] = _DECLARED["runs"]
"""The runs that are compared; their file says what is declared of each."""


class FailedRun(Exception):  # noqa: N818 - a run of the version, not of this script
    """A run did not complete."""


def main(arguments: Sequence[str]) -> int:
    """Run what is asked for and compare; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if bool(options.old) == bool(options.old_record):
        parser.error("give either --old or --old-record")
    if options.record and not options.old:
        parser.error("--record writes the figures of --old")
    try:
        if options.old_record:
            old = read_record(options.old_record)
        else:
            old = measure(options.old, options.runs)
        if options.record:
            write_record(options.record, old)
            return 1 if old["failed"] else 0
        new = measure(options.new, options.runs)
    except (CheckoutError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return print_comparison(old, new, options.runs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--old", default="", metavar="VERSION")
    parser.add_argument("--new", default="HEAD", metavar="VERSION")
    parser.add_argument(
        "--runs",
        type=run_names,
        default=list(RUNS),
        metavar="NAME,..",
        help=f"some of: {', '.join(RUNS)} (default: all)",
    )
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--old-record", type=Path, metavar="FILE")
    return parser


def run_names(text: str) -> list[str]:
    """Return the runs of ``"store-2,evaluate"`` in order, with those that they need."""
    names = set(text.split(","))
    unknown = sorted(names - RUNS.keys())
    if unknown:
        message = f"no run {unknown[0]!r}; there are {', '.join(RUNS)}"
        raise argparse.ArgumentTypeError(message)
    names |= {RUNS[name].get("after", name) for name in names}
    return [name for name in RUNS if name in names]


def read_record(path: Path) -> Record:
    """Return the record in a file.

    Raises:
        ValueError: it is no record of this schema.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        message = f"{path} is no record of schema {SCHEMA}: record it anew"
        raise ValueError(message)
    return content


def write_record(path: Path, record: Record) -> None:
    """Write a record; one of the same commit that is there keeps its other runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = read_record(path) if path.exists() else record
    if before["commit"] == record["commit"]:
        for part in ("seconds", "runs"):
            record[part] = {**before[part], **record[part]}
    path.write_text(json.dumps(record, indent=0) + "\n", encoding="utf-8")


def measure(version: str, names: Sequence[str]) -> Record:
    """Return the figures of a version's runs; of a failed run, the end of its log."""
    runs: dict[str, Figures] = {}
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
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
                failed[name] = str(error)
                print(f"  {name} failed:\n{error}", flush=True)
                continue
            seconds[name] = round(time.perf_counter() - started, 1)
            print(f"  {name}: {seconds[name]} s", flush=True)
        commit = checkout.commit
    return {
        "schema": SCHEMA,
        "commit": commit,
        "seconds": seconds,
        "failed": failed,
        "runs": runs,
    }


def run_figures(checkout: Checkout, name: str, folder: Path) -> Figures:
    """Return the figures of one run, in the folder of the version's data and runs.

    Raises:
        FailedRun: it did not complete.
    """
    run = RUNS[name]
    output = folder / name
    settings: dict[str, Setting] = {**run["settings"], "output-dir": str(output)}
    if "sql" in settings:
        settings["sql"] = _DECLARED["sql"][settings["sql"]]
    if "data" in run:
        data = make_data(checkout, run["data"], folder)
        file = tomllib.loads((data / "my-run.toml").read_text(encoding="utf-8"))
        settings = {**file, **settings, "tables": str(data / "tables.toml")}
    _start(checkout, settings, run.get("supernodes", SUPERNODES), folder)
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    return {**flatten(report), **prediction_figures(output)}


def _start(
    checkout: Checkout, settings: dict[str, Setting], supernodes: int, folder: Path
) -> None:
    """Run the app; settings that this version does not have are left out."""
    noise = folder / "fixed-noise"
    noise.mkdir(exist_ok=True)
    (noise / "sitecustomize.py").write_text(FIXED_NOISE, encoding="utf-8")
    environment = {**ONE_THREAD, "PYTHONPATH": str(noise)}
    nodes = f"num-supernodes={supernodes} client-resources-num-cpus=1"
    config = folder / "run.toml"
    while True:
        config.write_text(toml_text(settings), encoding="utf-8")
        options = ["-c", str(config), "--federation-config", nodes]
        done = checkout.run("run_app", options, folder, environment)
        unknown = settings.keys() & set(_UNKNOWN.findall(done.stdout))
        if not done.returncode or not unknown:
            break
        print(f"  without {', '.join(sorted(unknown))}: unknown to this version")
        settings = {k: v for k, v in settings.items() if k not in unknown}
    if done.returncode:
        raise FailedRun("\n".join(done.stdout.splitlines()[-LOG_LINES:]))


def make_data(checkout: Checkout, name: str, folder: Path) -> Path:
    """Return a folder with tables and a run file, made by this version's own script.

    Raises:
        FailedRun: the script failed.
    """
    data = folder / "data" / name
    if data.exists():
        return data
    data.mkdir(parents=True)
    if name == "carriers":
        done = checkout.run("make_carriers", [str(data)], folder)
    else:
        done = checkout.run("make_store", [str(data), *STORE_SIZES], folder)
    if done.returncode:
        raise FailedRun(done.stdout)
    if name == "store-rows":
        _let_rows_leave(data / "tables.toml")
    return data


def _let_rows_leave(path: Path) -> None:
    """Allow what coresets need: that drawn rows leave their sites."""
    policies = [
        f'[tables.{table}.policy]\nreleases = {{ rows = "clear" }}\n'
        for table in ("orders", "items", "customers")
    ]
    text = path.read_text(encoding="utf-8")
    path.write_text("\n".join([text, *policies]), encoding="utf-8")


def toml_text(settings: Mapping[str, Setting]) -> str:
    r"""Return settings as a TOML file; JSON writes the same values.

    >>> print(toml_text({"l2": 0.1, "sql": "a\nb", "progress": True}))
    l2 = 0.1
    sql = "a\nb"
    progress = true
    """
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())


def prediction_figures(output: Path) -> Figures:
    """Return what is the same of predictions in any order of their rows."""
    figures: Figures = {}
    for path in output.glob("*.parquet"):
        table = pd.read_parquet(path)
        figures[f"{path.stem}/rows"] = len(table)
        for column, values in table.select_dtypes("floating").astype(float).items():
            name = f"{path.stem}/{column}"
            for number, value in enumerate(values.quantile([0.0, 0.25, 0.5, 0.75, 1])):
                figures[f"{name}/quartile {number}"] = float(value)
            figures[f"{name}/mean"] = float(values.mean())
    return figures


def print_comparison(old: Record, new: Record, names: Sequence[str]) -> int:
    """Print how a new record differs from an old one; return the exit status."""
    print(f"old {old['commit'][:10]}, new {new['commit'][:10]}")
    is_equal = True
    for name in names:
        if name not in old["runs"] or name not in new["runs"]:
            print(f"NOT COMPARED: {name} is missing or failed")
            is_equal = False
            continue
        result = compare(old["runs"][name], new["runs"][name])
        is_equal &= not result.failures
        print(
            f"{name}: {result.compared} figures, furthest apart "
            f"{result.furthest:.1e}; payload {result.old_bytes:,} bytes before, "
            f"{result.new_bytes:,} now"
        )
        lines = [f"  DIFFERS {text}" for text in result.failures]
        lines += [f"  note: {text}" for text in result.notes[:MOST_NOTES]]
        if len(result.notes) > MOST_NOTES:
            lines.append(f"  and {len(result.notes) - MOST_NOTES} more notes")
        print(*lines, sep="\n", end="\n" if lines else "")
    print("all numbers are equal" if is_equal else "NOT all numbers are equal")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
