"""Regions of a table's rows: the leaves of one tree, as codes that others may read.

Trees of one table's columns add up to no product of two tables' columns. So one table
divides its rows into a few regions, by a tree on the loss's derivatives, and the server
tells every other table in which region its joined rows are: their trees read the region
beside their features (``joins/pairs.py``).

Which table that should be shows before any tree has grown: with the regions of several
tables known, the server fits to each pair of tables what the cells of their regions add
beyond the regions alone.
"""

from typing import TYPE_CHECKING, Final, Self

import msgspec
import numpy as np

from tp_flower.arrays import AnyArray, FloatArray, IntArray
from tp_flower.learning.models.local_model import Features
from tp_flower.methods.boost.engine import (
    booster_of,
    load_lightgbm,
    tree_features,
    tree_options,
)
from tp_flower.methods.boost.messages import Growth
from tp_flower.methods.boost.settings import BoostSettings
from tp_flower.settings.declare import AUTO
from tp_flower.settings.settings import COVERED
from tp_flower.settings.training import NONE

if TYPE_CHECKING:
    import lightgbm
    import numpy.typing as npt
    from scipy.sparse import csr_matrix

    from tp_flower.settings import Settings


def region_tables(settings: "Settings") -> tuple[str, ...] | None:
    """Return the tables that may have regions, by alias; () for any, None for none.

    By default any may where rows validate, and nothing has noise.
    """
    setting = settings.of(BoostSettings).regions
    if setting == AUTO:
        is_judged = settings.validation_share > 0.0
        has_noise = bool(settings.privacy.covered(*COVERED))
        return () if is_judged and not has_noise else None
    return None if setting == NONE else (setting,)


def may_have_regions(settings: "Settings", table: str) -> bool:
    """Whether a run may divide a table into regions, by alias."""
    tables = region_tables(settings)
    if tables is None:
        return False
    return not tables or table.lower() in {alias.lower() for alias in tables}


class RegionTree(msgspec.Struct, frozen=True):
    """A tree as LightGBM's text, and the region of each of its leaves.

    Rows that are all in one region have no tree, and the text is "".
    """

    text: str
    region_of_leaf: tuple[int, ...]

    @property
    def regions(self) -> int:
        """The number of regions."""
        return max(self.region_of_leaf) + 1

    def bytes(self) -> AnyArray:
        """Return the tree as bytes."""
        return np.frombuffer(msgspec.msgpack.encode(self), np.uint8)

    @classmethod
    def of(cls, data: AnyArray) -> Self:
        """Return the tree of such bytes."""
        return msgspec.msgpack.decode(data.tobytes(), type=cls)


UNDIVIDED: Final = RegionTree("", (0,))


def grow_regions(
    features: Features,
    categorical: tuple[int, ...],
    derivatives: tuple[FloatArray, FloatArray],
    counts: AnyArray,
    growth: Growth,
    fewest_rows: int,
) -> RegionTree:
    """Return the regions of a table's rows by the loss.

    Of several outputs the tree follows the direction in which the derivatives of the
    rows vary most.

    Args:
        features: (n, d), the trained rows first.
        categorical: the columns that are codes of categories.
        derivatives: G and H, (n_trained, d_c) each; H is above 0.
        counts: the joined rows of each trained row, (n_trained,).
        growth: of one tree: its leaves are the regions, at most.
        fewest_rows: of the trained rows, that a region has at least.
    """
    gradient, hessian = derivatives
    trained = len(gradient)
    rows = tree_features(features)
    if not trained or not rows.shape[1]:
        return UNDIVIDED
    if gradient.shape[1] > 1:
        _, _, directions = np.linalg.svd(gradient, full_matrices=False)
        gradient = gradient @ directions[0][:, None]
        hessian = hessian @ directions[0][:, None] ** 2
    per_row = trained / max(float(counts.sum()), 1.0)
    gradient = per_row * gradient
    hessian = per_row * hessian
    lightgbm = load_lightgbm()
    options = tree_options(growth, hessian, per_row)
    data = lightgbm.Dataset(
        rows[:trained], categorical_feature=list(categorical), params=options
    )
    booster = lightgbm.Booster(options, data)
    booster.update(fobj=lambda *_: (gradient.ravel(), hessian.ravel()))
    leaves = _leaves(booster, rows[:trained])
    size = np.bincount(leaves)
    mass = np.bincount(leaves, hessian[:, 0])
    response = np.bincount(leaves, gradient[:, 0]) / np.maximum(mass, 1e-300)
    region_of_leaf = _merge_small(size, response, fewest_rows)
    if max(region_of_leaf) == 0:
        return UNDIVIDED
    return RegionTree(booster.model_to_string(), region_of_leaf)


def regions_of(tree: RegionTree, features: Features) -> AnyArray:
    """Return the region of each row (n, d), uint8 (n,)."""
    if not len(features) or not tree.text:
        return np.zeros(len(features), np.uint8)
    booster = booster_of(tree.text)
    leaves = _leaves(booster, tree_features(features))
    return np.array(tree.region_of_leaf, np.uint8)[leaves]


def _leaves(
    booster: "lightgbm.Booster", rows: "npt.NDArray[np.float32] | csr_matrix"
) -> IntArray:
    """Return the leaf of each row (n, d) in the only tree, (n,)."""
    leaves = np.asarray(booster.predict(rows, pred_leaf=True))
    return leaves.reshape(rows.shape[0]).astype(np.int64)


def _merge_small(
    sizes: AnyArray, response: FloatArray, fewest_rows: int
) -> tuple[int, ...]:
    """Return a region for each leaf, which has at least so many rows.

    Leaves are alike if their responses are: small ones join the next of those.
    """
    regions = np.zeros(len(sizes), np.int64)
    region = rows = 0
    for leaf in np.argsort(response, kind="stable"):
        regions[leaf] = region
        rows += int(sizes[leaf])
        if rows >= fewest_rows:
            region, rows = region + 1, 0
    # what is left at the end is too small: it belongs to the region before
    return tuple(np.minimum(regions, max(region - 1, 0)).tolist())
