"""Splits of the joined rows into rows to train on, to validate with, and to test on.

Rows that share a day, a plane or a customer are alike: a random split lets a model
remember what it is tested on. The setting `test-split` holds out whole rows of another
table, whole values of some columns of one, or the last rows by a column.

*Notation*, with N the joined rows:

    subset    (N,) uint8: TRAIN, VALIDATION or TEST
    shares    of all rows or values that are tested on; of the others that validate
"""

import re
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.keyed_hash import HashArray

SubsetArray = npt.NDArray[np.uint8]

RANDOM = "random"
GROUP = "group"
TIME = "time"
TRAIN = 0
VALIDATION = 1
TEST = 2
BY_HASH = "hash"
BY_ORDER = "order"
BY_VALUE = "value"
"""How the site of the columns tells which rows are held out."""
RULES: Final = (
    '"random", "random(ALIAS)", "group(ALIAS.column, ...)", "time(ALIAS.column)"'
)
_RULE: Final = re.compile(rf"({RANDOM}|{GROUP}|{TIME})\(([^()]+)\)")
_COLUMN: Final = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*")


class Shares(NamedTuple):
    """The share of rows that are tested on, and of the others that validate."""

    test: float
    validation: float = 0.0


@dataclass(frozen=True)
class SplitRule:
    """How joined rows are split: at random, or by ``columns`` of one table.

    At random, whole rows of ``table`` are held out; "" is the label table.

    >>> SplitRule.read("group(f.day, f.month)").columns
    ('f.day', 'f.month')
    """

    kind: str = RANDOM
    columns: tuple[str, ...] = ()
    table: str = ""

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the rule that a text names, or raise ValueError."""
        if text == RANDOM:
            return cls()
        match = _RULE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not one of {RULES}")
        columns = tuple(column.strip() for column in match[2].split(","))
        if match[1] == RANDOM:
            return cls(RANDOM, table=match[2].strip())
        for column in columns:
            if not _COLUMN.fullmatch(column):
                raise ValueError(f'{column!r} is not a column such as "f.day"')
        if match[1] == TIME and len(columns) > 1:
            raise ValueError(f"{text!r} names {len(columns)} columns; time takes one")
        return cls(match[1], columns)

    def describe(self, test: float, sample: float = 1.0) -> str:
        """Return the name of the split, to stand beside what is measured on it.

        >>> SplitRule("group", ("f.day",)).describe(0.2)
        'held-out f.day'
        >>> SplitRule("time", ("f.time_hour",)).describe(0.2, sample=0.1)
        'time: f.time_hour last 20 %, sample = 0.1 of the label rows'
        """
        columns = ", ".join(self.columns)
        name = {
            RANDOM: f"random rows of {self.table}" if self.table else "random rows",
            GROUP: f"held-out {columns}",
            TIME: f"time: {columns} last {100.0 * test:.3g} %",
        }[self.kind]
        if sample == 1.0:
            return name
        return f"{name}, sample = {sample:g} of the label rows"


def split_rows(
    rows: int, share: float, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Return (rows,) bool: a random share, such as the rows held out for testing."""
    is_chosen = np.zeros(rows, dtype=np.bool_)
    is_chosen[rng.permutation(rows)[: round(rows * share)]] = True
    return is_chosen


def split_at_random(
    taking_part: BoolArray, shares: Shares, rng: np.random.Generator
) -> SubsetArray:
    """Return the subset of each row, (n,), sampled without replacement.

    Only the rows that take part are sampled.
    """
    subset = np.full(len(taking_part), TRAIN, np.uint8)
    rows = np.flatnonzero(taking_part)
    is_test = split_rows(len(rows), shares.test, rng)
    subset[rows[is_test]] = TEST
    others = rows[~is_test]
    subset[others[split_rows(len(others), shares.validation, rng)]] = VALIDATION
    return subset


def split_by_hash(hashes: HashArray, shares: Shares) -> SubsetArray:
    """Return the subset of each value, (k,), by its keyed hash, uint64 (k, ...).

    Read as a fraction of 2^64, the first 64 bits are uniform: those of values to test
    on are below the share. So every site decides alike about a value, whichever others
    it has; of k values about ``shares.test`` k are tested on, not exactly so many.
    """
    fractions = hashes[:, 0] * 2.0**-64
    subset = np.full(len(hashes), TRAIN, np.uint8)
    subset[fractions < shares.test + (1.0 - shares.test) * shares.validation] = (
        VALIDATION
    )
    subset[fractions < shares.test] = TEST
    return subset


def split_by_order(times: FloatArray, shares: Shares) -> SubsetArray:
    """Return the subset of each joined row, (N,), from its place in time, (N,).

    The last share of the rows is tested on, and the last of the others validates; rows
    at one time stay together, so that the shares are met or exceeded. Rows without a
    time (NaN) are trained on.

    >>> split_by_order(np.array([3.0, 1.0, 3.0, 2.0, np.nan]), Shares(0.25)).tolist()
    [2, 0, 2, 0, 0]
    """
    subset = np.full(len(times), TRAIN, np.uint8)
    for name, share in ((TEST, shares.test), (VALIDATION, shares.validation)):
        left = np.flatnonzero((subset == TRAIN) & ~np.isnan(times))
        if count := round(len(left) * share):
            first = np.partition(times[left], -count)[-count]
            subset[left[times[left] >= first]] = name
    return subset
