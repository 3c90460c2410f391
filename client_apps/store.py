"""What a site keeps between the messages of a run.

Arrays that never change within a run (features, multiplicities, a factorisation, a
batch plan) lie in files, written atomically and memory-mapped when read, because the
next message may be answered by another process. Each process also keeps what it has
read, by run and node: in simulation one process answers for several nodes. What changes
from message to message (parameters) is small and travels in Flower's
``context.state``.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from client_apps.cache import STALE_SECONDS
from client_apps.folders import whole_folder
from tp_flower.errors import SiteError

AnyArray = npt.NDArray[Any]

IN_MEMORY = ":memory:"
META_FILE = "meta.json"

_RUN: Final = re.compile(r"[0-9a-f]+-[0-9a-f]+")


@dataclass(frozen=True)
class Entry:
    """Arrays by name and a JSON-able description."""

    arrays: Mapping[str, AnyArray]
    meta: Mapping[str, Any]


@dataclass
class _ProcessCache:
    """Entries that this process has written or read, by (run, node) and name."""

    sites: dict[tuple[int, int], dict[str, Entry]] = field(default_factory=dict)


_CACHE = _ProcessCache()


class SiteStore:
    """The entries of one node in one run.

    Args:
        root: folder for the files; ``":memory:"`` keeps everything in this process.
        run_id: Flower's run.
        node_id: Flower's node.

    Attributes:
        run: names the run and the node.
    """

    def __init__(self, root: str, run_id: int, node_id: int) -> None:
        self.run = f"{run_id:x}-{node_id:x}"
        self._key = (run_id, node_id)
        self._folder = None if root == IN_MEMORY else Path(root) / self.run

    def touch(self) -> None:
        """Say that the run goes on, if anything of it is kept."""
        if self._folder is not None:
            with suppress(OSError):
                os.utime(self._folder)

    def forget_stale(self) -> list[str]:
        """Remove what runs have left that were killed: their keys and working files.

        Returns:
            The runs' names.
        """
        if self._folder is None or not self._folder.parent.is_dir():
            return []
        removed = []
        oldest = time.time() - STALE_SECONDS
        for folder in self._folder.parent.iterdir():
            # another process may be removing it
            with suppress(OSError):
                is_stale = folder.stat().st_mtime < oldest
                if is_stale and _RUN.fullmatch(folder.name):
                    shutil.rmtree(folder, ignore_errors=True)
                    removed.append(folder.name)
        return removed

    def save(self, name: str, entry: Entry) -> None:
        """Keep an entry; it replaces one of the same name.

        Raises:
            SiteError: if the files cannot be written.
        """
        if self._folder is not None:
            try:
                self._write(self._folder, name, entry)
            except OSError as error:
                raise cannot_write(self._folder, error) from error
        _CACHE.sites.setdefault(self._key, {})[name] = entry

    def has(self, name: str) -> bool:
        """Return whether there is an entry of this name."""
        is_cached = name in _CACHE.sites.get(self._key, {})
        return is_cached or bool(self._folder and (self._folder / name).is_dir())

    def load(self, name: str) -> Entry:
        """Return an entry; its arrays may be read-only memory maps.

        Raises:
            SiteError: if this site has no such entry for the run.
        """
        cached = _CACHE.sites.get(self._key, {}).get(name)
        if cached is not None:
            return cached
        if self._folder is None:
            raise lost_state()
        try:
            entry = _read(self._folder / name)
        except (OSError, ValueError, KeyError) as error:
            raise lost_state() from error
        _CACHE.sites.setdefault(self._key, {})[name] = entry
        return entry

    def remember(self, name: str, entry: Entry) -> None:
        """Keep an entry in this process alone, until the run ends."""
        _CACHE.sites.setdefault(self._key, {})[name] = entry

    def recall(self, name: str) -> Entry | None:
        """Return an entry that this process has, None if it has none."""
        return _CACHE.sites.get(self._key, {}).get(name)

    def drop(self, name: str) -> None:
        """Forget an entry, if there is one."""
        _CACHE.sites.get(self._key, {}).pop(name, None)
        if self._folder is not None:
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def clear(self) -> None:
        """Forget everything of this node and run."""
        _CACHE.sites.pop(self._key, None)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, folder: Path, name: str, entry: Entry) -> None:
        with whole_folder(folder / name) as whole:
            for key, array in entry.arrays.items():
                np.save(whole / f"{key}.npy", array, allow_pickle=False)
            meta = {"meta": entry.meta, "arrays": list(entry.arrays)}
            (whole / META_FILE).write_text(json.dumps(meta), encoding="utf-8")


def cannot_write(folder: Path, error: OSError) -> SiteError:
    """Return the error about a state folder that cannot be written."""
    reason = error.strerror or type(error).__name__
    return SiteError(
        f"cannot write to the state folder {folder}: {reason} "
        "(node config state-dir names another folder)"
    )


def lost_state() -> SiteError:
    """Return the error about state that is gone or damaged."""
    return SiteError(
        "the site has lost its state for this run (was it restarted?); "
        "start the run again"
    )


def _read(folder: Path) -> Entry:
    document = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
    arrays = {
        key: np.load(folder / f"{key}.npy", mmap_mode="r", allow_pickle=False)
        for key in document["arrays"]
    }
    return Entry(arrays, document["meta"])
