"""Gaussian noise on the second moments that covers the values of a table's rows.

A table t whose values are private adds noise to all blocks that they are in, before
anything leaves the site. With L_t the norm that its rows are clipped to, and G_p(r) the
number of joined rows of pass p that row r is in,

    E_ac ~ N(0, sigma^2)                  of a column a of t and c of another table
    E_ab ~ N(0, sigma^2 (1 + [a = b]) / 2)          of two columns of t, symmetric
    sigma = z sqrt(max_r sum_p G_p(r)^2) L_t sqrt(L_t^2 + L_o^2),
    L_o^2 = 1 + sum of L_k^2 over the other tables k (1 for the column of ones)

Guarantee:
    unit: the values of a row, its label among them, or of all rows of a unit of the
        table's policy. Keys, and so multiplicities, are given.
    neighbours: zero-out, the row's summands against zeros.
    sensitivity: row r adds G x x^T to the table's own block, of Frobenius norm at most
        G L_t^2, and x b^T to its blocks with others, b the sum of their rows over the
        joined rows of r, of norm at most G L_t L_o. Off the diagonal of the own block
        the noise is drawn once per pair, with sigma / sqrt(2), which is equal noise in
        that norm. The rows of a unit add at most the sum of what each of them does.
    mechanism: one Gaussian of multiplier z for all passes together, in whole words:
        what is below a step of 2^-20 sigma is uniform, whatever the moments.
    adversary: the server, whatever query and partners' tables it chooses, and each
        site; not a server with a site that hands out the keys of a join, which takes
        the pads off. Other sites' clips are as trusted as their code.
    not covered: which rows there are, and so what filters read; that an expression
        fails on a value; their keys; types of columns, whether one has no value, and
        lengths of vectors; names of classes but for booleans'; what encoders are
        fitted to.

A table in two roles pays for both: (a + b)^2 / (s + t) <= a^2 / s + b^2 / t, so that
the block of the two costs no more than the composition of both mechanisms.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from tp_flower.arrays import FloatArray, IntArray
from tp_flower.errors import SettingsError, SiteError
from tp_flower.methods.moments.settings import NO_RANGE
from tp_flower.methods.moments.words import WordArray, column_bits
from tp_flower.privacy.accounting import noise_multiplier
from tp_flower.privacy.mechanisms import ClippedNoise, clip_rows
from tp_flower.protocol.training_messages import PrivacyTerms
from tp_flower.randomness import NoiseSource

LARGEST_DEVIATION: Final = 2.0**58
"""Of noise in words, of which 2^63 is the largest."""
SPARE_FACTOR: Final = 4.0
"""Room above the moments for their noise, which is smaller than they are."""


@dataclass(frozen=True)
class Norms:
    """The norms that rows of a noisy run are clipped to; they follow from the query.

    Attributes:
        squared: L^2 of every table: a square of the clip for each of its features,
            whose encoded columns have a mean square of about 1 together, and 1 for the
            label.
    """

    squared: Mapping[str, float]

    @classmethod
    def of(cls, features: Mapping[str, int], label_table: str, clip: float) -> "Norms":
        """Return the norms of tables of so many features.

        >>> Norms.of({"orders": 2, "users": 3}, "orders", 2.0).squared
        {'orders': 9.0, 'users': 12.0}
        """
        return cls(
            {
                table: clip * clip * count + (table == label_table)
                for table, count in features.items()
            }
        )

    def sensitivity(
        self, table: str, counts: IntArray, rows_per_unit: int = 1
    ) -> float:
        """Return by how much a unit of a table moves the moments, from (p, n) counts.

        Which rows belong to which unit does not matter: a unit has so many rows at
        most.
        """
        own_square = self.squared[table]
        others = 1.0 + sum(self.squared.values()) - own_square
        weights = counts.astype(np.float64)
        if rows_per_unit == 1:
            largest = np.linalg.norm(weights, axis=0).max(initial=1.0)
        else:
            most = np.sort(weights, axis=1)[:, -rows_per_unit:]
            largest = max(np.linalg.norm(most.sum(axis=1)), 1.0)
        # without columns there is nothing to cover, and nothing to add noise to
        return float(largest) * (math.sqrt(own_square * (own_square + others)) or 1.0)

    def bits(self, joined_rows: int, shards: Mapping[str, int]) -> dict[str, int]:
        """Return the bits after the point of every table's columns, and its noise."""
        return {
            table: int(
                column_bits(
                    np.array([joined_rows * squared * max(SPARE_FACTOR, shards[table])])
                )[0]
            )
            for table, squared in self.squared.items()
        }


@dataclass(frozen=True)
class LabelUnit:
    """The unit of a numeric label in a noisy run: its middle is 0, its ends -1 and 1.

    Attributes:
        middle, half: of the range that it is clipped to, and half its width.
    """

    middle: float = 0.0
    half: float = 1.0

    @classmethod
    def of(cls, limits: tuple[float, ...]) -> "LabelUnit":
        """Return the unit of a declared range, (low, high).

        Raises:
            SettingsError: there is none.
        """
        if not limits:
            raise SettingsError(NO_RANGE)
        low, high = limits
        return cls((low + high) / 2.0, (high - low) / 2.0)

    def clip(self, labels: FloatArray) -> FloatArray:
        """Return labels (n, 1) in this unit, from -1 to 1.

        >>> LabelUnit.of((0.0, 10.0)).clip(np.array([[5.0], [99.0]])).tolist()
        [[0.0], [1.0]]
        """
        scaled = np.nan_to_num((labels - self.middle) / self.half)
        clipped: FloatArray = np.clip(scaled, -1.0, 1.0)
        return clipped


def planned_noise(privacy: PrivacyTerms, sensitivity: float) -> ClippedNoise:
    """Return the noise of a table by the settings of a run."""
    multiplier = privacy.noise_multiplier or noise_multiplier(
        privacy.epsilon, privacy.delta
    )
    return ClippedNoise(sensitivity, multiplier)


def clip_columns(features: FloatArray, squared_norm: float, bits: int) -> FloatArray:
    """Return features (n, d) whose words have at most a norm, after rounding.

    They are zeros if a row of words may be longer than that, whatever its length.
    """
    rounding = math.sqrt(features.shape[1]) * 2.0 ** (-bits - 1)
    clip = math.sqrt(squared_norm) - rounding
    return clip_rows(features, clip) if clip > 0.0 else np.zeros_like(features)


def entry_deviations(
    pair: tuple[str, str], table: str, shape: tuple[int, int], *, has_intercept: bool
) -> FloatArray:
    """Return the deviation of a table's noise on each entry of a block, over sigma.

    ``has_intercept`` says that the table's last column is that of ones, whose sums with
    other tables' columns say nothing of the table's rows.
    """
    if table not in pair:
        return np.zeros(shape)
    deviations = np.ones(shape)
    if pair[0] == pair[1]:
        deviations += (np.sqrt(0.5) - 1.0) * (1.0 - np.eye(len(deviations)))
        if has_intercept:
            deviations[-1, :] = deviations[:, -1] = 1.0
            deviations[-1, -1] = 0.0
    elif has_intercept:
        rows = deviations if pair[0] == table else deviations.T
        rows[-1] = 0.0
    return deviations


def noise_words(
    source: NoiseSource,
    deviations: FloatArray,
    bits: int,
    *,
    is_symmetric: bool,
) -> WordArray:
    """Return the noise of a block of such deviations (..., d_i, d_k) as words.

    Raises:
        SiteError: in such words it may wrap around.
    """
    scaled = deviations * 2.0**bits
    if not scaled.max(initial=0.0) <= LARGEST_DEVIATION:
        raise SiteError(
            f"'bits': {bits} bits after the point leave no room for the noise"
        )
    words = source.gaussian_words(scaled)
    if is_symmetric:
        words = np.triu(words) + np.triu(words, 1).mT
    return words
