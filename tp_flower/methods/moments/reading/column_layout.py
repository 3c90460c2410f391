"""Where the columns of all tables are in the matrix of second moments."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tp_flower.arrays import FloatArray, IndexArray, IntArray
from tp_flower.methods.moments.noise import entry_deviations
from tp_flower.methods.moments.solve import JoinedMoments, Solution
from tp_flower.methods.moments.tree import Pair
from tp_flower.methods.moments.words import WordArray, to_numbers


@dataclass(frozen=True)
class ColumnLayout:
    """The columns of the tables, in the order of the query.

    The label's columns, and one of ones, are the last of the label's table.

    Attributes:
        columns: of every table, with the label's and the column of ones.
        outputs: columns of the label, k.
    """

    columns: Mapping[str, int]
    label_table: str
    outputs: int

    @cached_property
    def total(self) -> int:
        """D."""
        return sum(self.columns.values())

    @cached_property
    def places(self) -> dict[str, slice]:
        """By table, where its columns are."""
        stops = np.cumsum(list(self.columns.values())).tolist()
        return {
            table: slice(stop - count, stop)
            for (table, count), stop in zip(self.columns.items(), stops, strict=True)
        }

    @property
    def intercept(self) -> int:
        """The position of the column of ones."""
        return int(self.places[self.label_table].stop) - 1

    @property
    def labels(self) -> IndexArray:
        """The positions of the label's columns, (k,)."""
        return np.arange(self.intercept - self.outputs, self.intercept)

    @property
    def features(self) -> IndexArray:
        """The positions of the features, (d,)."""
        others = np.append(self.labels, self.intercept)
        return np.setdiff1d(np.arange(self.total), others)

    def moments(self, matrix: FloatArray) -> JoinedMoments:
        """Return the moments of a matrix, (D, D)."""
        return JoinedMoments(matrix, self.features, self.labels, self.intercept)

    def matrix(
        self, blocks: Mapping[Pair, WordArray], bits: Mapping[str, IntArray]
    ) -> FloatArray:
        """Return the symmetric matrix (D, D) of blocks of words by pair of tables.

        ``bits`` are those of every table's columns.
        """
        matrix = np.zeros((self.total, self.total))
        for (first, second), words in blocks.items():
            block = to_numbers(words, bits[first], bits[second])
            matrix[self.places[first], self.places[second]] = block
            matrix[self.places[second], self.places[first]] = block.T
        return matrix

    def parameters(self, solution: Solution) -> dict[str, FloatArray]:
        """Return the parameters of every table's model, (d_t [+ 1], d_c).

        The intercept is the last of the label's table.
        """
        parameters = {}
        for table, columns in self.places.items():
            is_of_table = (self.features >= columns.start) & (
                self.features < columns.stop
            )
            block = solution.coefficients[is_of_table]
            if table == self.label_table:
                block = np.vstack([block, solution.intercept])
            parameters[table] = block
        return parameters

    def deviations(self, sigmas: Mapping[str, float]) -> FloatArray | None:
        """Return the deviation of the noise of private tables on each moment, (D, D).

        None without any.
        """
        if not sigmas:
            return None
        variances = np.zeros((self.total, self.total))
        for table, sigma in sigmas.items():
            rows = self.places[table]
            for other, others in self.places.items():
                block = sigma * entry_deviations(
                    (table, other),
                    table,
                    (self.columns[table], self.columns[other]),
                    has_intercept=table == self.label_table,
                )
                variances[rows, others] += block**2
                if other != table:
                    variances[others, rows] += block.T**2
        return np.sqrt(variances)
