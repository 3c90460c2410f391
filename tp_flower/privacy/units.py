"""Units of privacy: the persons, for example, whose rows a table has.

A policy's ``privacy-unit`` names the columns that identify a unit, and the site lets at
most k rows of one take part (``tp_flower/extraction/unit_rows.py``). Clips bound what a
whole unit adds to a sum, so that a Gaussian mechanism of the clip is per unit.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import FloatArray, IndexArray
from tp_flower.features.sparse import EncodedRows, dense
from tp_flower.randomness import NoiseSource

_BLOCK_VALUES: Final = 1 << 21


@dataclass(frozen=True, eq=False)
class Units:
    """The unit of each of n rows: ``codes`` (n,), from 0 on; not each need occur."""

    codes: IndexArray

    def of(self, rows: IndexArray | slice) -> Self:
        """Return the units of some of the rows."""
        return type(self)(self.codes[rows])

    def sample(self, rate: float, noise: NoiseSource) -> IndexArray:
        """Return the rows of the units that are drawn, each with probability ``rate``.

        >>> Units(np.array([0, 1, 0])).sample(0.9999, NoiseSource(bytes(32))).tolist()
        [0, 1, 2]
        """
        sampled = noise.bernoulli(int(self.codes.max(initial=-1)) + 1, rate)
        return np.flatnonzero(np.isin(self.codes, sampled))

    def totals(self, values: npt.ArrayLike) -> FloatArray:
        """Return the sum of ``values`` (n,) over each row's unit, (n,).

        >>> Units(np.array([0, 1, 0])).totals([1.0, 2.0, 4.0]).tolist()
        [5.0, 2.0, 5.0]
        """
        # numpy's types say integers, as without weights
        return np.bincount(self.codes, weights=values).astype(np.float64)[self.codes]

    @cached_property
    def _sorted(self) -> tuple[IndexArray, IndexArray]:
        """The rows unit by unit, (n,), and where among them each unit starts; n."""
        order = np.argsort(self.codes, kind="stable")
        return order, np.append(
            np.flatnonzero(np.diff(self.codes[order], prepend=-1)), len(order)
        )

    def gradient_norms(
        self, features: EncodedRows, messages: FloatArray, *, intercept: bool
    ) -> FloatArray:
        """Return ||sum over the row's unit of [x_k, 1] Y_k^T||, (n,).

        Of features (n, d) and messages Y (n, d_c); not finite if one of them is not.
        """
        norms, (order, starts) = np.zeros(len(messages)), self._sorted
        # blocks of whole units
        size = max(_BLOCK_VALUES // ((features.shape[1] + 1) * messages.shape[1]), 1)
        cuts = np.searchsorted(starts, np.arange(0, len(order) + size, size))
        for first, last in pairwise(np.unique(np.minimum(cuts, len(starts) - 1))):
            rows = order[starts[first] : starts[last]]
            inputs = dense(features[rows]).astype(np.float64)
            if intercept:
                inputs = np.column_stack([inputs, np.ones(len(rows))])
            with np.errstate(over="ignore", invalid="ignore"):
                gradients = inputs[:, :, None] * messages[rows, None, :]
                begins = starts[first:last] - starts[first]
                sums = np.add.reduceat(gradients.reshape(len(rows), -1), begins)
                unit_norms = np.linalg.norm(sums, axis=1)
            norms[rows] = np.repeat(unit_norms, np.diff(starts[first : last + 1]))
        return norms
