"""Compare the metrics of two runs, epoch by epoch.

    python scripts/deploy/compare_reports.py REPORT REPORT [--tolerance 1e-6]

Exit status: 0 equal within the tolerance, 1 not.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TOLERANCE = 1e-6


def main(arguments: Sequence[str]) -> int:
    """Print the largest difference and the final metrics; return the exit status."""
    parser = argparse.ArgumentParser(description="Compare the metrics of two runs.")
    parser.add_argument("first", type=Path, metavar="REPORT")
    parser.add_argument("second", type=Path, metavar="REPORT")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    options = parser.parse_args(arguments)
    first, second = (
        metrics(json.loads(path.read_text(encoding="utf-8")))
        for path in (options.first, options.second)
    )
    if first.keys() != second.keys():
        differing = sorted(first.keys() ^ second.keys())
        print(f"only one of the runs has {', '.join(differing)}", file=sys.stderr)
        return 1
    # not `max`: a NaN on either side must not pass
    furthest = {name: abs(value - second[name]) for name, value in first.items()}
    beyond = [n for n, off in furthest.items() if not off <= options.tolerance]
    for name in [name for name in first if name.startswith("final")]:
        print(f"  {name:24} {first[name]:.9f} {second[name]:.9f}")
    for name in beyond:
        print(f"{name}: {first[name]!r} and {second[name]!r}", file=sys.stderr)
    print(f"  {len(first)} metrics, furthest apart: {max(furthest.values()):.1e}")
    return 1 if beyond else 0


def metrics(report: Mapping[str, Any]) -> dict[str, float]:
    """Return every metric of a report by epoch and name.

    >>> metrics({"history": [{"epoch": 1, "train": {"loss": 0.5}, "test": {}}],
    ...          "final": {"train": {"loss": 0.5}}})
    {'epoch 1 train loss': 0.5, 'final train loss': 0.5}
    """
    places = [(f"epoch {own['epoch']}", own) for own in report["history"]]
    places.append(("final", report["final"]))
    return {
        f"{place} {part} {name}": float(value)
        for place, own in places
        for part in ("train", "test")
        for name, value in (own.get(part) or {}).items()
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
