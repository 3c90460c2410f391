"""Encoded rows that may lie elsewhere than in the main memory.

The products that training needs of a table's features belong to whoever holds them: for
numpy arrays they are functions of :mod:`tp_flower.learning.models.local_model` and
:mod:`tp_flower.learning.solvers`, features that lie on a device bring their own.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
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
