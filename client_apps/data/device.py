"""Where the features of a site's parts lie: on a GPU, or where they are.

A message is answered by whatever process Flower picks; in simulation one process
answers many. So a process keeps what it has copied to a GPU, by run, node and part,
until the run ends. What a run that was killed has left is given up when room is needed
for another after an hour.
"""

import sys
import time
from dataclasses import dataclass, field
from typing import Final

from client_apps.data.run_store import SiteStore
from tp_flower.errors import SettingsError
from tp_flower.learning.models.devices import (
    AUTO,
    CPU,
    FeatureArray,
    Features,
    PlacedFeatures,
    resolve,
)

LEAST_VALUES: Final = 1 << 26
"""Features of a linear model that "auto" takes to a GPU: fewer are two passes of less
than a second, and in deployment torch would start with every message."""

LEAST_BYTES: Final = 1 << 30
"""Free memory of a GPU that blocks of features, and what is computed of them, take."""

IDLE_SECONDS: Final = 3600.0


@dataclass
class _Copy:
    """Features on a device, and when they were used last."""

    placed: PlacedFeatures
    used: float


@dataclass
class _OfProcess:
    """What this process has copied, by the names of run and node, and the part."""

    copies: dict[tuple[str, int], _Copy] = field(default_factory=dict)


_PLACED = _OfProcess()


def place(
    store: SiteStore, number: int, features: FeatureArray, device: str, kind: str
) -> Features:
    """Return a part's features where its model is computed.

    Args:
        store: of the run.
        number: of the part.
        features: (n, d), in the main memory or memory-mapped.
        device: the setting: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        kind: of the model.

    Raises:
        SettingsError: the device is not there, or its memory is full.
    """
    # torch models import torch whatever the device
    is_large = kind != "linear" or features.size >= LEAST_VALUES
    name = resolve(device, is_large=is_large)
    if name == CPU:
        return features
    key, now = (store.run, number), time.monotonic()
    copy = _PLACED.copies.get(key)
    if copy is None:
        _forget_idle(now)
        from tp_flower.learning.models.device_rows import (
            DeviceFeatures,
            free_bytes,
            torch_device,
        )

        own = torch_device(name)
        free = free_bytes(own)
        if free < LEAST_BYTES and device == AUTO:
            return features
        if free < LEAST_BYTES:
            raise SettingsError(
                f"device is {device!r}, but {free / 1e9:.1f} GB of this site's GPU are "
                f"free and {LEAST_BYTES / 1e9:.1f} GB are the least that training "
                "takes; allowed: 'cpu' and 'auto'"
            )
        copy = _Copy(DeviceFeatures.place(features, own), now)
        _PLACED.copies[key] = copy
    copy.used = now
    return copy.placed


def forget(store: SiteStore, number: int) -> None:
    """Give up the copy of one part: its features are made anew."""
    _drop([(store.run, number)])


def release(store: SiteStore) -> None:
    """Give up what this process has copied for a run, and the memory it took."""
    _drop([key for key in _PLACED.copies if key[0] == store.run])


def _forget_idle(now: float) -> None:
    copies = _PLACED.copies
    _drop([key for key, own in copies.items() if now - own.used > IDLE_SECONDS])


def _drop(keys: list[tuple[str, int]]) -> None:
    dropped = [_PLACED.copies.pop(key, None) for key in keys]
    torch = sys.modules.get("torch")
    if any(dropped) and torch is not None and torch.cuda.is_initialized():
        # other processes may need what torch would keep for later
        torch.cuda.empty_cache()
