"""What protects a release, as the accountants see it.

A mechanism is stated per *unit* and *neighbours*, which the ledger names beside it: for
features the unit is one row of one table, and neighbours are the table with the row's
contribution and without it (zero-out; row numbers, keys and numbers of joined rows are
known to the server anyway). A clipped sum then changes by at most the clip.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any


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

_NAMES: dict[type[Mechanism], str] = {
    Gaussian: "gaussian",
    PureDp: "pure",
}
_KINDS = {name: kind for kind, name in _NAMES.items()}


def mechanism_to_json(mechanism: Mechanism) -> dict[str, Any]:
    """Return a mechanism as plain JSON types."""
    return {"kind": _NAMES[type(mechanism)], **asdict(mechanism)}


def mechanism_from_json(data: dict[str, Any]) -> Mechanism:
    """Return the mechanism that ``mechanism_to_json`` wrote.

    Raises:
        ValueError: it is none, or a number is out of range.
    """
    fields = dict(data)
    kind = _KINDS.get(str(fields.pop("kind", "")))
    if kind is None:
        raise ValueError(f"{data.get('kind')!r} is no mechanism")
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"not a mechanism: {error}") from None


def _check(is_fine: bool, name: str, value: float) -> None:
    if not is_fine or not math.isfinite(value):
        raise ValueError(f"{name} is out of range: {value!r}")
