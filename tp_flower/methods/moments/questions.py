"""What the second moments of joined rows answer, besides a model.

Correlations; the variance inflation of features; the R2 of each table alone, and of all
but it, which says what a join is worth; principal components. All of them are sums over
the joined rows, so that nothing but arithmetic is needed.

Notation:
    d  features        k  columns of the label        R  correlations
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Final, NamedTuple

import numpy as np

from tp_flower.arrays import FloatArray, IndexArray
from tp_flower.methods.moments.inference import ESTIMABLE
from tp_flower.methods.moments.solve import JoinedMoments, Spectrum
from tp_flower.protocol.setup_messages import EncodedColumns

MOST_COMPONENTS: Final = 5


@dataclass(frozen=True)
class FeatureColumns:
    """The encoded columns of the features, in the order of the moments.

    Attributes:
        tables: what each table's encoder makes.
        shown: by table, the names of its columns, where its sites show them.
    """

    tables: Mapping[str, EncodedColumns]
    shown: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @cached_property
    def by_feature(self) -> dict[str, IndexArray]:
        """The positions of each feature's columns, by ``table.feature``."""
        widths = {
            f"{table}.{feature}": width
            for table, columns in self.tables.items()
            for feature, width in columns.features.items()
        }
        return {name: each for name, each in _divide(widths).items() if len(each)}

    @cached_property
    def by_table(self) -> dict[str, IndexArray]:
        """The positions of each table's columns."""
        return _divide({name: each.width for name, each in self.tables.items()})

    @cached_property
    def names(self) -> list[str]:
        """The name of each column, d in all.

        >>> FeatureColumns({"i": EncodedColumns({"day": 1, "kind": 2}, True)}).names
        ['i.day', 'i.kind[0]', 'i.kind[1]']
        """
        return [
            f"{table}.{name}"
            for table, columns in self.tables.items()
            for name in self.shown.get(table, columns.names)
        ]


def _divide(widths: Mapping[str, int]) -> dict[str, IndexArray]:
    """Return consecutive positions, so many for each name."""
    ends = np.cumsum([0, *widths.values()]).tolist()
    ranges = (np.arange(*pair) for pair in pairwise(ends))
    return dict(zip(widths, ranges, strict=True))


def correlations(covariance: FloatArray) -> FloatArray:
    """Return R of a covariance (D, D); 0 beside columns that are constant."""
    deviations = np.sqrt(np.diag(covariance))
    scales = np.divide(
        1.0, deviations, out=np.zeros_like(deviations), where=deviations > 0.0
    )
    scaled: FloatArray = covariance * np.outer(scales, scales)
    return scaled


class Pair(NamedTuple):
    """Two columns, by position among the features and then the label's, and R."""

    first: int
    second: int
    correlation: float


def strongest_pairs(
    moments: JoinedMoments, groups: Sequence[IndexArray], most: int
) -> list[Pair]:
    """Return the largest correlations of columns that are not of one group."""
    columns = np.concatenate([moments.features, moments.labels])
    matrix = correlations(moments.covariance_of(columns, columns))
    group_of = np.full(len(columns), -1)
    for number, positions in enumerate(groups):
        group_of[positions] = number
    first, second = np.nonzero(np.triu(group_of[:, None] != group_of))
    values = matrix[first, second]
    order = np.argsort(-np.abs(values), kind="stable")[:most]
    chosen = zip(first[order], second[order], values[order], strict=True)
    return [Pair(int(a), int(b), float(value)) for a, b, value in chosen]


class Inflation(NamedTuple):
    """By how much the other features widen the confidence region of a feature.

    Attributes:
        columns: the rank of the feature's columns, its degrees of freedom.
        factor: the generalised VIF; infinite where others determine the feature.
    """

    columns: int
    factor: float

    @property
    def scaled(self) -> float:
        """The factor^(1 / 2 columns), the widening of one standard error."""
        return float(self.factor ** (0.5 / max(self.columns, 1)))


def inflations(covariance: FloatArray, groups: Sequence[IndexArray]) -> list[Inflation]:
    """Return the generalised VIF of groups of columns, by their covariance (d, d).

    det(R_gg) det(R_oo) / det(R), o all columns but g, is det(R_gg) det((R^-1)_gg). It
    does not depend on the basis of a group's columns, so that one is taken in which
    R_gg = I: for one column it is the usual VIF, 1 / (1 - R2).

    Of a generalised linear model the covariance is that of rows that weigh their
    information: its inverse is, but for a factor, that of the estimates, whose
    correlations have the same ratio of determinants (Jacobi's identity).

    Source: Fox and Monette 1992, "Generalized Collinearity Diagnostics".
    """
    if not groups:
        return []
    matrix = correlations(covariance)
    bases = [_whiten(matrix[np.ix_(group, group)]) for group in groups]
    # few runs are asked for it, and scipy takes a sixth of a second to import
    from scipy.linalg import block_diag

    basis = block_diag(*bases)
    order = np.concatenate(list(groups))
    spectrum = Spectrum.of(basis.T @ matrix[np.ix_(order, order)] @ basis)
    inverse = spectrum.solve(0.0, np.eye(len(spectrum.values)))
    null = spectrum.vectors[:, spectrum.values == 0.0]
    ends = np.cumsum([0, *(base.shape[1] for base in bases)]).tolist()
    found = []
    for start, stop in pairwise(ends):
        own = slice(start, stop)
        is_determined = np.sum(null[own] ** 2) > ESTIMABLE
        factor = np.inf if is_determined else float(np.linalg.det(inverse[own, own]))
        found.append(Inflation(stop - start, factor))
    return found


def _whiten(matrix: FloatArray) -> FloatArray:
    """Return W (d, r) with W^T matrix W = I, for a matrix (d, d) of rank r."""
    spectrum = Spectrum.of(matrix)
    is_kept = spectrum.values > 0.0
    whitened: FloatArray = spectrum.vectors[:, is_kept] / np.sqrt(
        spectrum.values[is_kept]
    )
    return whitened


class Explained(NamedTuple):
    """The R2, by pass, of one table's features and of all others'."""

    alone: Mapping[int, float]
    without: Mapping[int, float]


def explained(
    passes: Mapping[int, JoinedMoments],
    trained: int,
    tables: Mapping[str, IndexArray],
    l2: float,
) -> dict[str, Explained]:
    """Return what each table explains, by ridges on the rows of the trained pass."""

    def r2(positions: IndexArray) -> dict[int, float]:
        restricted = {
            number: replace(moments, features=moments.features[positions])
            for number, moments in passes.items()
        }
        solution = restricted[trained].ridge(l2)
        metrics = {n: each.metrics(solution) for n, each in restricted.items()}
        return {n: values["r2"] for n, values in metrics.items() if "r2" in values}

    every = np.fromiter(chain(*tables.values()), np.intp)
    return {
        name: Explained(r2(positions), r2(np.setdiff1d(every, positions)))
        for name, positions in tables.items()
    }


class Components(NamedTuple):
    """Principal components of the standardised features, the largest first.

    Attributes:
        shares: of the variance, (m,).
        loadings: eigenvectors of R, (d, m), each with its largest entry above 0.
    """

    shares: FloatArray
    loadings: FloatArray


def components(moments: JoinedMoments, most: int = MOST_COMPONENTS) -> Components:
    """Return the first principal components of the features."""
    values, vectors = Spectrum.of(correlations(moments.covariance))
    largest = slice(None, -most - 1, -1)
    loadings = vectors[:, largest]
    if loadings.size:
        peaks = np.abs(loadings).argmax(axis=0)
        loadings = loadings * np.sign(loadings[peaks, np.arange(len(peaks))])
    return Components(values[largest] / (values.sum() or 1.0), loadings)
