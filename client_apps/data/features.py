"""The encoded features of a run's participants: in the site's cache and on its GPU.

Training needs nothing else of a site's tables. In deployment every message starts a
process, so this module imports nothing that reads or encodes tables.

Flower may have a message answered by any process; in simulation one process answers many. So a
process keeps the features that it has copied to a GPU, by run, node and participant, until the run
ends. Copies left by a killed run are released after an hour, when another run needs the memory.
"""

import sys
import time
from pathlib import Path
from typing import Final

import numpy as np

from client_apps.data.cache import Cache
from client_apps.data.run_store import Entry, SiteStore, lost_state
from tp_flower.errors import SettingsError, is_full
from tp_flower.learning.models import local_model
from tp_flower.node_config import IN_MEMORY

FEATURES: Final = "features"
FEATURES_FILE: Final = "features.npy"
CACHE_FOLDER: Final = "cache"

LEAST_BYTES: Final = 1 << 30  # GPU memory kept free for what is computed from them
IDLE_SECONDS: Final = 3600.0


class CachedFeatures:
    """The features of one run's participants, and the cache that holds them.

    The cache is None in memory, and is limited to ``limit`` bytes; ``encoded`` are, by
    participant, the cache entries that this message has created or used.
    """

    def __init__(self, root: str, limit: int, store: SiteStore) -> None:
        self.root, self.store = root, store
        folder = Path(root) / CACHE_FOLDER
        self.cache = None if root == IN_MEMORY else Cache(folder, store.run, limit)
        self.encoded: dict[int, str] = {}

    def without(self, number: int, entry: Entry) -> Entry:
        """Return a participant's entry without the features that the cache holds."""
        if number not in self.encoded:
            return entry
        arrays = {name: a for name, a in entry.arrays.items() if name != FEATURES}
        return Entry(arrays, {**entry.meta, FEATURES: self.encoded[number]})

    def of(self, entry: Entry) -> local_model.FeatureArray:
        """Return the features of a participant's entry, possibly from the cache."""
        if FEATURES in entry.arrays:
            return entry.arrays[FEATURES]
        name = str(entry.meta[FEATURES])
        folder = self.find(name)
        # a process that keeps the memory map keeps its pages: mapping them again takes
        # as long as a pass over the features
        opened = self.store.memory.get(name)
        if opened is None:
            opened = self.store.memory[name] = Entry({FEATURES: mapped(folder)}, {})
        return opened.arrays[FEATURES]

    def find(self, name: str) -> Path:
        """Return the folder of an entry of the cache; LostStateError if it is gone."""
        folder = self.cache.find(name) if self.cache else None
        if folder is None:
            raise lost_state()
        return folder

    def make_room(self, error: OSError) -> bool:
        """Remove unused cache entries if the disk is full; return whether it was."""
        if self.cache is None or not is_full(error):
            return False
        self.cache.shrink(0)
        return True

    def release(self) -> None:
        """Forget the run: its entries stay as long as they fit."""
        if self.cache is not None:
            self.cache.release()


def rows_of(number: int) -> str:
    """Return the cache entry's name for which rows take part in training."""
    return f"extracted-{number}"


def mapped(folder: Path) -> local_model.FeatureArray:
    """Return the features of an entry of the cache, (n, d), memory-mapped."""
    path = folder / FEATURES_FILE
    try:
        features: local_model.FeatureArray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise lost_state() from error
    return features


_COPIES: Final[dict[tuple[str, int], tuple[local_model.Features, float]]] = {}
"""Features on a device, and when they were last used; by the name of run and site, and
the participant."""


def place(
    store: SiteStore, number: int, features: local_model.FeatureArray, device: str, kind: str
) -> local_model.Features:
    """Return a participant's features (n, d) where its model is computed.

    Those of a torch model are copied to a GPU that has room for them.

    Raises:
        SettingsError: the device is not there, or its memory is full.
    """
    if kind in local_model.NUMPY_KINDS or local_model.resolve(device) == local_model.CPU:
        return features
    key, now = (store.run, number), time.monotonic()
    placed, _ = _COPIES.get(key, (None, now))
    if placed is None:
        _drop([k for k, (_, used) in _COPIES.items() if now - used > IDLE_SECONDS])
        from tp_flower.learning.models.neural import as_tensor, free_bytes, torch_device

        gpu = torch_device(local_model.CUDA)
        free = free_bytes(gpu)
        if free < LEAST_BYTES and device != local_model.AUTO:
            raise SettingsError(
                f"device is {device!r}, but only {free / 1e9:.1f} GB of this site's GPU are free, "
                f"and training needs at least {LEAST_BYTES / 1e9:.1f} GB; allowed: 'cpu' and 'auto'"
            )
        if features.nbytes > free - LEAST_BYTES:
            return features
        placed = as_tensor(features).to(gpu)
    _COPIES[key] = placed, now
    return placed


def forget(store: SiteStore, number: int) -> None:
    """Release the copy of one participant, whose features are encoded anew."""
    _drop([(store.run, number)])


def release(store: SiteStore) -> None:
    """Release the copies of a run in this process, and their memory."""
    _drop([key for key in _COPIES if key[0] == store.run])


def _drop(keys: list[tuple[str, int]]) -> None:
    dropped = [_COPIES.pop(key, None) for key in keys]
    torch = sys.modules.get("torch")
    if any(dropped) and torch is not None and torch.cuda.is_initialized():
        # torch would keep the memory for later, but other processes may need it
        torch.cuda.empty_cache()
