"""The memory that a shard's model takes in training, besides its encoded rows.

Factorisations hold a few matrices of one size at a time: the sum, its centred copy, the
workspace and the eigenvectors of LAPACK. A wide table is not factorised
(``tp_flower/learning/solvers.py``).

Notation:
    d, p   encoded columns, and parameters       w   d, and 1 with an intercept
"""

from typing import Final

from strategies.training.traffic import ShardSize, TableSize
from tp_flower.learning import solvers
from tp_flower.protocol.training_messages import Update

NUMBER: Final = 8  # bytes of a float64
MATRICES: Final = 4  # that a factorisation holds at a time
# and where shards add them up: words, masks and messages besides
SHARED_MATRICES: Final = 8
VECTORS: Final = 8  # of parameters, that any method has
LANCZOS_VECTORS: Final = 24
COPIES: Final = 2.0  # of encoded rows: for trees, and as linear models read them


def vector_bytes(table: TableSize) -> float:
    """Return the memory of a model's parameters, gradients and directions."""
    return float(VECTORS * NUMBER * table.parameters)


def solver_bytes(table: TableSize, shard: ShardSize, *, is_exact: bool) -> float:
    """Return the memory of a linear model's solver, or of another model's vectors.

    The solver is exact or a preconditioner.
    """
    vectors = vector_bytes(table)
    width = table.features + table.has_intercept
    if not table.starts_at_zero:
        return vectors
    if table.update is Update.GRAM:
        return vectors + float(SHARED_MATRICES * NUMBER * width**2)
    way = solvers.factorisation(shard.trained, table.features, is_exact=is_exact)
    numbers = {
        solvers.ITERATIVE: 0,
        solvers.BY_FREQUENT: solvers.FREQUENT**2,
        solvers.BY_ROWS: shard.trained * width,
        solvers.BY_COLUMNS: width**2,
    }[way]
    return vectors + float(MATRICES * NUMBER * numbers)


def curvature_bytes(table: TableSize) -> float:
    """Return the memory to compute the largest curvature, for the steps of SGD."""
    vectors = vector_bytes(table)
    width = table.features + table.has_intercept
    if not table.starts_at_zero:
        return vectors
    if width > solvers.MOST_COLUMNS:
        return vectors + float(LANCZOS_VECTORS * NUMBER * width)
    return vectors + float(MATRICES * NUMBER * width**2)


def tree_bytes(table: TableSize, shard: ShardSize) -> float:
    """Return the memory of the values that trees and linear models read."""
    return COPIES * 4.0 * shard.total * table.features
