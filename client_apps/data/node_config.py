"""What the owner of a site sets in the node config of its SuperNode."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tp_flower.errors import SettingsError
from tp_flower.files import home_folder

STATE_DIR: Final = "state-dir"
CACHE_GB: Final = "cache-gb"
PARTITION: Final = "partition-id"
DEFAULT_CACHE_GB: Final = 20

IN_MEMORY: Final = ":memory:"
"""As a state folder: nothing is kept on disk."""

NodeConfig = Mapping[str, object]


def state_dir(node_config: NodeConfig) -> str:
    """Return the folder for what a site keeps; ``":memory:"`` is none."""
    if given := str(node_config.get(STATE_DIR) or ""):
        if given == IN_MEMORY:
            return given
        # of a relative one, "." say, errors would be cleaned of more than a path
        return str(Path(given).expanduser().absolute())
    return str(home_folder() / "state")


def site_id(node_config: NodeConfig, node_id: int) -> str:
    """Return what tells a site from others that have the same state folder.

    A node that is started again may have another number, but not another partition.

    Raises:
        SettingsError: the node config has a partition that is none.
    """
    given = node_config.get(PARTITION)
    if given is None:
        return f"{node_id:x}"
    if type(given) is not int or given < 0:
        raise SettingsError(
            f"node config {PARTITION} must be a whole number from 0 on, not {given!r}"
        )
    return str(given)


def cache_limit(node_config: NodeConfig) -> int:
    """Return how many bytes the site's cache may take.

    Raises:
        SettingsError: the node config has none.
    """
    given = node_config.get(CACHE_GB, DEFAULT_CACHE_GB)
    try:
        limit = float(str(given))
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise SettingsError(
            f"node config {CACHE_GB} must be a number of gigabytes from 0 on, "
            f"not {given!r}"
        )
    return int(limit * 1e9)
