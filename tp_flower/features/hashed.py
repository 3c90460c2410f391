"""How one feature of categories becomes columns of the encoded matrix.

Categories that were counted are known by keyed hash. Whoever fits the encoder does not
need the key; whoever encodes rows does, and hashes each distinct value of a shard once.
Categories that were declared are known by their texts.

Notation
    k   distinct values of the column
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tp_flower.features.columns import (
    CategoricalColumn,
    FeatureColumn,
    Float32Array,
    Rows,
    as_categorical,
    as_numeric,
    number_texts,
)
from tp_flower.features.encodings import (
    PositionArray,
    Writer,
    check_place,
    write_one_hot,
)
from tp_flower.features.spec import MOST_COLUMNS
from tp_flower.keyed_hash import HashArray

OTHER: Final = "(other)"
_SHOWN_DIGITS: Final = 8


@dataclass(frozen=True)
class Targets:
    """Where each distinct value of a column is encoded.

    Attributes:
        hot: intp (k + 1,), the encoded column of each value, -1 for none; the last
            entry is that of a missing value.
        signs: float32 (k + 1,), what is written there.
    """

    hot: PositionArray
    signs: Float32Array


@dataclass(frozen=True)
class CategoryEncoding:
    """One column per category, in the order of their hashes, then one for all others.

    Attributes:
        name: the feature.
        hashes: 32 hexadecimal digits for each category that has a column; ascending.
        fill: position of the category that stands for a missing value; None: zeros.
        has_other: whether all other categories share a last column; without it they
            are encoded as zeros.
        of_number: whether the categories are numbers.

    Raises:
        ValueError: there is no category, a hash is none, or there is no such position.
    """

    TYPE: ClassVar = "categories"

    name: str
    hashes: tuple[str, ...]
    fill: int | None
    has_other: bool
    of_number: bool = False

    def __post_init__(self) -> None:
        """Check the hashes, and the place of missing values."""
        are_hashes = all(re.fullmatch(r"[0-9a-f]{32}", text) for text in self.hashes)
        if not self.hashes or not are_hashes:
            raise ValueError(f"{self.name!r}: the categories are no hashes")
        check_place(self.name, self.fill, len(self.hashes) + int(self.has_other))

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded columns: the start of a category's hash for its name."""
        return self.names_of(self.short_hashes)

    @property
    def short_hashes(self) -> tuple[str, ...]:
        """What stands for the name of each category where it is not known."""
        return tuple(f"#{digits[:_SHOWN_DIGITS]}" for digits in self.hashes)

    def names_of(self, categories: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the encoded columns for these names of the categories."""
        names = (*categories, OTHER) if self.has_other else categories
        return tuple(f"{self.name}={category}" for category in names)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "name": self.name,
            "hashes": list(self.hashes),
            "fill": self.fill,
            "other": self.has_other,
            "of-number": self.of_number,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild the encoding from ``to_json``."""
        fill = data["fill"]
        return cls(
            str(data["name"]),
            tuple(str(digits) for digits in data["hashes"]),
            None if fill is None else int(fill),
            has_other=bool(data["other"]),
            of_number=bool(data["of-number"]),
        )

    def targets(self, hashes: HashArray) -> Targets:
        """Return where values with these hashes are encoded.

        Args:
            hashes: uint64 (k, 2) or wider: the first 128 bits count.
        """
        own = hashes_of(self.hashes)
        position = np.searchsorted(own[:, 0], hashes[:, 0])
        position = np.minimum(position, max(len(own) - 1, 0))
        # Of 2^20 categories two agree in 64 bits with probability 2^-25; the second
        # would then count among the others.
        is_known = (own[position] == hashes[:, :2]).all(axis=1)
        other = len(self.hashes) if self.has_other else -1
        fill = -1 if self.fill is None else self.fill
        hot = np.append(np.where(is_known, position, other), fill)
        return Targets(hot, np.ones(len(hot), dtype=np.float32))

    def writer(self, column: CategoricalColumn, targets: Targets) -> Writer:
        """Return the function that encodes a block of the column's rows."""
        codes = column.codes

        def write(block: Rows, out: Float32Array) -> None:
            write_one_hot(targets.hot[codes[block]], out)

        return write


@dataclass(frozen=True)
class HashEncoding:
    """Feature hashing: a value is +1 or -1 in one of a fixed number of columns.

    Column and sign are bits of the value's keyed hash. No categories are listed, and
    values that were never seen need no rule; in return values share columns: two of
    them collide with probability 1 / buckets, and then add up with random signs, so
    that inner products of encoded rows are right on average. Zeros where missing.

    Attributes:
        name: the feature.
        buckets: number of columns.
        of_number: whether the values are numbers.

    Raises:
        ValueError: the number of columns is out of range.

    Reference:
        Weinberger et al., Feature hashing for large scale multitask learning, 2009.
    """

    TYPE: ClassVar = "hash"

    name: str
    buckets: int
    of_number: bool = False

    def __post_init__(self) -> None:
        """Check the number of columns."""
        if not 1 <= self.buckets <= MOST_COLUMNS:
            raise ValueError(f"{self.name!r}: {self.buckets} is no number of columns")

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        return tuple(f"{self.name} hash {place}" for place in range(self.buckets))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "name": self.name,
            "buckets": self.buckets,
            "of-number": self.of_number,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild the encoding from ``to_json``."""
        return cls(str(data["name"]), int(data["buckets"]), bool(data["of-number"]))

    def targets(self, hashes: HashArray) -> Targets:
        """Return where values with these hashes are encoded.

        Args:
            hashes: uint64 (k, 2) or wider: the first 128 bits count.
        """
        hot = (hashes[:, 0] % np.uint64(self.buckets)).astype(np.intp)
        signs = 1.0 - 2.0 * (hashes[:, 1] & np.uint64(1)).astype(np.float32)
        return Targets(np.append(hot, -1), np.append(signs, np.float32(0)))

    def writer(self, column: CategoricalColumn, targets: Targets) -> Writer:
        """Return the function that encodes a block of the column's rows."""
        codes = column.codes

        def write(block: Rows, out: Float32Array) -> None:
            chosen = codes[block]
            write_one_hot(targets.hot[chosen], out, targets.signs[chosen])

        return write


@dataclass(frozen=True)
class ListedEncoding:
    """One column per category that the run's author has declared.

    Zeros where the value is missing, or none of these categories.

    Attributes:
        name: the feature.
        categories: as texts; of numbers as ``number_texts`` writes them.
        of_number: whether the categories are numbers.

    Raises:
        ValueError: there is no category, or one is there twice.
    """

    TYPE: ClassVar = "listed"

    name: str
    categories: tuple[str, ...]
    of_number: bool = False

    def __post_init__(self) -> None:
        """Check the categories."""
        if not self.categories or len(set(self.categories)) != len(self.categories):
            raise ValueError(f"{self.name!r}: no categories, or one of them twice")

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        return tuple(f"{self.name}={category}" for category in self.categories)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "name": self.name,
            "categories": list(self.categories),
            "of-number": self.of_number,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild the encoding from ``to_json``."""
        categories = tuple(str(category) for category in data["categories"])
        return cls(str(data["name"]), categories, bool(data["of-number"]))

    def writer(self, column: FeatureColumn) -> Writer:
        """Return the function that encodes a block of the column's rows."""
        values = categories_for(self, column)
        listed = pa.array(self.categories, values.texts.type)
        positions = pc.index_in(values.texts, value_set=listed)
        # the last entry is that of a missing value, whose code is -1
        hot = np.append(pc.fill_null(positions, -1).to_numpy().astype(np.intp), -1)

        def write(block: Rows, out: Float32Array) -> None:
            write_one_hot(hot[values.codes[block]], out)

        return write


HashedEncoding = CategoryEncoding | HashEncoding


def categories_for(
    encoding: HashedEncoding | ListedEncoding, column: FeatureColumn
) -> CategoricalColumn:
    """Return a column as the categories that an encoding is of.

    Raises:
        SchemaError: the column is of another kind; names the feature.
    """
    if encoding.of_number:
        return number_texts(as_numeric(encoding.name, column))
    return as_categorical(encoding.name, column)


def hex_of(hashes: HashArray) -> tuple[str, ...]:
    """Return 32 hexadecimal digits per hash, uint64 (k, 2)."""
    digits = hashes.astype(">u8").tobytes().hex()
    return tuple(digits[start : start + 32] for start in range(0, len(digits), 32))


def hashes_of(digits: Sequence[str]) -> HashArray:
    """Return the hashes, uint64 (k, 2), that ``hex_of`` wrote."""
    flat = np.frombuffer(bytes.fromhex("".join(digits)), dtype=">u8")
    return flat.astype(np.uint64).reshape(-1, 2)
