"""The encoded features of a run's participants: in the site's cache and on its GPU.

Training needs nothing else of a site's tables. In deployment every message starts a
process, so this module imports nothing that reads or encodes tables.

Flower may have a message answered by any process; in simulation one process answers
many. So a process keeps the features that it has copied to a GPU, by run, node and
participant, until the run ends. Copies left by a killed run are released after an hour,
when another run needs the memory.
"""

import json
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np

from client_apps.data.cache import Cache
from client_apps.data.run_store import Entry, SiteStore, lost_state, map_array
from tp_flower.arrays import AnyArray
from tp_flower.errors import SettingsError, is_full
from tp_flower.features.sparse import EncodedRows, SparseRows
from tp_flower.learning.models import local_model
from tp_flower.node_config import IN_MEMORY

FEATURES: Final = "features"
FEATURES_FILE: Final = "features.npy"
VALUES_FILE: Final = "values.npy"
COLUMNS_FILE: Final = "columns.npy"
WIDTH_FILE: Final = "width.json"
"""Sparse rows are two arrays and the number of their columns."""
CACHE_FOLDER: Final = "cache"

LEAST_BYTES: Final = 1 << 30  # GPU memory kept free for what is computed from them
IDLE_SECONDS: Final = 3600.0


class CachedFeatures:
    """The features of one run's participants, and the cache that holds them.

    The cache is None in memory, and is limited to ``limit`` bytes; ``encoded`` are, by
    participant, the cache entries that this message has created or used.
    """

    def __init__(self, root: str, limit: int, store: SiteStore) -> None:
        self.root = root
        self.store = store
        folder = Path(root) / CACHE_FOLDER
        self.cache = None if root == IN_MEMORY else Cache(folder, store.run, limit)
        self.encoded: dict[int, str] = {}

    def drop_cached(self, number: int, entry: Entry) -> Entry:
        """Return a participant's entry without the features that the cache holds."""
        if number not in self.encoded:
            return entry
        return Entry(entry.arrays, {**entry.meta, FEATURES: self.encoded[number]})

    def read(self, entry: Entry) -> EncodedRows:
        """Return the features of a participant's entry, possibly from the cache."""
        features: EncodedRows | str = entry.meta[FEATURES]
        if not isinstance(features, str):
            return features
        name = features
        folder = self.find(features)
        # a process that keeps the memory map keeps its pages: mapping them again takes
        # as long as a pass over the features
        mapped_entry = self.store.memory.get(name)
        if mapped_entry is None:
            mapped_entry = self.store.memory[name] = Entry(
                {}, {FEATURES: map_features(folder)}
            )
        cached: EncodedRows = mapped_entry.meta[FEATURES]
        return cached

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
    """Return the name of the cache entry of a participant's extracted rows."""
    return f"extracted-{number}"


def write_features(
    folder: Path, rows: int, empty: EncodedRows, blocks: Iterable[EncodedRows]
) -> None:
    """Write features (n, d), which come block by block, for `map_features` to read.

    ``empty`` are features of the same layout without rows.
    """
    if isinstance(empty, SparseRows):
        (folder / WIDTH_FILE).write_text(json.dumps(empty.width), encoding="ascii")
    with ExitStack() as stack:
        files = {}
        for name, array in _arrays(empty).items():
            file = files[name] = stack.enter_context((folder / name).open("wb"))
            layout = {
                "descr": array.dtype.newbyteorder("<").str,
                "fortran_order": False,
                "shape": (rows, array.shape[1]),
            }
            np.lib.format.write_array_header_1_0(file, layout)
        for block in blocks:
            for name, array in _arrays(block).items():
                if array.size:
                    files[name].write(np.ascontiguousarray(array).data.cast("B"))


def map_features(folder: Path) -> EncodedRows:
    """Return the features of an entry of the cache, (n, d), memory-mapped."""
    try:
        if not (folder / WIDTH_FILE).exists():
            features: local_model.FeatureArray = map_array(folder / FEATURES_FILE)
            return features
        width = int(json.loads((folder / WIDTH_FILE).read_text(encoding="ascii")))
        return SparseRows(
            map_array(folder / VALUES_FILE), map_array(folder / COLUMNS_FILE), width
        )
    except (OSError, ValueError) as error:
        raise lost_state() from error


def _arrays(features: EncodedRows) -> dict[str, AnyArray]:
    """Return the arrays of features by the names of their files."""
    if isinstance(features, SparseRows):
        return {VALUES_FILE: features.values, COLUMNS_FILE: features.columns}
    return {FEATURES_FILE: features}


_COPIES: Final[dict[tuple[str, int], tuple[local_model.Features, float]]] = {}
"""Features on a device, and when they were last used; by the name of run and site, and
the participant."""


def move_to_device(
    store: SiteStore, number: int, features: EncodedRows, device: str, kind: str
) -> local_model.Features:
    """Return a participant's features (n, d) where its model is computed.

    Those of a torch model are copied to a GPU that has room for them, unless they are
    sparse.

    Raises:
        SettingsError: the device is not there, or its memory is full.
    """
    if (
        kind in local_model.NUMPY_KINDS
        or local_model.resolve(device) == local_model.CPU
    ):
        return features
    key = (store.run, number)
    now = time.monotonic()
    device_features, _ = _COPIES.get(key, (None, now))
    if device_features is None:
        _drop([k for k, (_, used) in _COPIES.items() if now - used > IDLE_SECONDS])
        from tp_flower.learning.models.neural import as_tensor, free_bytes, torch_device

        gpu = torch_device(local_model.CUDA)
        free = free_bytes(gpu)
        if free < LEAST_BYTES and device != local_model.AUTO:
            raise SettingsError(
                f"device is {device!r}, but only {free / 1e9:.1f} GB of this site's "
                f"GPU are free, and training needs at least {LEAST_BYTES / 1e9:.1f} "
                "GB; allowed: 'cpu' and 'auto'"
            )
        if isinstance(features, SparseRows) or features.nbytes > free - LEAST_BYTES:
            # batches are copied one by one
            return features
        device_features = as_tensor(features).to(gpu)
    _COPIES[key] = device_features, now
    return device_features


def forget(store: SiteStore, number: int) -> None:
    """Release the copy of one participant, whose features are encoded anew."""
    _drop([(store.run, number)])


def release(store: SiteStore) -> None:
    """Release the copies of a run in this process, and their memory."""
    _drop([key for key in _COPIES if key[0] == store.run])


def _drop(keys: list[tuple[str, int]]) -> None:
    """Release copies and, if there were any, their GPU memory."""
    dropped = [_COPIES.pop(key, None) for key in keys]
    torch = sys.modules.get("torch")
    if any(dropped) and torch is not None and torch.cuda.is_initialized():
        # torch would keep the memory for later, but other processes may need it
        torch.cuda.empty_cache()
