"""Data frames as sources: the sites of one process find them under a token."""

import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Final

import pandas as pd

from tp_flower.errors import SourceError
from tp_flower.sources.entries import MEMORY_PREFIX
from tp_flower.sources.policy import OPEN
from tp_flower.sources.tables_file import ShardSource

Frames = Mapping[str, pd.DataFrame | Sequence[pd.DataFrame]]


class _Registry:
    """The data frames that sites of this process host, by token."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sites: dict[str, tuple[str, dict[str, tuple[pd.DataFrame, ...]]]] = {}

    def add(self, site: str, frames: dict[str, tuple[pd.DataFrame, ...]]) -> str:
        token = uuid.uuid4().hex
        with self._lock:
            self._sites[token] = (site, frames)
        return token

    def get(self, token: str) -> tuple[str, dict[str, tuple[pd.DataFrame, ...]]]:
        with self._lock:
            if token in self._sites:
                return self._sites[token]
        raise SourceError(f"no data frames are registered under {token!r} here")

    def remove(self, token: str) -> None:
        with self._lock:
            self._sites.pop(token, None)


_REGISTRY: Final = _Registry()


def register_frames(frames: Frames, site: str) -> str:
    """Keep data frames for the sites of this process; return their token.

    Args:
        frames: one data frame, or a list of shards, by table name.
        site: the organisation that holds them.
    """
    shards: dict[str, tuple[pd.DataFrame, ...]] = {}
    for table, given in frames.items():
        listed = [given] if isinstance(given, pd.DataFrame) else list(given)
        for frame in listed:
            if not isinstance(frame, pd.DataFrame):
                raise SourceError(
                    f"table {table!r} at site {site!r}: expected a pandas DataFrame, "
                    f"not {type(frame).__name__}"
                )
        shards[table] = tuple(listed)
    if not any(shards.values()):
        raise SourceError(f"site {site!r} has no tables")
    return _REGISTRY.add(site, shards)


def release(token: str) -> None:
    """Forget the data frames of a token; unknown tokens are ignored."""
    _REGISTRY.remove(token.removeprefix(MEMORY_PREFIX))


def registered_frames(token: str) -> tuple[ShardSource, ...]:
    """Return the shards of the data frames under a token; the process has them all.

    Raises:
        SourceError: the token is not known.
    """
    site, tables = _REGISTRY.get(token)
    return tuple(
        ShardSource(table=table, site=site, index=index, token=token, policy=OPEN)
        for table, shards in tables.items()
        for index in range(len(shards))
    )


def frame_of(source: ShardSource) -> pd.DataFrame:
    """Return the data frame that a shard is.

    Raises:
        SourceError: it was released.
    """
    _, tables = _REGISTRY.get(source.token or "")
    return tables[source.table][source.index]
