"""Make the page of a run from its `report.json` again, or compare several runs.

    python scripts/report.py RUN [RUN ...] [-o FILE]

A RUN is the folder of a run or its report.json. The page is that of the first one, with
the others beside it; of one alone, with the earlier runs of the same query in the same
folder. Without -o it is written to report.html beside the first run's report.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tp_flower.report import write_whole
from tp_flower.report_page import (
    PAGE_FILE,
    ReportError,
    earlier_runs,
    read_report,
    render,
)


def main(arguments: Sequence[str]) -> int:
    """Write the page; return the exit status."""
    options = _parser().parse_args(arguments)
    first: Path = options.runs[0]
    folder = first if first.is_dir() else first.parent
    try:
        report, *others = map(read_report, options.runs)
        page = render(report, others or earlier_runs(folder, report))
        path = write_whole(options.output or folder / PAGE_FILE, page)
    except (OSError, ReportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"Page: {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Make the page of a run again, or compare several runs."
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run's folder or report"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
