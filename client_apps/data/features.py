"""The encoded features of a run's parts, as its messages find them in the site's cache.

Training needs nothing else of a site's tables. So this module imports nothing that
reads or encodes them: in deployment every message starts a process.
"""

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from client_apps.data.cache import Cache
from client_apps.data.run_store import Entry, SiteStore, lost_state
from tp_flower.errors import is_full
from tp_flower.node_config import IN_MEMORY

FeatureArray = npt.NDArray[np.float32]

FEATURES: Final = "features"
FEATURES_FILE: Final = "features.npy"
CACHE_FOLDER: Final = "cache"


class KeptFeatures:
    """The features of one run's parts, and the cache that they lie in.

    Args:
        root: the state folder; ``":memory:"`` keeps everything in this process.
        limit: bytes that the cache may take.
        store: what is kept of the run; it knows which entries are the run's.

    Attributes:
        root: as given.
        store: as given.
        cache: of the site, None in memory.
        encoded: the entries of the cache that this message has made or found, by part.
    """

    def __init__(self, root: str, limit: int, store: SiteStore) -> None:
        self.root, self.store = root, store
        self.cache: Cache | None = None
        if root != IN_MEMORY:
            self.cache = Cache(Path(root) / CACHE_FOLDER, store.run, limit)
        self.encoded: dict[int, str] = {}

    def without(self, number: int, entry: Entry) -> Entry:
        """Return a part's entry without the features that the cache has."""
        if number not in self.encoded:
            return entry
        arrays = {name: a for name, a in entry.arrays.items() if name != FEATURES}
        return Entry(arrays, {**entry.meta, FEATURES: self.encoded[number]})

    def added_to(self, entry: Entry) -> Entry:
        """Return a part's entry with the features from the cache.

        Raises:
            SiteError: they are gone.
        """
        if self.cache is None or FEATURES in entry.arrays:
            return entry
        name = str(entry.meta[FEATURES])
        folder = self.find(name)
        # a map that a process keeps, keeps its pages: finding them anew takes as long
        # as a pass over the features
        known = self.store.recall(name)
        if known is None:
            known = Entry({FEATURES: mapped(folder)}, {})
            self.store.remember(name, known)
        return Entry({**entry.arrays, **known.arrays}, entry.meta)

    def find(self, name: str) -> Path:
        """Return the folder of an entry of the cache.

        Raises:
            SiteError: it is gone.
        """
        folder = self.cache.find(name) if self.cache else None
        if folder is None:
            raise lost_state()
        return folder

    def make_room(self, error: BaseException | None) -> bool:
        """Remove from the cache what no run uses, if the disk is full.

        Returns:
            Whether it is worth while to try again.
        """
        if self.cache is None or not (isinstance(error, OSError) and is_full(error)):
            return False
        self.cache.shrink(0)
        return True

    def release(self) -> None:
        """Forget the run: its entries stay as long as they fit."""
        if self.cache is not None:
            self.cache.release()


def rows_of(number: int) -> str:
    """Return the name of the entry that says where a part's rows are."""
    return f"extracted-{number}"


def mapped(folder: Path) -> FeatureArray:
    """Return the features of an entry of the cache, (n, d), memory-mapped.

    Raises:
        SiteError: they are gone.
    """
    path = folder / FEATURES_FILE
    try:
        features: FeatureArray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise lost_state() from error
    return features
