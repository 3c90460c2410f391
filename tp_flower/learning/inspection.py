"""Inspection of a table's model on joined rows: permutation importances and shares.

A score is a sum over the tables. So a table's site needs to know of the others no more
than the scores to work out what a change of its own columns does to them.

*Permutation importances* (Breiman 2001, "Random Forests", section 10; scikit-learn's
``permutation_importance``): the values of a feature change places among the joined
rows, and the metrics of the scores are taken again,

    h'_j = h_j - f(x_j) + f(x_j with the feature's value in joined row pi(j))

They change places as in the built join, where a row of the table counts as often as it
is joined. Of a whole table all columns change places together. A joined row without a
row of the table takes part in that as one that adds 0; where a single feature changes
places, it keeps its score.

*Shares*: how far a table or a feature moves the scores, on average,

    share = mean_j |v_j - mean_j v_j|

of what it adds to them, v_j: of a table f(x_j), of a feature of a linear model w x_j,
of one that trees read its SHAP value. In linear models that is the mean size of SHAP's
values where the same joined rows are the background (Lundberg and Lee 2017, "A Unified
Approach to Interpreting Model Predictions", section 4.2). Of several outputs, shares
are added up.

*Partial dependence* (Friedman 2001, "Greedy Function Approximation", section 8.2): by
how much the mean score changes if all joined rows with a row of the table have one
value of a feature.

Notation:
    N  joined rows                     n  rows of the table that are joined
    h  ``scores``  (N, d_c)            f  ``added``  (n, d_c)
    F  features of the table           d  encoded columns
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final

import numpy as np

from tp_flower.arrays import AnyArray, FloatArray, IntArray, blocks
from tp_flower.features.encoder import TableEncoder
from tp_flower.features.sparse import EncodedRows, columns_of, dense
from tp_flower.joins.mapping import TableRows
from tp_flower.learning.models.local_model import LocalModel, host_features, rows_of

SWAPPED_VALUES: Final = 1 << 20  # of encoded rows, that are put together at a time
Measure = Callable[[FloatArray], Mapping[str, float]]
"""Metrics of scores (N, d_c), by name."""


def columns_by_feature(
    encoder: TableEncoder, features: Sequence[str]
) -> tuple[IntArray, ...]:
    """Return the encoded columns of each feature; none of one that was dropped."""
    owners = np.array([encoding.name for encoding in encoder.owners], object)
    return tuple(np.flatnonzero(owners == name) for name in features)


@dataclass(frozen=True, eq=False)
class InspectedTable:
    """A table's model, and its rows behind the joined rows.

    Attributes:
        model: of the table.
        features: encoded rows (n, d).
        columns: the encoded columns of each feature, F in all.
        behind: which row is behind each joined row, if any.
        added: (n, d_c), what each row adds to the scores: the model's, and effects of
            its keys.
    """

    model: LocalModel
    features: EncodedRows
    columns: tuple[IntArray, ...]
    behind: TableRows
    added: FloatArray

    def permute_table(self, rng: np.random.Generator) -> FloatArray:
        """Return by how much scores change if the rows change places, (N, d_c)."""
        donors = self.behind.permuted(rng)
        return donors.expand(self.added) - self.behind.expand(self.added)

    def permute_feature(self, feature: int, rng: np.random.Generator) -> FloatArray:
        """Return by how much scores change if a feature's values do, (N, d_c)."""
        donors = self.behind.permuted(rng, keeps_absent=True)
        part = self.parts[feature]
        if part is not None:
            return donors.expand(part) - self.behind.expand(part)
        columns = self.columns[feature]
        changes = np.zeros((len(self.behind.is_absent), self.added.shape[1]))
        if len(columns):
            joined = np.flatnonzero(~self.behind.is_absent)
            positions = np.arange(len(self.added))
            others = donors.expand(positions)[joined]
            changes[joined] = self._put(
                columns,
                self.behind.expand(positions)[joined],
                lambda block: self._dense(others[block], columns),
            )
        return changes

    def change_to(self, feature: int, encoded: EncodedRows) -> FloatArray:
        """Return by how much scores change on average with one value of a feature.

        Args:
            feature: its position.
            encoded: (g, d), rows of which each has one value of the feature; their
                other columns do not matter.

        Returns:
            For each value the mean over the joined rows, (g, d_c). Those without a row
            of the table keep their scores.
        """
        columns = self.columns[feature]
        counts = self.behind.multiplicity
        total = len(self.behind.is_absent)
        part_of_rows = self.parts[feature]
        part = self.model.part(encoded, columns)
        if part_of_rows is not None and part is not None:
            changes: FloatArray = (counts.sum() * part - counts @ part_of_rows) / total
            return changes
        changes = np.zeros((len(encoded), self.added.shape[1]))
        rows = np.arange(len(self.added))
        values = dense(columns_of(encoded, columns))
        for point in range(len(values)):
            change = self._put(columns, rows, partial(_same, values[point]))
            changes[point] = counts @ change / total
        return changes

    @cached_property
    def parts(self) -> tuple[FloatArray | None, ...]:
        """What each feature adds to the scores, (n, d_c); None where that is no sum."""
        return tuple(
            self.model.part(self.features, columns) for columns in self.columns
        )

    @cached_property
    def _model_scores(self) -> FloatArray:
        return self.model.scores(self.features)

    def _put(
        self, columns: IntArray, rows: IntArray, values: Callable[[slice], AnyArray]
    ) -> FloatArray:
        """Return by how much scores of rows (m,) change with other values, (m, d_c).

        ``values`` returns those of some columns (k,) for a block of the rows.
        """
        changes = np.empty((len(rows), self.added.shape[1]))
        size = max(SWAPPED_VALUES // self.features.shape[1], 1)
        for block in blocks(len(rows), size):
            swapped = np.array(self._dense(rows[block]))
            swapped[:, columns] = values(block)
            changes[block] = self.model.scores(swapped)
            changes[block] -= self._model_scores[rows[block]]
        return changes

    def _dense(self, rows: IntArray, columns: IntArray | None = None) -> AnyArray:
        """Return some rows with all values, or with some columns alone."""
        chosen = host_features(rows_of(self.features, rows))
        if columns is not None:
            chosen = columns_of(chosen, columns)
        return dense(chosen)


def _same(values: AnyArray, _: slice) -> AnyArray:
    return values


def permuted_metrics(
    table: InspectedTable,
    scores: FloatArray,
    measure: Measure,
    repeats: int,
    rng: np.random.Generator,
) -> dict[str, FloatArray]:
    """Return the metrics with values permuted, by name, (1 + F, 2).

    First those where the table's rows change places, then those of each feature: the
    mean over the repetitions, and the deviation, NaN where a metric is not finite.
    """
    shape = 1 + len(table.columns), repeats
    values: dict[str, FloatArray] = {}
    for item, repeat in np.ndindex(shape):
        if item:
            changes = table.permute_feature(item - 1, rng)
        else:
            changes = table.permute_table(rng)
        for name, value in measure(scores + changes).items():
            metric = values.setdefault(name, np.full(shape, np.nan))
            if np.isfinite(value):
                metric[item, repeat] = value
    return {
        name: np.column_stack([metric.mean(axis=1), metric.std(axis=1)])
        for name, metric in values.items()
    }


def mean_shares(table: InspectedTable) -> FloatArray:
    """Return the share of the table, and of each feature, (1 + F,); NaN for none."""
    contributions = table.model.contributions(table.features, table.columns)
    return np.array(
        [
            np.nan if added is None else _share(added, table.behind)
            for added in (table.added, *contributions)
        ]
    )


def _share(added: FloatArray, behind: TableRows) -> float:
    """Return the mean size of centred values (n, d_c) over the joined rows."""
    total = len(behind.is_absent)
    mean = behind.multiplicity @ added / total
    sizes = behind.multiplicity @ np.abs(added - mean)
    # what has no row adds 0
    sizes += np.count_nonzero(behind.is_absent) * np.abs(mean)
    return float(sizes.sum() / total)
