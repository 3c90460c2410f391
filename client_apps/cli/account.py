"""Print what a site's rows have spent in all runs, and of what budget.

    python -m client_apps.cli.account --tables FILE [--state-dir DIR]

Run it as the user of the SuperNode, with what its node config says. What a run that has
not ended has reserved counts in full.
"""

import argparse
from collections.abc import Sequence

from flwr.app import Context, RecordDict
from rich import box
from rich.console import Console
from rich.table import Table

from client_apps.privacy.guard import Guard
from client_apps.rounds.site import Site
from tp_flower.errors import TPFlowerError
from tp_flower.node_config import STATE_DIR, TABLES
from tp_flower.sources.policy import DEFAULT_DELTA

CONSOLE_WIDTH = 100


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each shard of a tables file."""
    parser = argparse.ArgumentParser(
        prog="python -m client_apps.cli.account",
        description="Print what each table's rows have spent, and of what budget.",
    )
    parser.add_argument("--tables", required=True, help="the site's tables file")
    parser.add_argument(
        "--state-dir",
        default="",
        help="what the SuperNode's node config has as state-dir (default: its default)",
    )
    given = parser.parse_args(arguments)
    config = {TABLES: given.tables, STATE_DIR: given.state_dir}
    site = Site(Context(0, 0, {k: v for k, v in config.items() if v}, RecordDict(), {}))
    try:
        shown = account(site)
    except TPFlowerError as error:
        parser.exit(1, f"{error}\n")
    Console(width=CONSOLE_WIDTH).print(shown)


def account(site: Site) -> Table:
    """Return what the rows of a site's shards have spent, and of what budget.

    Raises:
        SourceError: the tables file cannot be used.
        LedgerError: the ledger cannot.
    """
    guard, sources = Guard(site), site.shards()
    budgets = guard.budgets(sources)
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("table at site")
    for heading in ("spent epsilon", "of", "delta"):
        shown.add_column(heading, justify="right")
    for source in sources:
        name = guard.source_id(source)
        budget = budgets.get(name)
        delta = budget.delta if budget else DEFAULT_DELTA
        spent = site.ledger.total(name, delta)
        allowed = f"{budget.epsilon:g}" if budget else "no budget"
        cells = (f"{spent:.4f}", allowed, f"{delta:g}")
        shown.add_row(f"{source.table} at {source.site}", *cells)
    return shown


if __name__ == "__main__":
    main()
