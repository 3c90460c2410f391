"""Print a site's long-term public key, for the ``allowed-keys`` files of other sites.

    python -m client_apps.cli.site_key [--state-dir DIR]

Run it as the user of the SuperNode, with its state-dir. The key is made when it is
asked for first; the private part stays in the state folder.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from client_apps.data.key_files import site_key
from tp_flower.errors import TPFlowerError
from tp_flower.node_config import STATE_DIR, state_dir


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the public key of the site with a state folder, in hexadecimal."""
    parser = argparse.ArgumentParser(
        prog="python -m client_apps.cli.site_key",
        description="Print this site's long-term public key.",
    )
    parser.add_argument(
        "--state-dir",
        default="",
        help="what the SuperNode's node config has as state-dir (default: its default)",
    )
    given = parser.parse_args(arguments).state_dir
    if given and not Path(given).expanduser().is_absolute():
        parser.error(f"{given!r} is not an absolute path, as the SuperNode's must be")
    try:
        public = site_key(state_dir({STATE_DIR: given})).public
    except TPFlowerError as error:
        parser.exit(1, f"{error}\n")
    sys.stdout.write(public.hex() + "\n")


if __name__ == "__main__":
    main()
