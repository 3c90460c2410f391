"""The node config of a SuperNode, which only the owner of the site can set."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tp_flower.errors import SettingsError
from tp_flower.files import home_folder

TABLES: Final = "tables"  # path of the tables file
STATE_DIR: Final = "state-dir"  # for what the site stores; ":memory:": nothing on disk
CACHE_GB: Final = "cache-gb"  # gigabytes that the cache in that folder may use
ALLOWED_KEYS: Final = "allowed-keys"
"""File with the public keys of the sites that may have a secret of this one's runs."""
APP_SHA256: Final = "app-sha256"  # of the run's bundle, set by client_apps.supernode
KEYS: Final = "keys"  # ``"unchecked"``: public keys may be whatever the server relays
UNCHECKED: Final = "unchecked"
SESSION_FRONT: Final = "session-front"  # address at which the site asks for messages
SESSION_CA: Final = "session-ca"  # path of who vouches for it; absent: the system's
PARTITION_ID: Final = "partition-id"
"""Number of the node in a simulation."""
NUM_PARTITIONS: Final = "num-partitions"
"""Nodes of a simulation."""

IN_MEMORY: Final = ":memory:"  # as a state folder: nothing is stored on disk
DEFAULT_CACHE_GB: Final = 20

NodeConfig = Mapping[str, object]


def state_dir(node_config: NodeConfig) -> str:
    """Return the site's state folder, or ``":memory:"``."""
    folder = str(node_config.get(STATE_DIR) or "")
    if not folder:
        return str(home_folder() / "state")
    if folder == IN_MEMORY:
        return folder
    # errors are cleaned of this path: a relative one, such as ".", matches too much
    return str(Path(folder).expanduser().absolute())


def app_sha256(node_config: NodeConfig) -> str:
    """Return the SHA-256 of the app bundle that runs, 64 hexadecimal digits.

    It is "" in a simulation, and at a SuperNode that runs any bundle.
    """
    return str(node_config.get(APP_SHA256, ""))


def site_id(node_config: NodeConfig, node_id: int) -> str:
    """Return the site's unique name: its permanent partition, or else its node."""
    partition = node_config.get(PARTITION_ID)
    if partition is None:
        return f"{node_id:x}"
    if type(partition) is not int or partition < 0:
        raise SettingsError(
            f"node config {PARTITION_ID} must be a whole number, at least 0, not "
            f"{partition!r}"
        )
    return str(partition)


def cache_limit(node_config: NodeConfig) -> int:
    """Return how many bytes the site's cache may take."""
    gigabytes = node_config.get(CACHE_GB, DEFAULT_CACHE_GB)
    try:
        limit = float(str(gigabytes))
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise SettingsError(
            f"node config {CACHE_GB} must be a number of gigabytes, at least 0, not "
            f"{gigabytes!r}"
        )
    return int(limit * 1e9)
