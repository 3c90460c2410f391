"""Exact information of finite domains: columns of arrays are equally likely cases."""

from collections.abc import Sequence

import numpy as np


def every_case(base: int, size: int, dtype: type = np.uint32) -> np.ndarray:
    """Every choice of ``size`` digits, one in each column: (size, base^size)."""
    cases = np.arange(base**size)
    return np.array([cases // base**place % base for place in range(size)], dtype)


def coded(digits: Sequence[np.ndarray], base: int) -> np.ndarray:
    """One number for the digits of every column."""
    return sum(row.astype(np.int64) * base**at for at, row in enumerate(digits))


def information(x: np.ndarray, view: np.ndarray, given: np.ndarray) -> float:
    """I(x; view | given) in bits; 0 if and only if the view tells nothing more.

    Counts and their products are exact, so that independence is a ratio of 1.
    """
    joint = _count(x, view, given) * _count(given)
    return float(np.log2(joint / (_count(x, given) * _count(view, given))).mean())


def _count(*values: np.ndarray) -> np.ndarray:
    """How many columns have the same values as each one."""
    alike = np.zeros(len(values[0]), int)
    for value in values:
        _, more = np.unique(value, return_inverse=True)
        _, alike = np.unique(alike * (more.max() + 1) + more, return_inverse=True)
    return np.bincount(alike)[alike]
