"""Two hospitals, a lab and a registry learn together who will be readmitted.

    python hospitals.py explain [--full]|train|predict

The organisations have a folder each beside this file. All run in this process, and send
the messages that they would send over a network; docs/tutorial/hospitals.md walks
through it.
"""

import sys
import tomllib
from logging import CRITICAL
from pathlib import Path

from flwr.common.logger import update_console_handler

from client_apps.app import app as site_app
from client_apps.data.key_files import site_key
from strategies.run.grid import InProcessGrid
from tp_flower import api
from tp_flower.errors import TPFlowerError, failure_text
from tp_flower.node_config import ALLOWED_KEYS, KEYS, STATE_DIR
from tp_flower.settings import Settings

FOLDER = Path(__file__).resolve().parent
SITES = ("hospital-a", "hospital-b", "lab", "registry")


def run(
    folder: Path, mode: str = "explain", *options: str, **settings: str | int | float
) -> None:
    """Explain, train or predict; what the server keeps is in the folder ``server``."""
    keys = {site: site_key(folder / site / "state").public.hex() for site in SITES}
    # whom all of them trust; in a deployment each owner writes such a list
    (folder / "keys.txt").write_text(
        "".join(f"{site} {key}\n" for site, key in keys.items())
    )
    (folder / "keys.txt").chmod(0o600)
    grid = InProcessGrid(
        site_app, {site: folder / site / "tables.toml" for site in SITES}
    )
    for site, context in zip(SITES, grid.contexts.values(), strict=True):
        context.node_config[STATE_DIR] = str(folder / site / "state")
        context.node_config[ALLOWED_KEYS] = str(folder / "keys.txt")
        del context.node_config[KEYS]
    file = folder / ("predict.toml" if mode == "predict" else "train.toml")
    config = {**tomllib.loads(file.read_text()), "mode": mode, **settings}
    result = api.run(
        Settings.from_run_config(config),
        grid,
        home=folder / "server",
        announce=api.print_line,
    )
    result.show(full="--full" in options)


if __name__ == "__main__":
    # the logs of all sites would be in this terminal
    update_console_handler(level=CRITICAL)
    try:
        run(FOLDER, *sys.argv[1:])
    except TPFlowerError as error:
        sys.exit(failure_text(error))
