"""A join for the coreset benchmark: encoded tables and how their rows are joined.

The join is never built: a linear score, or a squared distance, is a sum over the
tables, so that what a model costs on all joined rows takes O(sum n_i d_i + N T).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from scripts.joined.centralized import JoinedTable
from tp_flower.coresets.importance import (
    augmented,
    cluster_shard,
    kmeans_scores,
    regression_scores,
)
from tp_flower.coresets.sampling import (
    Sample,
    draw_rows,
    uniform_sample,
    weigh_sample,
)
from tp_flower.joins.mapping import TableRows

FloatArray = npt.NDArray[np.float64]
Generator = np.random.Generator


@dataclass(frozen=True)
class Table:
    """A table of the join.

    Attributes:
        rows: how its rows lie in the joined rows.
        features: (n_i, d_i), encoded.
        label: (n_i, 1) at the label table.
    """

    rows: TableRows
    features: npt.NDArray[np.float32]
    label: FloatArray | None = None


@dataclass(frozen=True)
class Join:
    """Joined rows, as the rows of the tables behind them.

    Attributes:
        tables: in the order of the columns.
        labels: (N,).
    """

    tables: Sequence[Table]
    labels: FloatArray

    @classmethod
    def of(cls, joined: JoinedTable, chosen: npt.NDArray[np.bool_]) -> "Join":
        """Return some of the joined rows; the query's first table has the label."""
        tables: list[Table] = []
        for name, columns in joined.columns.items():
            _, first, place = np.unique(
                joined.rows[name][chosen], return_index=True, return_inverse=True
            )
            rows = TableRows(place.reshape(-1).astype(np.int32), len(first))
            at = np.flatnonzero(chosen)[first]
            label = None if tables else joined.labels[at, None]
            tables.append(Table(rows, joined.features[at, columns], label))
        return cls(tables, joined.labels[chosen])

    @property
    def size(self) -> int:
        """N."""
        return len(self.labels)

    @property
    def width(self) -> int:
        """d, the features of all tables."""
        return sum(table.features.shape[1] for table in self.tables)

    @cached_property
    def _edges(self) -> npt.NDArray[np.intp]:
        return np.cumsum([table.features.shape[1] for table in self.tables])[:-1]

    def design(self, joined: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
        """Return the features of joined rows (k,), (k, d)."""
        return np.concatenate(
            [own.features[own.rows.row_of[joined]] for own in self.tables], axis=1
        )

    def residuals(self, theta: FloatArray) -> FloatArray:
        """Return X theta + b - y of theta (d + 1, c), (N, c)."""
        total = np.repeat(-self.labels[:, None], theta.shape[1], axis=1) + theta[-1]
        for own, part in zip(
            self.tables, np.split(theta[:-1], self._edges), strict=True
        ):
            own.rows.add_expanded(own.features @ part, total)
        found: FloatArray = total
        return found

    def distances(self, centres: FloatArray) -> FloatArray:
        """Return the squared distance to the nearest of centres (k, d), (N,)."""
        total = np.zeros((self.size, len(centres)))
        for own, part in zip(
            self.tables, np.split(centres, self._edges, axis=1), strict=True
        ):
            squares = np.einsum("ij,ij->i", own.features, own.features)
            local = squares[:, None] - 2.0 * (own.features @ part.T)
            own.rows.add_expanded(local + (part**2).sum(axis=1), total)
        nearest_one: FloatArray = np.maximum(total.min(axis=1), 0.0)
        return nearest_one

    def regression_scores(self, l2: float) -> FloatArray:
        """Return the scores of the joined rows, without the uniform term, (N,)."""
        return self._expanded(
            (
                regression_scores(
                    augmented(own.features, own.label, intercept=own.label is not None),
                    own.rows.multiplicity,
                    features=own.features.shape[1],
                    penalty=l2 * self.size,
                )
            )
            for own in self.tables
        )

    def _expanded(self, scores: Iterable[FloatArray]) -> FloatArray:
        """Return the sum over the tables of their rows' scores, (N,)."""
        total = np.zeros(self.size)
        for own, of_rows in zip(self.tables, scores, strict=True):
            own.rows.add_expanded(of_rows, total)
        return total

    def cluster_scores(self, clusters: int, rng: Generator) -> FloatArray:
        """Return the scores of the joined rows, without the uniform term, (N,)."""
        return self._expanded(
            kmeans_scores(
                cluster_shard(own.features, own.rows.multiplicity, clusters, rng)
            )
            for own in self.tables
        )

    def local_clusters(
        self, sample: Sample, clusters: int, rng: Generator
    ) -> tuple[npt.NDArray[np.intp], list[FloatArray]]:
        """Return what DistDim takes of the sampled rows: (k, T) labels, and centres."""
        labels, centres = [], []
        for own in self.tables:
            rows = own.rows.row_of[sample.joined]
            taken, place = np.unique(rows, return_inverse=True)
            mass = np.bincount(place, sample.weights)
            found = cluster_shard(own.features[taken], mass, clusters, rng)
            labels.append(found.labels[place])
            centres.append(found.centres)
        return np.stack(labels, axis=1), centres


@dataclass(frozen=True)
class Sampler:
    """Draws samples of a join's rows: by importance where it has scores, or uniformly.

    Attributes:
        join: of whose rows.
        scores: (N,), s_j with the uniform term; None draws uniformly.
    """

    join: Join
    scores: FloatArray | None = None

    @classmethod
    def by_importance(cls, join: Join, scores: FloatArray) -> "Sampler":
        """Return the sampler of scores (N,) without the uniform term."""
        return cls(join, scores + len(join.tables) / join.size)

    def draw(self, size: int, rng: Generator) -> Sample:
        """Return a sample of ``size`` rows."""
        if self.scores is None:
            return uniform_sample(self.join.size, size, None, rng)
        draws = draw_rows(self.scores, size, rng)
        scores = self.scores[np.unique(draws)]
        return weigh_sample(draws, scores, float(self.scores.sum()))


def units(size: int, kind: str, widths: Mapping[str, int], labels: int) -> int:
    """Return the numbers that a sample and its choice take, as the paper counts.

    Args:
        size: m.
        kind: "importance": totals, counts, samples, the samples to all tables, scores;
            "uniform": the samples to all tables.
        widths: features by table.
        labels: numbers per row that are its label.
    """
    parties = len(widths)
    told = parties * size
    own = 2 * parties + size + parties * size if kind == "importance" else 0
    return told + own + size * (sum(widths.values()) + labels)
