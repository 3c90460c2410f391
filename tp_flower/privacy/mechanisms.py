"""Mechanisms that protect releases, and their records in the ledger.

A mechanism is stated for a *unit* and *neighbours*, which the ledger names with it: for
features, one row of one table, and the table with the row's contribution or with zeros
in its place (zero-out; row numbers, keys and numbers of joined rows are known to the
server anyway). A clipped sum then changes by at most the clip.
"""

import math
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from tp_flower.arrays import FloatArray
from tp_flower.errors import SiteError
from tp_flower.randomness import NoiseSource

_LARGEST: Final = 1e150  # its square is a number
BASE_ROW_SCOPE: Final = (
    "rows of the run are groups of a sub-query: a row of the table changes what its "
    "group adds, and is counted with that, twice what a group adds"
)


class _Mechanism(
    msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True
):
    """A mechanism's record; unknown fields are refused, as they may be costs."""


class Gaussian(_Mechanism, frozen=True, tag="gaussian"):
    """Gaussian noise on a sum that one unit changes by at most the sensitivity.

    Attributes:
        noise_multiplier: standard deviation over sensitivity, >= 0; 0 means no noise.
        count: uses on the same unit.
        sample_rate: probability, in (0, 1], that a use includes the unit, drawn afresh
            (Poisson) and hidden from the adversary; 1 if the adversary sees it.
    """

    noise_multiplier: float
    count: int = 1
    sample_rate: float = 1.0

    def __post_init__(self) -> None:
        _check(self.noise_multiplier >= 0, "noise_multiplier", self.noise_multiplier)
        _check(self.count >= 0, "count", self.count)
        _check(0 < self.sample_rate <= 1, "sample_rate", self.sample_rate)


class PureDp(_Mechanism, frozen=True, tag="pure"):
    """A mechanism of epsilon-differential privacy with delta = 0, used ``count`` times.

    ``epsilon``, >= 0, is that of one use on the same unit.
    """

    epsilon: float
    count: int = 1

    def __post_init__(self) -> None:
        _check(self.epsilon >= 0, "epsilon", self.epsilon)
        _check(self.count >= 0, "count", self.count)


Mechanism = Gaussian | PureDp


def _check(is_fine: bool, name: str, value: float) -> None:
    if not is_fine or not math.isfinite(value):
        raise ValueError(f"{name} is out of range: {value!r}")


SCORES_TELL: Final = "none: scores in the clear tell the features"
"""The scope of scores that leave in the clear."""
SCORE_SUMS: Final = (
    "masked (AES-256, no differential privacy): the server reads the sum of the "
    "tables' scores for every joined row"
)
"""The scope of scores that leave masked."""
GIVEN_MESSAGES: Final = (
    "the messages that the site received, which come from scores without noise"
)
GIVEN_KEYS: Final = "the keys, which tell features that are joined on"
GIVEN_FILTERS: Final = "the rows that filters leave, which tell what these read"
GIVEN_ENCODER: Final = "the encoder, whose statistics are not covered"
GIVEN_NOISELESS_MODEL: Final = "the model, which is trained without noise"
GIVEN_SAVED_MODEL: Final = "the model and its encoder, which come from an earlier run"
"""The conditions of a release's guarantee, as its scope names them."""

Name = tuple[int, str]  # the part, and the kind of data released
Spend = tuple[int, str, int]  # part, kind of data, and key of what is used once


@dataclass(frozen=True)
class Budget:
    """The most that a source may spend over all runs and ``per_run``, by its policy."""

    epsilon: float
    delta: float
    per_run: float = math.inf


class Release(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Data of one kind that leave the site, and the mechanism that covers them.

    Attributes:
        source: identifier of the rows whose budget is charged.
        part: number of the part in the run.
        action: type of the message that carries it.
        what: kind of data: "labels", "gradients", "scores", "keys", ...
        unit: whose privacy it is ("a row of flights").
        neighbours: tables that must look alike ("the row's features as zeros").
        mechanism: None if the release is not covered.
        scope: what the guarantee assumes, or what is not covered, in plain words.
        per: what an epsilon counts per: "row", or the columns of a unit of privacy.
    """

    table: str
    source: str
    part: int
    action: str
    what: str
    unit: str
    neighbours: str
    adversary: str
    mechanism: Mechanism | None
    scope: str = ""
    site: str = ""
    per: str = "row"

    @property
    def name(self) -> Name:
        """The release's name in its run."""
        return self.part, self.what


class Reservation(msgspec.Struct, frozen=True):
    """A release that a run will make.

    Attributes:
        release: its mechanism is the cost of one use of one key.
        limit: how often each key may be used, >= 1. Keys stand for disjoint rows or
            for what the mechanism has counted: a row pays for the most used key.
    """

    release: Release
    limit: int

    def __post_init__(self) -> None:
        if self.release.mechanism is None:
            raise ValueError(f"a plan needs a mechanism: {self.release}")
        if self.limit < 1:
            raise ValueError(f"limit is {self.limit!r}; it must be at least 1")


@dataclass(frozen=True)
class ClippedNoise:
    """Clip to a norm C > 0, inf for no clipping; add noise of deviation sigma C."""

    clip: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        is_fine = True
        if self.noise_multiplier:
            is_fine = 0 < self.deviation < math.inf
        if not (self.clip > 0 and is_fine):
            raise SiteError(
                f"noise-multiplier {self.noise_multiplier:g} times clip {self.clip:g} "
                "gives no noise: the product must be finite, and both above 0"
            )

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise, in the unit of the clip."""
        if not self.noise_multiplier:
            return 0.0
        return self.noise_multiplier * self.clip


def private_scores(
    scores: FloatArray, clipped_noise: ClippedNoise, noise: NoiseSource
) -> FloatArray:
    """Return scores (n, d_c) with clipped rows and Gaussian noise."""
    if math.isinf(clipped_noise.clip):
        return scores
    return noise.with_gaussian(
        clip_rows(scores, clipped_noise.clip), clipped_noise.deviation
    )


def clip_rows(values: FloatArray, clip: float) -> FloatArray:
    """Return values (n, d_c) with rows of at most norm ``clip``, > 0 and finite.

    >>> rows = np.array([[3.0, 4.0], [0.3, 0.4]])
    >>> clip_rows(rows, clip=1.0).round(6).tolist()
    [[0.6, 0.8], [0.3, 0.4]]
    """
    finite = np.nan_to_num(values, nan=0.0, posinf=_LARGEST, neginf=-_LARGEST)
    finite = np.clip(finite, -_LARGEST, _LARGEST)
    norms = np.linalg.norm(finite, axis=1, keepdims=True)
    clipped: FloatArray = finite * (clip / np.maximum(norms, clip))
    return clipped
