"""Pairs of rows and regions, which take the rows' place, and checks of them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import AnyArray, FloatArray, IntArray
from tp_flower.errors import MessageError
from tp_flower.joins.pairs import NO_REGION
from tp_flower.learning.models.local_model import Features, LocalModel


@dataclass(frozen=True)
class PairedRows:
    """Pairs of rows and regions of another table, those to train on first.

    Attributes:
        rows: (m,), positions among the rows that take part.
        regions: (m,) uint8.
        multiplicity: (m_trained,), G of the pairs, or G^w.
        tested: (m,) bool.
    """

    rows: IntArray
    regions: AnyArray
    multiplicity: IntArray | FloatArray
    tested: npt.NDArray[np.bool_]


def are_distinct(rows: IntArray, regions: AnyArray) -> bool:
    """Whether no two pairs of a row and a region, (m,) each, are the same."""
    keys = rows * (NO_REGION + 1) + regions
    return len(np.unique(keys)) == len(keys)


def check_own_regions(
    model: LocalModel,
    features: Features,
    rows: IntArray,
    regions: AnyArray,
    table: str,
) -> None:
    """Refuse regions of a table's own rows that differ from those of its model.

    Those of its shards are numbered one after the other: they differ by one number.

    Args:
        model: which divides the table's rows.
        features: (n, d), of the rows.
        rows: (m,), the row of each pair.
        regions: of the pairs, uint8 (m,).
        table: alias in the query.
    """
    of_rows = model.regions(features)
    if of_rows is None:
        raise MessageError(f"table {table!r} has sent no regions")
    shift = regions.astype(np.int64) - of_rows[rows]
    if np.any(shift != shift[:1]):
        raise MessageError("the regions are not those that the table has sent")
