"""LightGBM as boosting uses it: its options, its rows, its texts."""

from types import ModuleType
from typing import TYPE_CHECKING, Final

import numpy as np

from tp_flower.arrays import MISSING, FloatArray, thread_count
from tp_flower.errors import ModelError, load_extra
from tp_flower.features.sparse import SparseRows
from tp_flower.learning.models.local_model import Features, host_features
from tp_flower.methods.boost.messages import Growth

if TYPE_CHECKING:
    import lightgbm
    import numpy.typing as npt
    from scipy.sparse import csr_matrix

GROUP_ROWS: Final = 100
CATEGORY_ROWS: Final = 10
PENALTY_ROWS: Final = 10
BIN_ROWS: Final = 3
"""LightGBM's defaults, in joined rows: of a set of categories, of a category that
splits may name and how far its mean is smoothed, in the penalty of sets, and of a bin.
"""
# beyond: made again where needed; 127 leaves of 1000 columns
HISTOGRAM_MEGABYTES: Final = 512
# with fewer, threads only spin: other sites here could not compute
THREADED_ROWS: Final = 1 << 17


def tree_options(
    growth: Growth, hessian: FloatArray, per_row: float
) -> dict[str, object]:
    """Return LightGBM's options, by a table's own rows.

    Args:
        growth: how the trees are grown.
        hessian: (n_trained, d_c), times ``per_row``.
        per_row: a table's rows for each joined row.
    """
    return {
        "objective": "none",
        "num_class": hessian.shape[1],
        "num_leaves": growth.leaves,
        "learning_rate": growth.rate,
        # a leaf's rows are counted by their share of the Hessian
        "min_sum_hessian_in_leaf": growth.least_rows * hessian.mean() * per_row,
        "cat_smooth": CATEGORY_ROWS * per_row,
        "cat_l2": PENALTY_ROWS * per_row,
        "min_data_in_leaf": 0,
        "min_data_per_group": max(round(GROUP_ROWS * per_row), 1),
        "min_data_in_bin": max(round(BIN_ROWS * per_row), 1),
        "seed": growth.seed,
        # bundled columns lose values: rows would be in other leaves than theirs
        "enable_bundle": False,
        "deterministic": True,
        "force_col_wise": True,
        "num_threads": threads_for(len(hessian)),
        # it holds one for every leaf from the start, however few rows there are
        "histogram_pool_size": HISTOGRAM_MEGABYTES,
        "verbosity": -1,
    }


def threads_for(rows: int) -> int:
    """Return how many threads grow or read trees of so many rows."""
    if rows >= THREADED_ROWS:
        return thread_count()
    return 1


def booster_of(text: str) -> "lightgbm.Booster":
    """Return the trees of LightGBM's text; ModelError of any other."""
    lightgbm = load_lightgbm()
    try:
        return lightgbm.Booster(model_str=text)  # type: ignore[no-any-return]
    except lightgbm.basic.LightGBMError:
        raise ModelError("malformed trees") from None


def load_lightgbm() -> ModuleType:
    """Load LightGBM, which takes a third of a second that only boosting pays.

    Raises:
        ModelError: it is not installed.
    """
    return load_extra("lightgbm", "boosted trees", "boost")


def tree_features(features: Features) -> "npt.NDArray[np.float32] | csr_matrix":
    """Return encoded rows as trees read them: NaN where a value is missing."""
    rows = host_features(features)
    if isinstance(rows, SparseRows):
        from scipy.sparse import csr_matrix

        # LightGBM does not know scipy's newer class
        matrix = csr_matrix(rows.matrix())
        matrix.data[matrix.data <= MISSING] = np.nan
        return matrix
    is_missing = rows <= MISSING
    # large rows are mapped from a file, and not copied without need
    if is_missing.any():
        return np.where(is_missing, np.float32(np.nan), rows)
    return rows
