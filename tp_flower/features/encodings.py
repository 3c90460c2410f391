"""Encodings: from one feature to columns of the encoded matrix.

An encoding is the result of fitting an encoder: plain parameters, saved as JSON. Its
``writer`` takes a shard's column and returns the function that encodes a block of rows.

A site gets the parameters from the server. Whatever they are, every encoded value is a
finite number: one that is not would reveal its row through any noise.

Categories that were counted are identified by keyed hash. Fitting an encoder does not
take the key; encoding rows does, and hashes each distinct value of a shard once.
Categories that were declared are known by their texts.

Notation
    k   distinct values of the column
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tp_flower.arrays import MISSING, AnyArray
from tp_flower.features import columns
from tp_flower.features.spec import MOST_COLUMNS, TIME_PARTS
from tp_flower.keyed_hash import HashArray

Writer = Callable[[columns.Rows, columns.Float32Array], None]
PositionArray = npt.NDArray[np.intp]

LARGEST: Final = -MISSING  # encoded value: a sum of squares is finite
OTHER: Final = "(other)"
ABSENT: Final = "(missing)"
_SHOWN_DIGITS: Final = 8


@dataclass(frozen=True)
class OneHotWriter:
    """Encodes blocks of rows that have one value each, at most.

    ``find`` returns, of a block of ``codes`` (n,), the column of each row's value, -1
    for none, and the values, None if they are ones.
    """

    codes: AnyArray
    find: Callable[[AnyArray], tuple[PositionArray, columns.Float32Array | None]]

    def __call__(self, block: columns.Rows, out: columns.Float32Array) -> None:
        """Write all columns of a block of rows into ``out`` (b, width)."""
        hot, values = self.find(self.codes[block])
        out[...] = 0.0
        rows = np.flatnonzero(hot >= 0)
        out[rows, hot[rows]] = 1.0 if values is None else values[rows]

    def write_sparse(
        self,
        block: columns.Rows,
        columns_out: columns.CodeArray,
        out: columns.Float32Array,
    ) -> None:
        """Write the columns (b,) and the values (b,) of a block.

        A row without a value has the value 0 in column 0.
        """
        hot, values = self.find(self.codes[block])
        columns_out[...] = np.maximum(hot, 0)
        if values is None:
            values = np.ones(len(hot), np.float32)
        out[...] = np.where(hot < 0, np.float32(0), values)


class _Encoding(msgspec.Struct, frozen=True, tag_field="type", rename="kebab"):
    """An encoding of the feature ``name``.

    Parameters from JSON are checked like any others: ``__post_init__`` raises a
    ValueError that names the feature and the parameter.
    """

    name: str

    is_one_hot: ClassVar[bool] = False
    """Whether a row has at most one value other than 0: then ``writer`` is a
    OneHotWriter."""

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The encoded columns' names; a category appears as the start of its hash."""
        return tuple(self._names())

    def _names(self) -> Sequence[str]:
        raise NotImplementedError

    def writer(self, column: columns.FeatureColumn) -> Writer:
        """Return the function that encodes a block of the column's rows."""
        values = self._values(column)
        return lambda block, out: self._write(values[block], out)

    def _values(self, column: columns.FeatureColumn) -> AnyArray:
        """Return the numbers, vectors or codes (n, ...) that the encoding reads."""
        return columns.as_numeric(self.name, column).values

    def _write(self, values: AnyArray, out: columns.Float32Array) -> None:
        """Write a block of them, without changing it, into ``out`` (b, width)."""
        raise NotImplementedError


class NumberEncoding(_Encoding, frozen=True, tag="number"):
    """One column: (x - centre) / scale, clipped to [-limit, limit].

    ``scale`` is above 0, ``fill`` the x of a missing value, which is `MISSING` without,
    ``limit`` 1 if the range of x was declared; with ``of_length`` x is the length of a
    text.
    """

    centre: float
    scale: float
    fill: float | None
    of_length: bool = False
    limit: float = LARGEST

    def __post_init__(self) -> None:
        fill = 0.0 if self.fill is None else self.fill
        are_finite = np.isfinite([self.centre, self.scale, fill]).all()
        if not (are_finite and self.scale > 0 and 0 < self.limit <= LARGEST):
            raise ValueError(
                f"{self.name!r}: centre, scale, fill or limit is out of range"
            )

    def _names(self) -> Sequence[str]:
        return (f"length of {self.name}" if self.of_length else self.name,)

    def _values(self, column: columns.FeatureColumn) -> AnyArray:
        if not self.of_length:
            return super()._values(column)
        return columns.text_lengths(columns.as_categorical(self.name, column)).values

    def _write(self, values: AnyArray, out: columns.Float32Array) -> None:
        is_missing = np.isnan(values)
        out[:, 0] = self._scaled(values, is_missing)
        if self.fill is None:
            out[is_missing, 0] = MISSING

    def _scaled(self, values: AnyArray, is_missing: AnyArray) -> AnyArray:
        """Return the values (b,) that are written, float64."""
        scaled = np.where(is_missing, self.fill or 0.0, values)
        with np.errstate(over="ignore"):
            scaled -= self.centre
            scaled /= self.scale
        clipped: AnyArray = np.clip(scaled, -self.limit, self.limit, out=scaled)
        return clipped


class SquareEncoding(NumberEncoding, frozen=True, tag="square"):
    """One column: the square of what a NumberEncoding writes."""

    @classmethod
    def of(cls, encoding: NumberEncoding) -> "SquareEncoding":
        """Return the encoding of the squares of another's column."""
        return cls(**msgspec.structs.asdict(encoding))

    def _names(self) -> Sequence[str]:
        return (f"{self.name} squared",)

    def _write(self, values: AnyArray, out: columns.Float32Array) -> None:
        scaled = self._scaled(values, np.isnan(values))
        out[:, 0] = np.minimum(scaled * scaled, LARGEST)


class BinEncoding(_Encoding, frozen=True, tag="bins"):
    """One column per bin, 1 for the bin of the value; the outer bins are unbounded.

    The edges ascend; bin j holds edges[j - 1] <= x < edges[j]. ``fill`` is the bin of a
    missing value; with None all columns are zero.
    """

    edges: tuple[float, ...]
    fill: int | None

    is_one_hot = True

    def __post_init__(self) -> None:
        ascend = all(low < high for low, high in pairwise(self.edges))
        if not self.edges or not ascend or not np.isfinite(self.edges).all():
            raise ValueError(f"{self.name!r}: the edges do not ascend")
        _check_missing_column(self, len(self.edges) + 1)

    def _names(self) -> Sequence[str]:
        edges = [f"{edge:g}" for edge in self.edges]
        between = [f"{self.name} from {low} to {high}" for low, high in pairwise(edges)]
        return (
            f"{self.name} below {edges[0]}",
            *between,
            f"{self.name} from {edges[-1]}",
        )

    def writer(self, column: columns.FeatureColumn) -> Writer:
        """Return the function that encodes a block of the column's rows."""
        return OneHotWriter(self._values(column), self._find)

    def _find(self, values: AnyArray) -> tuple[PositionArray, None]:
        hot = np.searchsorted(np.array(self.edges), values, side="right")
        hot[np.isnan(values)] = -1 if self.fill is None else self.fill
        return hot, None


class CyclicEncoding(_Encoding, frozen=True, tag="cyclic"):
    """Two columns: sine and cosine of a place in the period, or part of a time."""

    cycle: float | str

    def __post_init__(self) -> None:
        is_part = self.cycle in TIME_PARTS
        if not is_part and (isinstance(self.cycle, str) or not 0 < self.cycle < np.inf):
            raise ValueError(f"{self.name!r}: {self.cycle!r} is not a cycle")

    def _names(self) -> Sequence[str]:
        prefix = ""
        if isinstance(self.cycle, str):
            prefix = f"{self.cycle} of "
        return (f"sin {prefix}{self.name}", f"cos {prefix}{self.name}")

    def _write(self, values: AnyArray, out: columns.Float32Array) -> None:
        phase_of, period = columns.cycle_of(self.cycle)
        with np.errstate(over="ignore", invalid="ignore"):
            angle = phase_of(values) * (2 * np.pi / period)
        is_missing = ~np.isfinite(angle)
        angle[is_missing] = 0.0
        for column, function in enumerate((np.sin, np.cos)):
            wave = function(angle)
            wave[is_missing] = 0.0
            out[:, column] = wave


class VectorEncoding(_Encoding, frozen=True, tag="vector"):
    """As many columns as the vectors are long, unchanged; zeros where missing."""

    width: int

    def _names(self) -> Sequence[str]:
        return tuple(f"{self.name}[{position}]" for position in range(self.width))

    def _values(self, column: columns.FeatureColumn) -> AnyArray:
        return columns.as_vectors(self.name, column, self.width).values

    def _write(self, values: AnyArray, out: columns.Float32Array) -> None:
        out[...] = np.where(np.isnan(values), np.float32(0), values)


class MissingEncoding(_Encoding, frozen=True, tag="missing"):
    """One column: 1 where the feature has no value."""

    def _names(self) -> Sequence[str]:
        return (f"{self.name} is missing",)

    def _values(self, column: columns.FeatureColumn) -> AnyArray:
        return column.is_missing

    def _write(self, values: AnyArray, out: columns.Float32Array) -> None:
        out[:, 0] = values


class PresentEncoding(MissingEncoding, frozen=True, tag="present"):
    """One column: 1 where the feature has a value.

    A joined row without a row of the table has a 0 in it, too.
    """

    def _names(self) -> Sequence[str]:
        return (f"{self.name} is present",)

    def _values(self, column: columns.FeatureColumn) -> AnyArray:
        return ~column.is_missing


@dataclass(frozen=True)
class Targets:
    """The encoded column of each distinct value of a feature, (k + 1,); -1 for none.

    The last entry is the missing value's; ``signs`` are the values to write, or ones.
    """

    hot: PositionArray
    signs: columns.Float32Array | None = None

    def writer(self, column: columns.CategoricalColumn) -> Writer:
        """Return the function that encodes a block of the column's rows."""
        return OneHotWriter(column.codes, self._find)

    def _find(
        self, codes: AnyArray
    ) -> tuple[PositionArray, columns.Float32Array | None]:
        signs = None if self.signs is None else self.signs[codes]
        return self.hot[codes], signs


class Codes(Targets):
    """The code of each distinct value of a feature, (k + 1,); -1 for none."""

    def writer(self, column: columns.CategoricalColumn) -> Writer:
        """Return the function that encodes a block of the column's rows."""
        return lambda block, out: self._write(column.codes[block], out)

    def _write(self, codes: columns.CodeArray, out: columns.Float32Array) -> None:
        positions = self.hot[codes]
        out[:, 0] = np.where(positions < 0, MISSING, positions)


class CategoryEncoding(_Encoding, frozen=True, tag="categories"):
    """One column per category, in the order of their hashes, then one for all others.

    The hashes have 32 hexadecimal digits and ascend; ``fill`` is the column of a
    missing value, a category of its own or the others'; with None it has zeros.
    """

    hashes: tuple[str, ...]
    fill: int | None
    has_other: bool = msgspec.field(name="other")
    of_number: bool = False

    is_one_hot = True

    def __post_init__(self) -> None:
        if not self.hashes or not all(
            re.fullmatch(r"[0-9a-f]{32}", text) for text in self.hashes
        ):
            raise ValueError(f"{self.name!r}: the categories are not hashes")
        _check_missing_column(self, len(self.hashes) + int(self.has_other))

    def _names(self) -> Sequence[str]:
        names = [
            ABSENT if digits == "f" * len(digits) else f"#{digits[:_SHOWN_DIGITS]}"
            for digits in self.hashes
        ]
        names += [OTHER] * self.has_other
        return [f"{self.name}={category}" for category in names]

    def targets(self, hashes: HashArray) -> Targets:
        """Return the columns of values with these hashes, uint64 (k, 2) or wider."""
        digits = bytes.fromhex("".join(self.hashes))
        listed = np.frombuffer(digits, dtype=">u8").astype(np.uint64).reshape(-1, 2)
        position = np.minimum(
            np.searchsorted(listed[:, 0], hashes[:, 0]), len(listed) - 1
        )
        # With 2^20 categories two of them agree in 64 bits with probability 2^-25; the
        # second would then count among the others.
        is_listed = (listed[position] == hashes[:, :2]).all(axis=1)
        other_column = len(self.hashes) if self.has_other else -1
        fill = -1 if self.fill is None else self.fill
        return Targets(np.append(np.where(is_listed, position, other_column), fill))


class CodeEncoding(CategoryEncoding, frozen=True, tag="codes"):
    """One column: the position of the category among the hashes, then of all others.

    Trees sort the categories by what they are to predict. A missing value is `MISSING`.
    """

    is_one_hot = False

    def _names(self) -> Sequence[str]:
        return (self.name,)

    def targets(self, hashes: HashArray) -> Targets:
        """Return the codes of values with these hashes, uint64 (k, 2) or wider."""
        return Codes(super().targets(hashes).hot)


class HashEncoding(_Encoding, frozen=True, tag="hash"):
    """Feature hashing: a value is +1 or -1 in one of a fixed number of columns.

    Column and sign are bits of the value's keyed hash. Categories need not be listed,
    and new values need no rule; in return values share columns: two of them collide
    with probability 1 / buckets, and then add up with random signs, so that inner
    products of encoded rows are unbiased. A missing value gives zeros.

    Reference:
        Weinberger et al., Feature hashing for large scale multitask learning, 2009.
    """

    buckets: int
    of_number: bool = False

    is_one_hot = True

    def __post_init__(self) -> None:
        if not 1 <= self.buckets <= MOST_COLUMNS:
            raise ValueError(f"{self.name!r}: {self.buckets} is no number of columns")

    def _names(self) -> Sequence[str]:
        return tuple(f"{self.name} hash {bucket}" for bucket in range(self.buckets))

    def targets(self, hashes: HashArray) -> Targets:
        """Return the columns of values with these hashes, uint64 (k, 2) or wider."""
        hot = (hashes[:, 0] % np.uint64(self.buckets)).astype(np.intp)
        signs = 1.0 - 2.0 * (hashes[:, 1] & np.uint64(1)).astype(np.float32)
        return Targets(np.append(hot, -1), np.append(signs, np.float32(0)))


class ListedEncoding(_Encoding, frozen=True, tag="listed"):
    """One column per category that the run's author has declared.

    A value that is missing or not declared gives zeros. The categories are texts; those
    of numbers are written by ``number_texts``.
    """

    categories: tuple[str, ...]
    of_number: bool = False

    is_one_hot = True

    def __post_init__(self) -> None:
        if not self.categories or len(set(self.categories)) != len(self.categories):
            raise ValueError(f"{self.name!r}: categories are missing or repeated")

    def _names(self) -> Sequence[str]:
        return tuple(f"{self.name}={category}" for category in self.categories)

    def writer(self, column: columns.FeatureColumn) -> Writer:
        """Return the function that encodes a block of the column's rows."""
        values = categories_for(self, column)
        categories = pa.array(self.categories, values.texts.type)
        positions = pc.index_in(values.texts, value_set=categories)
        # the last entry is the missing value's, whose code is -1
        hot = np.append(pc.fill_null(positions, -1).to_numpy().astype(np.intp), -1)
        return Targets(hot).writer(values)


HashedEncoding = CategoryEncoding | CodeEncoding | HashEncoding
FeatureEncoding = (
    NumberEncoding
    | SquareEncoding
    | PresentEncoding
    | BinEncoding
    | CyclicEncoding
    | VectorEncoding
    | MissingEncoding
    | ListedEncoding
    | CategoryEncoding
    | CodeEncoding
    | HashEncoding
)


def categories_for(
    encoding: HashedEncoding | ListedEncoding, column: columns.FeatureColumn
) -> columns.CategoricalColumn:
    """Return a column as an encoding's categories; SchemaError for another kind."""
    if encoding.of_number:
        return columns.number_texts(columns.as_numeric(encoding.name, column))
    return columns.as_categorical(encoding.name, column)


def _check_missing_column(encoding: BinEncoding | CategoryEncoding, width: int) -> None:
    if encoding.fill is not None and not 0 <= encoding.fill < width:
        raise ValueError(
            f"{encoding.name!r}: fill is {encoding.fill}, allowed: 0 to {width - 1}"
        )
