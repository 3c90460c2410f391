"""Print what a site's rows have spent in all runs, and of what budget.

    python -m client_apps.cli.account --tables FILE [--state-dir DIR]
    python -m client_apps.cli.account --export [--state-dir DIR]
    python -m client_apps.cli.account --begin-anew FILE [--state-dir DIR]

Run it as the user of the SuperNode, with what its node config says. What a run that has
not ended has reserved counts in full. ``--export`` prints the lines of the ledger, JSON
with their checksums; ``--begin-anew`` writes them to a new file and forgets them: what
was spent counts no more. Stop the SuperNode before.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from flwr.app import Context, RecordDict, UserConfig
from rich import box
from rich.console import Console
from rich.table import Table

from client_apps.data.ledger import open_ledger
from client_apps.privacy.guard import Guard
from client_apps.rounds.site import Site
from tp_flower.errors import TPFlowerError
from tp_flower.node_config import STATE_DIR, TABLES, state_dir
from tp_flower.sources.policy import DEFAULT_DELTA

CONSOLE_WIDTH = 100


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each shard of a tables file, or the ledger itself."""
    parser = argparse.ArgumentParser(
        prog="python -m client_apps.cli.account",
        description="Print what each table's rows have spent, and of what budget.",
    )
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--tables", help="the site's tables file")
    task.add_argument(
        "--export", action="store_true", help="print the ledger's lines instead"
    )
    task.add_argument(
        "--begin-anew",
        metavar="FILE",
        help="write the ledger's lines to a new file, and begin an empty ledger",
    )
    parser.add_argument(
        "--state-dir",
        default="",
        help="what the SuperNode's node config has as state-dir (default: its default)",
    )
    options = parser.parse_args(arguments)
    root = state_dir({STATE_DIR: options.state_dir})
    try:
        if options.export:
            sys.stdout.writelines(f"{own}\n" for own in open_ledger(root).export())
        elif options.begin_anew:
            begin_anew(root, Path(options.begin_anew))
        else:
            Console(width=CONSOLE_WIDTH).print(account(root, options.tables))
    except TPFlowerError as error:
        parser.exit(1, f"{error}\n")
    except OSError as error:
        parser.exit(1, f"--begin-anew {options.begin_anew}: {error.strerror}\n")


def begin_anew(root: str, file: Path) -> None:
    """Write the lines of a ledger to a new file, and begin an empty one.

    Raises:
        OSError: the file cannot be written, or is there; the ledger stays.
        SiteError: the database cannot be used.
    """
    ledger = open_ledger(root)
    with file.open("x", encoding="utf-8") as exported:
        exported.writelines(f"{own}\n" for own in ledger.export())
        exported.flush()
        os.fsync(exported.fileno())
    ledger.begin_anew()


def account(root: str, tables: str) -> Table:
    """Return what the rows of a site's shards have spent, and of what budget.

    Args:
        root: the site's state folder.
        tables: the tables file.

    Raises:
        SourceError: the tables file cannot be used.
        LedgerError: the ledger cannot.
    """
    config: UserConfig = {TABLES: tables, STATE_DIR: root}
    site = Site(Context(0, 0, config, RecordDict(), {}))
    ledger, guard, sources = open_ledger(root), Guard(site), site.shards()
    budgets = guard.budgets(sources)
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("table at site")
    for heading in ("spent epsilon", "of", "delta"):
        shown.add_column(heading, justify="right")
    for source in sources:
        name = guard.source_id(source)
        budget = budgets.get(name)
        delta = budget.delta if budget else DEFAULT_DELTA
        spent = ledger.total(name, delta)
        allowed = f"{budget.epsilon:g}" if budget else "no budget"
        cells = (f"{spent:.4f}", allowed, f"{delta:g}")
        shown.add_row(f"{source.table} at {source.site}", *cells)
    return shown


if __name__ == "__main__":
    main()
