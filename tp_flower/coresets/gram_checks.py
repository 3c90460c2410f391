"""What a matrix must be to be a table's Gram matrix: it comes from somebody else."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

_TOLERANCE: Final = 1e-6
_LARGEST: Final = 1e100


def is_gram(matrix: npt.NDArray[Any]) -> bool:
    """Return whether a finite matrix (p, p) may be a sum of t t^T.

    It is symmetric, and by Cauchy-Schwarz |g_ij| <= sqrt(g_ii g_jj): arithmetic with
    its columns scaled to length 1 stays finite.

    >>> is_gram(np.array([[4.0, 2.0], [2.0, 1.0]]))
    True
    >>> is_gram(np.array([[1.0, 2.0], [2.0, 1.0]]))
    False
    """
    squares = np.diag(matrix)
    if squares.min(initial=0.0) < 0.0 or np.abs(matrix).max(initial=0.0) > _LARGEST:
        return False
    lengths = np.sqrt(squares)
    bound = (1.0 + _TOLERANCE) * lengths[:, None] * lengths
    is_symmetric = (np.abs(matrix - matrix.T) <= _TOLERANCE * bound).all()
    return bool(is_symmetric and (np.abs(matrix) <= bound).all())
