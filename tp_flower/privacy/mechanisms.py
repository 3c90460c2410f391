"""Mechanisms that protect releases, and their records in the ledger.

A mechanism is stated per *unit* and *neighbours*, which the ledger names beside it: for
features the unit is one row of one table, and neighbours are the table with the row's
contribution and without it (zero-out; row numbers, keys and numbers of joined rows are
known to the server anyway). A clipped sum then changes by at most the clip.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

import numpy as np

from tp_flower.arrays import FloatArray
from tp_flower.methods import RDP
from tp_flower.randomness import NoiseSource

_LARGEST: Final = 1e150  # its square is a number


@dataclass(frozen=True)
class Gaussian:
    """Gaussian noise on a sum that one unit changes by at most the sensitivity.

    Attributes:
        noise_multiplier: standard deviation over sensitivity, >= 0; 0 is no noise.
        count: how many times it is used on the same unit.
        sample_rate: probability that a use has the unit at all, in (0, 1], drawn
            afresh (Poisson) where the adversary does not see it; 1 where it does.
    """

    noise_multiplier: float
    count: int = 1
    sample_rate: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check(self.noise_multiplier >= 0, "noise_multiplier", self.noise_multiplier)
        _check(self.count >= 0, "count", self.count)
        _check(0 < self.sample_rate <= 1, "sample_rate", self.sample_rate)


@dataclass(frozen=True)
class PureDp:
    """A mechanism of epsilon-differential privacy with delta = 0.

    Attributes:
        epsilon: >= 0.
        count: how many times it is used on the same unit.
    """

    epsilon: float
    count: int = 1

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check(self.epsilon >= 0, "epsilon", self.epsilon)
        _check(self.count >= 0, "count", self.count)


Mechanism = Gaussian | PureDp

_KINDS: Final[Mapping[str, type[Mechanism]]] = {"gaussian": Gaussian, "pure": PureDp}


def mechanism_to_json(mechanism: Mechanism) -> dict[str, Any]:
    """Return a mechanism as plain JSON types."""
    kind = "gaussian" if isinstance(mechanism, Gaussian) else "pure"
    return {"kind": kind, **asdict(mechanism)}


def mechanism_from_json(data: Mapping[str, Any]) -> Mechanism:
    """Return the mechanism that ``mechanism_to_json`` wrote, or raise ValueError."""
    fields = dict(data)
    kind = _KINDS.get(str(fields.pop("kind", "")))
    if kind is None:
        raise ValueError(f"{data.get('kind')!r} is no mechanism")
    try:
        return kind(**fields)
    except TypeError as error:
        # a field that is not known may be a cost
        raise ValueError(f"not a mechanism: {error}") from None


def _check(is_fine: bool, name: str, value: float) -> None:
    if not is_fine or not math.isfinite(value):
        raise ValueError(f"{name} is out of range: {value!r}")


Name = tuple[int, str]
"""Part, and what of it is released."""

Use = tuple[int, str, int]
"""Part, what of it is released, and a key: what is used once (a batch, an epoch)."""


@dataclass(frozen=True)
class Budget:
    """The most that a source may spend in all runs together.

    Attributes:
        epsilon: >= 0.
        delta: in [0, 1).
        accountant: of sampled mechanisms, "rdp" or "prv".
    """

    epsilon: float
    delta: float
    accountant: str = RDP

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not self.epsilon >= 0:
            raise ValueError(
                f"epsilon of a budget is {self.epsilon!r}; it must be >= 0"
            )
        if not 0 <= self.delta < 1:
            raise ValueError(
                f"delta of a budget is {self.delta!r}; it must be in [0, 1)"
            )


@dataclass(frozen=True)
class Release:
    """Data of one kind that leave the site, and the mechanism that covers them.

    Attributes:
        table: its name, for people.
        source: identifier of the rows, whose budget it is.
        part: number of the part in the run.
        action: type of the message that it leaves with.
        what: kind of data: "labels", "gradients", "scores", "keys", ...
        unit: whose privacy it is ("a row of flights").
        neighbours: which tables must look alike ("the row's features as zeros").
        adversary: "server" or "outsider".
        mechanism: None: the release is not covered.
        scope: what the guarantee assumes, or what is not covered, in plain words.
        site: the organisation that holds the shard.
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

    @property
    def name(self) -> Name:
        """Its name in its run."""
        return self.part, self.what

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        mechanism = self.mechanism and mechanism_to_json(self.mechanism)
        return {**asdict(self), "mechanism": mechanism}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the release that ``to_json`` wrote, or raise ValueError."""
        mechanism = data["mechanism"] and mechanism_from_json(data["mechanism"])
        try:
            return cls(**{**data, "mechanism": mechanism})
        except TypeError as error:
            raise ValueError(f"not a release: {error}") from None


@dataclass(frozen=True)
class Planned:
    """A release that a run will make.

    Attributes:
        release: its mechanism is the cost of one use of one key.
        limit: how often each key may be used, >= 1. Keys stand for disjoint rows or
            for what the mechanism has counted: a row pays for the most used key.
    """

    release: Release
    limit: int

    def __post_init__(self) -> None:
        """Check that it can be paid for."""
        if self.release.mechanism is None:
            raise ValueError(f"a plan needs a mechanism: {self.release}")
        if self.limit < 1:
            raise ValueError(f"limit is {self.limit!r}; it must be at least 1")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {"release": self.release.to_json(), "limit": self.limit}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the plan that ``to_json`` wrote, or raise ValueError."""
        return cls(Release.from_json(data["release"]), data["limit"])


def private_scores(
    scores: FloatArray, *, clip: float, noise_multiplier: float, noise: NoiseSource
) -> FloatArray:
    """Return scores (n, d_c) with rows clipped to norm B and Gaussian noise.

    Args:
        scores: of the table's model, (n, d_c).
        clip: B, > 0, in the unit of the scores; inf for none.
        noise_multiplier: sigma, >= 0; 0 where there is no clip.
        noise: a stream of random numbers.
    """
    if math.isinf(clip):
        if noise_multiplier:
            raise ValueError(
                f"noise_multiplier is {noise_multiplier}, but clip is infinite: "
                "noise needs a finite clip"
            )
        return scores
    clipped = clip_rows(scores, clip)
    return noise.with_gaussian(clipped, noise_multiplier * clip)


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
