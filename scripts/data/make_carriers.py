"""Write the flights by carrier: 16 sites with the same columns, and how to train there.

    python scripts/data/make_carriers.py DIR

Every carrier is a site with its own departures from New York in 2013, each with the
weather, the plane and the destination; models of the sites' own say what will be late.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.data.carriers import CARRIERS_SQL, make_carriers
from scripts.data.run_files import (
    RUN_FILE,
    DataError,
    make_folder,
    print_commands,
    write_run,
    write_tables,
)
from tp_flower.errors import SourceError

QUESTION = "Will a flight be more than 15 minutes late? A model for every carrier."
SETTINGS: dict[str, str | float] = {
    "strategy": "personalised",
    "graph-penalty": 0.0003,
    "graph-weights": "rows",
}


def main(arguments: Sequence[str]) -> int:
    """Write the files and print the command that uses them; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="to write to")
    folder = parser.parse_args(arguments).folder.resolve()
    try:
        make_folder(folder)
        carriers = make_carriers(folder)
    except (DataError, SourceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_tables(folder, {"departures": [(f"{own}.parquet", own) for own in carriers]})
    run = write_run(folder / RUN_FILE, QUESTION, CARRIERS_SQL, SETTINGS)
    print_commands("The flights by carrier", folder, [run])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
