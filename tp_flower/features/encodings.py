"""How one feature of numbers or vectors becomes columns of the encoded matrix.

An encoding is what an encoder was fitted to: plain parameters, saved as JSON. Its
``writer`` takes a shard's column and returns the function that encodes a block of rows.

At a site the parameters are the server's. Whatever they are, an encoded value is a
finite number: one that is not would tell of its row through all noise.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from tp_flower.features.columns import (
    FeatureColumn,
    Float32Array,
    Rows,
    as_categorical,
    as_numeric,
    as_vectors,
    cycle_of,
    text_lengths,
)
from tp_flower.features.spec import TIME_PARTS

Writer = Callable[[Rows, Float32Array], None]
PositionArray = npt.NDArray[np.intp]

LARGEST: Final = 1e30
"""No encoded value is farther from zero; a sum of its squares is a finite number."""


@dataclass(frozen=True)
class NumberEncoding:
    """One column: (x - centre) / scale, clipped to [-limit, limit].

    Attributes:
        name: the feature.
        centre: subtracted.
        scale: divided by; above 0.
        fill: the number x that stands for a missing value.
        of_length: whether x is the length of a text.
        limit: 1 where the range of x was declared.

    Raises:
        ValueError: a parameter is not finite, or scale or limit not above 0.
    """

    TYPE: ClassVar = "number"

    name: str
    centre: float
    scale: float
    fill: float
    of_length: bool = False
    limit: float = LARGEST

    def __post_init__(self) -> None:
        """Check the ranges."""
        are_finite = np.isfinite([self.centre, self.scale, self.fill]).all()
        if not (are_finite and self.scale > 0 and 0 < self.limit <= LARGEST):
            raise ValueError(
                f"{self.name!r}: centre, scale, fill or limit is out of range"
            )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Name of the encoded column."""
        return (f"length of {self.name}" if self.of_length else self.name,)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "name": self.name,
            "centre": self.centre,
            "scale": self.scale,
            "fill": self.fill,
            "of-length": self.of_length,
            "limit": self.limit,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild the encoding from ``to_json``."""
        return cls(
            str(data["name"]),
            float(data["centre"]),
            float(data["scale"]),
            float(data["fill"]),
            bool(data["of-length"]),
            float(data.get("limit", LARGEST)),
        )

    def writer(self, column: FeatureColumn) -> Writer:
        """Return the function that encodes a block of the column's rows."""
        if self.of_length:
            values = text_lengths(as_categorical(self.name, column)).values
        else:
            values = as_numeric(self.name, column).values

        def write(block: Rows, out: Float32Array) -> None:
            scaled = values[block]
            scaled = np.where(np.isnan(scaled), self.fill, scaled)
            with np.errstate(over="ignore"):
                scaled -= self.centre
                scaled /= self.scale
            out[:, 0] = np.clip(scaled, -self.limit, self.limit, out=scaled)

        return write


@dataclass(frozen=True)
class BinEncoding:
    """One column per bin, 1 in that of the value; the outer bins have no outer end.

    Attributes:
        name: the feature.
        edges: ascending; bin j holds edges[j - 1] <= x < edges[j].
        fill: the bin of a missing value; None: zeros in all columns.

    Raises:
        ValueError: there is no edge, they do not ascend, or there is no such bin.
    """

    TYPE: ClassVar = "bins"

    name: str
    edges: tuple[float, ...]
    fill: int | None

    def __post_init__(self) -> None:
        """Check the ranges."""
        ascend = all(low < high for low, high in pairwise(self.edges))
        if not self.edges or not ascend or not np.isfinite(self.edges).all():
            raise ValueError(f"{self.name!r}: the edges do not ascend")
        check_place(self.name, self.fill, len(self.edges) + 1)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        edges = [f"{edge:g}" for edge in self.edges]
        between = [f"{self.name} from {low} to {high}" for low, high in pairwise(edges)]
        return (
            f"{self.name} below {edges[0]}",
            *between,
            f"{self.name} from {edges[-1]}",
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {"name": self.name, "edges": list(self.edges), "fill": self.fill}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild the encoding from ``to_json``."""
        fill = data["fill"]
        return cls(
            str(data["name"]),
            tuple(float(edge) for edge in data["edges"]),
            None if fill is None else int(fill),
        )

    def writer(self, column: FeatureColumn) -> Writer:
        """Return the function that encodes a block of the column's rows."""
        values = as_numeric(self.name, column).values
        fill = -1 if self.fill is None else self.fill
        edges = np.array(self.edges)

        def write(block: Rows, out: Float32Array) -> None:
            chosen = values[block]
            hot = np.searchsorted(edges, chosen, side="right")
            hot[np.isnan(chosen)] = fill
            write_one_hot(hot, out)

        return write


def check_place(name: str, place: int | None, columns: int) -> None:
    """Refuse a place of missing values that is none of a feature's columns.

    Raises:
        ValueError: it is none.
    """
    if place is not None and not 0 <= place < columns:
        raise ValueError(f"{name!r}: no column {place} for missing values")


def write_one_hot(
    hot: PositionArray, out: Float32Array, values: Float32Array | None = None
) -> None:
    """Write a value into the hot column of each row and 0 into the others.

    Args:
        hot: (b,), the column; negative for none.
        out: (b, d).
        values: (b,); None for ones.
    """
    out[...] = 0.0
    known = np.flatnonzero(hot >= 0)
    out[known, hot[known]] = 1.0 if values is None else values[known]


@dataclass(frozen=True)
class CyclicEncoding:
    """Two columns: sine and cosine of the place in a cycle; zeros where missing.

    Attributes:
        name: the feature.
        cycle: a period, or a part of a time.

    Raises:
        ValueError: it is no part of a time, or no period.
    """

    TYPE: ClassVar = "cyclic"

    name: str
    cycle: float | str

    def __post_init__(self) -> None:
        """Check the cycle."""
        is_part = self.cycle in TIME_PARTS
        if not is_part and (isinstance(self.cycle, str) or not 0 < self.cycle < np.inf):
            raise ValueError(f"{self.name!r}: {self.cycle!r} is no cycle")

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        place = f"{self.cycle} of " if isinstance(self.cycle, str) else ""
        return (f"sin {place}{self.name}", f"cos {place}{self.name}")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {"name": self.name, "cycle": self.cycle}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild the encoding from ``to_json``."""
        cycle = data["cycle"]
        return cls(str(data["name"]), cycle if isinstance(cycle, str) else float(cycle))

    def writer(self, column: FeatureColumn) -> Writer:
        """Return the function that encodes a block of the column's rows."""
        values = as_numeric(self.name, column).values
        place, period = cycle_of(self.cycle)

        def write(block: Rows, out: Float32Array) -> None:
            chosen = values[block]
            with np.errstate(over="ignore", invalid="ignore"):
                angle = place(chosen) * (2 * np.pi / period)
            is_missing = ~np.isfinite(angle)
            angle[is_missing] = 0.0
            for column, function in enumerate((np.sin, np.cos)):
                wave = function(angle)
                wave[is_missing] = 0.0
                out[:, column] = wave

        return write


@dataclass(frozen=True)
class VectorEncoding:
    """As many columns as the vectors are long, as they are; zeros where missing.

    Attributes:
        name: the feature.
        width: length of the vectors.
    """

    TYPE: ClassVar = "vector"

    name: str
    width: int

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        return tuple(f"{self.name}[{place}]" for place in range(self.width))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {"name": self.name, "width": self.width}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild the encoding from ``to_json``."""
        return cls(str(data["name"]), int(data["width"]))

    def writer(self, column: FeatureColumn) -> Writer:
        """Return the function that encodes a block of the column's rows."""
        values = as_vectors(self.name, column, self.width).values

        def write(block: Rows, out: Float32Array) -> None:
            chosen = values[block]
            out[...] = np.where(np.isnan(chosen), np.float32(0), chosen)

        return write


@dataclass(frozen=True)
class MissingEncoding:
    """One column: 1 where the feature has no value.

    Attributes:
        name: the feature.
    """

    TYPE: ClassVar = "missing"

    name: str

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Name of the encoded column."""
        return (f"{self.name} is missing",)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {"name": self.name}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild the encoding from ``to_json``."""
        return cls(str(data["name"]))

    def writer(self, column: FeatureColumn) -> Writer:
        """Return the function that encodes a block of the column's rows."""
        is_missing = column.is_missing

        def write(block: Rows, out: Float32Array) -> None:
            out[:, 0] = is_missing[block]

        return write
