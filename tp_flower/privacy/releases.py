"""What leaves a site and what protects it, as the ledger writes it down."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from tp_flower.privacy.mechanisms import (
    Mechanism,
    mechanism_from_json,
    mechanism_to_json,
)
from tp_flower.protections import RDP

Name = tuple[int, str]
"""Part, and what of it is released."""

Use = tuple[int, str, int]
"""Part, what of it is released, and a key: what is used once (a batch, an epoch)."""


@dataclass(frozen=True)
class Budget:
    """What a source may spend in all runs together.

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
    """Something that leaves the site, and what protects it.

    Attributes:
        table: its name, for people.
        source: what the budget is kept for.
        part: number of the part in the run.
        action: type of the message that it leaves with.
        what: "labels", "gradients", "gram", "moments", "parameters", "scores",
            "statistics", "keys", "counts", ...
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
        """What it is called in its run."""
        return self.part, self.what

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        mechanism = self.mechanism and mechanism_to_json(self.mechanism)
        return {**asdict(self), "mechanism": mechanism}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the release that ``to_json`` wrote.

        Raises:
            ValueError: it is none.
        """
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
        """Return the plan that ``to_json`` wrote.

        Raises:
            ValueError: it is none.
        """
        return cls(Release.from_json(data["release"]), data["limit"])
