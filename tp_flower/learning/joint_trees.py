"""Joint trees: boosted on the bins of all tables at once, at the server.

Where owners let the bins of their columns leave, the server has columns of the joined
rows, and trees that split by columns of several tables: what a sum of the tables' own
models cannot learn. They go on from the scores of these models, by the loss's first two
derivatives, so that they are one more addend of the score:

    h_j = b + s sum_i f_i(x_i, r_i(j)) + t(bins of joined row j)

They go on from the share s = 1/2 of the tables' scores: these fit the rows that they
were trained on more closely than others, and what is left of those rows alone would
teach the trees too little. LightGBM grows them; the rows that validate say when to end,
and how many leaves a tree has: first with bold steps, then once more with half as long
ones.

Notation:
    N    joined training rows       c    columns of the bins, of all tables
    d_c  scores of a row            h    ``scores``  (N, d_c)
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tp_flower.arrays import (
    MOST_BINS,
    NO_BIN,
    AnyArray,
    FloatArray,
    blocks,
    thread_count,
)
from tp_flower.errors import ModelError, load_extra
from tp_flower.features.bins import BinArray
from tp_flower.joins.rows import JoinedRows, Vectors
from tp_flower.objectives import Objective

if TYPE_CHECKING:
    import lightgbm

LEAVES: Final = (7, 31, 127)
"""Leaves of a tree: the validation rows choose."""
SHARE: Final = 0.5
"""Of the tables' own scores, that a model with joint trees has."""
RATE: Final = 0.1
LAST_RATE: Final = 0.05
"""Of its best fit, that a tree adds: while sizes are compared, and then."""
LEAST_LEAF: Final = 20  # joined rows of a leaf
MOST_TREES: Final = 2_000
PATIENCE: Final = 50  # trees that do not lower the validation loss
BLOCK: Final = 1 << 16  # joined rows whose bins are numbers at a time
# with fewer, threads only spin
THREADED_ROWS: Final = 1 << 15


@dataclass(frozen=True)
class JointTrees:
    """Trees of bins, as LightGBM's text.

    Attributes:
        text: as LightGBM writes it.
        trees: how many there are, of each output.
        leaves: of a tree, at most.
        rate: of its best fit, that a tree adds.
    """

    text: str
    outputs: int
    trees: int = 0
    leaves: int = 0
    rate: float = RATE

    def scores(self, bins: BinArray) -> FloatArray:
        """Return what the trees add to the scores of rows with bins (N, c), (N, d_c).

        Raises:
            ModelError: the text is no model of so many columns.
        """
        library = load_lightgbm()
        added = np.zeros((len(bins), self.outputs))
        try:
            booster = library.Booster(model_str=self.text)
            for block in blocks(len(bins), BLOCK):
                values = booster.predict(
                    as_numbers(bins[block]),
                    raw_score=True,
                    num_threads=_threads(len(bins)),
                )
                added[block] = np.asarray(values).reshape(-1, self.outputs)
        except library.basic.LightGBMError:
            raise ModelError("malformed trees") from None
        return added


@dataclass(frozen=True)
class Binned:
    """The bins of joined rows.

    Attributes:
        bins: (N, c).
        categorical: the columns whose numbers have no order.
    """

    bins: BinArray
    categorical: Sequence[int]


@dataclass(frozen=True)
class Validation:
    """The rows that validate.

    Attributes:
        bins: (V, c).
        scores: (V, d_c), that the trees go on from.
        objective: of them.
    """

    bins: BinArray
    scores: FloatArray
    objective: Objective

    def losses(self, added: FloatArray) -> FloatArray:
        """Return the weighted loss of each row (V,), with more added to its scores."""
        return self.objective.weigh(self.objective.row_values(self.scores + added))


@dataclass(frozen=True)
class GrownTrees:
    """Trees, and the losses of the rows that validate after them, (V,)."""

    trees: JointTrees
    losses: FloatArray


def as_numbers(bins: BinArray) -> AnyArray:
    """Return bins as trees read them, float32: NaN where there is none."""
    return np.where(bins == NO_BIN, np.float32(np.nan), bins.astype(np.float32))


def share_of(scores: FloatArray, base: FloatArray, share: float = SHARE) -> FloatArray:
    """Return b + s (h - b), of scores h (N, d_c) and the base score b (d_c,)."""
    return share * scores + (1.0 - share) * base


def options_of(
    leaves: int, rate: float, outputs: int, rows: int, seed: int
) -> dict[str, Any]:
    """Return LightGBM's parameters for trees of so many leaves and rows."""
    return {
        "objective": "none",
        "num_class": outputs,
        "num_leaves": leaves,
        "learning_rate": rate,
        "min_data_in_leaf": LEAST_LEAF,
        # of a loss whose curvature is not 1, rows of little curvature tell little
        "min_sum_hessian_in_leaf": 1e-3,
        "min_data_in_bin": 1,
        # of few rows it would leave none, and fail
        "feature_pre_filter": False,
        "max_bin": MOST_BINS + 1,
        "min_data_per_group": LEAST_LEAF,
        "seed": seed,
        "enable_bundle": False,
        "deterministic": True,
        "force_col_wise": True,
        "num_threads": _threads(rows),
        "verbosity": -1,
    }


def grow_joint(
    rows: JoinedRows,
    objective: Objective,
    training: Binned,
    validation: Validation,
    *,
    sizes: Iterable[int] = LEAVES,
    seed: int = 0,
) -> GrownTrees | None:
    """Return the trees of the lowest validation loss; None if none has a split.

    Args:
        rows: the training rows, with the objective's vectors and ``scores``.
        objective: of them.
        training: their bins.
        validation: the rows that say when to end.
        sizes: numbers of leaves to try.
        seed: of LightGBM.
    """
    if not (training.bins != training.bins[:1]).any():
        return None
    numbers = as_numbers(training.bins)
    validated = as_numbers(validation.bins)
    derivatives = _Derivatives(rows, objective)

    def grow(leaves: int, rate: float) -> GrownTrees | None:
        options = options_of(leaves, rate, objective.outputs, rows.rows, seed)
        data = load_lightgbm().Dataset(
            numbers, categorical_feature=list(training.categorical), params=options
        )
        booster = load_lightgbm().Booster(options, data)
        booster.add_valid(data.create_valid(validated, params=options), "validation")
        grown = _grow(booster, derivatives, validation)
        if grown is None:
            return None
        return replace(grown, trees=replace(grown.trees, leaves=leaves, rate=rate))

    tried = [grown for leaves in sizes if (grown := grow(leaves, RATE))]
    if not tried:
        return None
    bold = min(tried, key=_mean_loss)
    careful = grow(bold.trees.leaves, LAST_RATE)
    return min(filter(None, (bold, careful)), key=_mean_loss)


def _mean_loss(grown: GrownTrees) -> float:
    return float(grown.losses.mean())


def _grow(
    booster: "lightgbm.Booster",
    derivatives: "_Derivatives",
    validation: Validation,
) -> GrownTrees | None:
    """Grow trees until the validation loss no longer falls; return those before."""
    outputs = derivatives.objective.outputs
    least, count = math.inf, 0
    best = losses = np.zeros(0)

    def judge(added: FloatArray, _: object) -> tuple[str, float, bool]:
        nonlocal losses
        losses = validation.losses(_matrix(added, outputs))
        return "loss", float(losses.mean()), False

    for tree in range(1, MOST_TREES + 1):
        if booster.update(fobj=derivatives):
            break  # no split is left
        booster.eval_valid(judge)
        if losses.mean() < least:
            least, count, best = losses.mean(), tree, losses
        if tree - count >= PATIENCE:
            break
    if not count:
        return None
    text = booster.model_to_string(num_iteration=count)
    return GrownTrees(JointTrees(text, outputs, count), best)


SCORES: Final = "scores"
_ADDED: Final = "added by trees"
_GRADIENT: Final = "gradient"
_HESSIAN: Final = "hessian"


@dataclass(frozen=True)
class _Derivatives:
    """The weighted derivatives of the training rows' loss, as LightGBM asks for them.

    Called with what trees have added to the scores, it returns both, column by column.
    """

    rows: JoinedRows
    objective: Objective

    def __call__(self, added: FloatArray, _: object) -> tuple[FloatArray, FloatArray]:
        self.rows.fill(_ADDED, _matrix(added, self.objective.outputs))
        self.rows.run(self._derive)
        gradient, hessian = map(self.rows.whole, (_GRADIENT, _HESSIAN))
        return gradient.ravel("F"), hessian.ravel("F")

    def _derive(self, vectors: Vectors, _: AnyArray) -> tuple[Vectors, Iterable[float]]:
        part = self.objective.on(vectors)
        scores = vectors[SCORES] + vectors[_ADDED]
        hessian = np.maximum(part.weigh(part.tree_hessian(scores)), 0.0)
        return {_GRADIENT: part.weigh(part.gradient(scores)), _HESSIAN: hessian}, ()


def _matrix(values: FloatArray, outputs: int) -> FloatArray:
    """Return LightGBM's scores of rows as a matrix (n, d_c)."""
    return np.asarray(values, np.float64).reshape(-1, outputs, order="F")


def _threads(rows: int) -> int:
    return thread_count() if rows >= THREADED_ROWS else 1


def load_lightgbm() -> ModuleType:
    """Load LightGBM, which takes a third of a second that only trees pay.

    Raises:
        ModelError: it is not installed.
    """
    return load_extra("lightgbm", "trees of bins", "boost")
