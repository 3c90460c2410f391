"""Boosted trees of one table's rows, grown and kept as LightGBM's text.

One step of boosting minimises over functions f of the joined row

    sum_j g_j f_j + 1/2 h_j f_j^2

with g and h the loss's first two derivatives at the current scores. If f is a function
of the table's row alone, that is sum_r G_r f(r) + 1/2 H_r f(r)^2, with the sums G and H
over the row's joined rows: a table grows the trees that LightGBM would grow on the
joined table with this table's columns, given 2 numbers for each of its rows.

Several trees are grown one after the other by the local quadratic model: the gradient
of a row that has been given f is G + H f.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
import numpy as np
import numpy.typing as npt

from tp_flower.arrays import AnyArray, FloatArray, blocks
from tp_flower.errors import ModelError
from tp_flower.learning.models.local_model import Features, LocalModel
from tp_flower.methods.boost.engine import (
    booster_of,
    load_lightgbm,
    threads_for,
    tree_features,
    tree_options,
)
from tp_flower.methods.boost.linear import LinearPart, RidgeFit, fit_linear, is_linear
from tp_flower.methods.boost.messages import Growth
from tp_flower.methods.boost.regions import RegionTree, regions_of

SHAP_VALUES: Final = 1 << 20  # that are computed at a time

if TYPE_CHECKING:
    import lightgbm
    from scipy.sparse import csr_matrix


class Forest(msgspec.Struct, frozen=True):
    """The trees of each round as LightGBM's text, times their step, and after them.

    Attributes:
        categorical: the encoded columns that are codes of categories.
        regions: the tree whose leaves are the table's regions, if it has some.
        reads_regions: whether the last column is the region of another table.
    """

    categorical: tuple[int, ...] = ()
    rounds: tuple[tuple[float, str], ...] = ()
    regions: RegionTree | None = None
    reads_regions: bool = False

    def bytes(self) -> AnyArray:
        """Return the forest as bytes, which are the parameters of its model."""
        return np.frombuffer(msgspec.msgpack.encode(self), np.uint8)

    @classmethod
    def of(cls, parameters: AnyArray) -> Self:
        """Return the forest of bytes; ModelError of others."""
        try:
            return msgspec.msgpack.decode(parameters.tobytes(), type=cls)
        except msgspec.DecodeError:
            raise ModelError("malformed trees") from None


class TreeModel(LocalModel):
    """The sum of the forest's trees; its parameters are bytes, (p,) uint8."""

    parameters: AnyArray

    binned: "list[lightgbm.Dataset]"  # the trained rows in bins, once trees have grown

    def __init__(self, outputs: int) -> None:
        self.outputs = outputs
        self.binned = []
        self.parameters = Forest().bytes()
        self.penalised = np.zeros(0, np.bool_)

    @property
    def forest(self) -> Forest:
        """The trees."""
        return Forest.of(self.parameters)

    def start(self, categorical: Sequence[int]) -> None:
        """Begin without trees, over features of which some are codes."""
        load_lightgbm()  # if it is missing, before any training
        self.parameters = Forest(tuple(categorical)).bytes()

    def add(self, step: float, grown: AnyArray) -> None:
        """Add trees (their text's bytes) times a step; none if the step is 0."""
        if not step:
            return
        text = grown.tobytes().decode()
        self._change(rounds=(*self.forest.rounds, (step, text)))

    def divide(self, regions: RegionTree) -> None:
        """Divide the table's rows into the regions of a tree."""
        self._change(regions=regions)

    def read_regions(self, column: int) -> None:
        """Read, from now on, the region of another table's row as a column."""
        categorical = (*self.forest.categorical, column)
        self._change(categorical=categorical, reads_regions=True)

    def _change(self, **fields: Any) -> None:
        self.parameters = msgspec.structs.replace(self.forest, **fields).bytes()

    @property
    def takes_regions(self) -> bool:  # type: ignore[override]
        """Whether its rows are scored by the region of another table's row as well."""
        return self.forest.reads_regions

    def regions(self, features: Features) -> AnyArray | None:
        """Return the region of rows, uint8 (n,); None of a table without any."""
        tree = self.forest.regions
        if tree is None:
            return None
        return regions_of(tree, features)

    def gains(self, features: int, joined_rows: float) -> FloatArray:
        """Return by how much the splits at each feature lower the loss, (d, 1).

        Summed over the joined rows, so many for each row of the table, by the loss's
        second-order approximation, times the steps that were taken.
        """
        total = np.zeros(features)
        for step, text in self.forest.rounds:
            if is_linear(text):
                part = LinearPart.of(text)
                np.add.at(
                    total,
                    part.columns.of_weights,
                    step / joined_rows * np.array(part.gains),
                )
            elif text:
                gains = booster_of(text).feature_importance("gain")
                total[: len(gains)] += step * gains
        return joined_rows * total.reshape(-1, 1)

    def scores(self, features: Features) -> FloatArray:
        """Return the sum of the trees' values, (n, d_c)."""
        return sum_of_trees(self.forest.rounds, features, self.outputs)

    def contributions(
        self, features: Features, columns: Sequence[npt.NDArray[np.integer]]
    ) -> Sequence[FloatArray | None]:
        """Return the SHAP values of each feature, (n, d_c); None of merged trees.

        Trees that shards have pooled or averaged lack the rows of their nodes.
        """
        rounds = self.forest.rounds
        if not columns or not all(_counts_rows(text) for _, text in rounds):
            return [None] * len(columns)
        return [*shap_values(rounds, features, columns, self.outputs)]


def sum_of_trees(
    trees: Sequence[tuple[float, str]], features: Features, outputs: int
) -> FloatArray:
    """Return the sum of the values of trees, each times its step, (n, d_c)."""
    total = np.zeros((len(features), outputs))
    if not len(features):
        return total
    rows = tree_features(features)
    for step, text in trees:
        if is_linear(text):
            total += step * LinearPart.of(text).values(rows)
        elif text:
            booster = booster_of(text)
            # trees that grew before there were regions do not read them
            total += step * _values(booster, rows[:, : booster.num_feature()], outputs)
    return total


def shap_values(
    trees: Sequence[tuple[float, str]],
    features: Features,
    columns: Sequence[npt.NDArray[np.integer]],
    outputs: int,
) -> FloatArray:
    """Return the SHAP values of features, of some columns each, (F, n, d_c).

    Those of a tree follow its paths, in proportion to the table's rows that it was
    grown on (Lundberg et al. 2020, "From local explanations to global understanding
    with explainable AI for trees", algorithm 2); they are LightGBM's. A linear model
    adds what its columns add. Over all columns they sum up to the score, less a
    constant.
    """
    total = np.zeros((len(columns), len(features), outputs))
    rows = tree_features(features)
    for step, text in trees:
        if is_linear(text):
            total += step * LinearPart.of(text).values_by(rows, columns)
        elif text:
            booster = booster_of(text)
            width = booster.num_feature()
            for block in blocks(len(features), max(SHAP_VALUES // (width + 1), 1)):
                values = _shap_values(booster, rows[block, :width], outputs)
                for feature, each in enumerate(columns):
                    total[feature, block] += step * values[..., each].sum(axis=-1)
    return total


def _shap_values(
    booster: "lightgbm.Booster",
    rows: "npt.NDArray[np.float32] | csr_matrix",
    outputs: int,
) -> FloatArray:
    """Return the SHAP values of rows (n, d) by column, (n, d_c, d)."""
    values = booster.predict(
        rows, pred_contrib=True, num_threads=threads_for(rows.shape[0])
    )
    # of sparse rows they are sparse, by output
    if not isinstance(values, np.ndarray):
        parts = values if isinstance(values, list) else [values]
        values = np.stack([part.toarray() for part in parts], axis=1)
    # the last column is what is expected of a row
    return np.asarray(values).reshape(rows.shape[0], outputs, -1)[..., :-1]


def _counts_rows(text: str) -> bool:
    """Whether a text says of each tree how many rows its nodes have."""
    return text.count("\ninternal_count=") == text.count("\nsplit_feature=")


def grow(
    model: TreeModel,
    features: Features,
    gradient: FloatArray,
    hessian: FloatArray,
    joined_rows: float,
    growth: Growth,
) -> tuple[AnyArray, FloatArray]:
    """Return new trees as their text's bytes, and their values of all rows (n, d_c).

    Args:
        model: the table's model so far, which says what the columns are.
        features: (n, d), the trained rows first.
        gradient: G (n_trained, d_c).
        hessian: H (n_trained, d_c), above 0.
        joined_rows: those of all trained rows.
        growth: how the trees are grown.
    """
    trained = len(gradient)
    rows = tree_features(features)
    values = np.zeros((len(features), model.outputs))
    if not trained or not rows.shape[1]:
        return np.zeros(0, np.uint8), values
    lightgbm = load_lightgbm()
    per_row = trained / max(joined_rows, 1.0)
    # of a table's row as much as of a joined one, which LightGBM's constants are about
    gradient = per_row * gradient
    hessian = per_row * hessian
    options = tree_options(growth, hessian, per_row)
    if not model.binned:
        codes = list(model.forest.categorical)
        data = lightgbm.Dataset(
            rows[:trained], categorical_feature=codes, params=options
        )
        model.binned.append(data)
    booster = lightgbm.Booster(options, model.binned[0])

    def quadratic(scores: FloatArray, _: object) -> tuple[FloatArray, FloatArray]:
        score_matrix = scores.reshape(gradient.shape, order="F")
        return (gradient + hessian * score_matrix).ravel("F"), hessian.ravel("F")

    def take_scores(scores: FloatArray, _: object) -> tuple[str, float, bool]:
        values[:trained] = scores.reshape(gradient.shape)
        return "", 0.0, False

    for _ in range(growth.trees):
        if booster.update(fobj=quadratic):
            break  # no split is left
    grown = np.frombuffer(booster.model_to_string().encode(), np.uint8)
    # it has those of the rows that it grew on: to predict them takes as long
    booster.eval_train(take_scores)
    if len(features) > trained:
        values[trained:] = _values(booster, rows[trained:], model.outputs)
    return grown, values


def fit_before_trees(
    model: TreeModel,
    features: Features,
    gradient: FloatArray,
    hessian: FloatArray,
    counts: AnyArray,
    fit: RidgeFit,
) -> tuple[AnyArray, FloatArray]:
    """Return a linear model as its text's bytes, and its values of all rows (n, d_c).

    The arguments are those of :func:`grow`, with the joined rows of each trained row.
    """
    rows = tree_features(features)
    codes = model.forest.categorical
    return fit_linear(rows, gradient, hessian, counts, codes, fit)


def _values(
    booster: "lightgbm.Booster",
    rows: "npt.NDArray[np.float32] | csr_matrix",
    outputs: int,
) -> FloatArray:
    """Return the trees' values of rows, (n, d_c)."""
    values = booster.predict(
        rows, raw_score=True, num_threads=threads_for(rows.shape[0])
    )
    return np.asarray(values, np.float64).reshape(-1, outputs)
