"""Whether to compute on a GPU, decided without torch where there is none.

A GPU is worth its start from some size on only: torch takes a second or two to import,
CUDA as long to start, and in deployment every message starts a process.
"""

import os
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import FloatArray
from tp_flower.errors import SettingsError

CPU: Final = "cpu"
CUDA: Final = "cuda"
AUTO: Final = "auto"

DRIVER_FILES: Final = (
    "/dev/nvidiactl",
    "/dev/dxg",  # Windows Subsystem for Linux
    "/dev/nvmap",  # Jetson
    r"C:\Windows\System32\nvcuda.dll",
)
HIDDEN: Final = ("", "-1")
"""Values of CUDA_VISIBLE_DEVICES that leave no device."""


def resolve(name: str, *, is_large: bool = True) -> str:
    """Return ``"cpu"`` or ``"cuda"``; ``"auto"`` is CUDA where it exists and pays.

    Without a driver torch is not imported, unless ``"cuda"`` is asked for.

    Args:
        name: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        is_large: whether the work is worth the start of a device.

    Raises:
        SettingsError: ``"cuda"`` is asked for, and cannot be used.
    """
    if name == CPU or (name == AUTO and not (is_large and has_driver())):
        return CPU
    import torch

    if torch.cuda.is_available():
        return CUDA
    if name == AUTO:
        return CPU
    raise SettingsError(
        f"device is {name!r}, but this site has no CUDA device that torch "
        f"{torch.__version__} can use{_reason()}; allowed there: 'cpu' and 'auto'"
    )


def has_driver() -> bool:
    """Whether there is a sign of an NVIDIA driver, and its devices are not hidden."""
    return not is_hidden() and any(
        Path(name).exists()
        for name in DRIVER_FILES
        if name.startswith("/") or sys.platform == "win32"
    )


def is_hidden() -> bool:
    """Whether the environment hides all devices from this process."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in HIDDEN


def _reason() -> str:
    if is_hidden():
        return (
            " (CUDA_VISIBLE_DEVICES hides it, as Flower's simulation does where "
            "client-resources-num-gpus is 0)"
        )
    return "" if has_driver() else " (no NVIDIA driver was found)"


FeatureArray = npt.NDArray[np.float32]


class PlacedFeatures(ABC):
    """Rows T (n, d) of float32 on a device; sums over them are in float64.

    Attributes:
        shape: (n, d).
    """

    shape: tuple[int, int]

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def __getitem__(self, rows: Any) -> "PlacedFeatures":
        """Return some of the rows: a slice, positions (k,) or a mask (n,)."""

    @property
    @abstractmethod
    def host(self) -> FeatureArray:
        """The same rows as a numpy array, (n, d)."""

    @abstractmethod
    def times(self, weights: FloatArray) -> FloatArray:
        """Return T W, (n, d_c), of weights (d, d_c)."""

    @abstractmethod
    def moment(self, messages: FloatArray) -> FloatArray:
        """Return T^T Y, (d, d_c), of messages (n, d_c)."""

    @abstractmethod
    def gram(self, multiplicity: npt.NDArray[Any]) -> FloatArray:
        """Return T^T diag(G) T, (d, d), of multiplicities (n,)."""


Features = FeatureArray | PlacedFeatures


def rows_of(features: Features, rows: npt.NDArray[np.integer]) -> Features:
    """Return rows (k,) of features, (k, d)."""
    if isinstance(features, PlacedFeatures):
        return features[rows]
    # up to four times as fast as indexing, the narrower the faster
    return features.take(rows, axis=0)


def on_host(features: Features) -> FeatureArray:
    """Return features for work that stays on the CPU, wherever they lie."""
    return features.host if isinstance(features, PlacedFeatures) else features
