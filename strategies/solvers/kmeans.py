"""CoresetKMeans: clusters of the joined rows, found on a sample of them.

Algorithm 3 of the paper samples the rows (:mod:`strategies.coresets.draw`), and the
server clusters them by their weights: with k-means++ over their encoded features, or,
as ``distdim``, over the local centres that the sites have found for their own columns
(Ding et al. 2016), where no row leaves. The centres' coordinates are the sites' models;
the squared distances add up over the tables, so that the cost over all joined rows is
measured where nobody has built one. It stands where others have the held-out rows.

Reference:
    Huang, Li, Sun, Zhao 2022, Coresets for Vertical Federated Learning, section 5.
"""

import math
from collections.abc import Mapping

import numpy as np

from strategies.run.exchange import Part, Replies
from strategies.run.reply_checks import array_of, refuse
from strategies.setup.problem import Federation, Table
from strategies.solvers.base import SolvedStrategy, joined_rows
from tp_flower.arrays import FloatArray
from tp_flower.coresets.assumptions import MOST_TAU, tau
from tp_flower.coresets.kmeans import distdim, weighted_kmeans
from tp_flower.protocol import AnyArray
from tp_flower.randomness import Stream, generator
from tp_flower.settings import DISTDIM


class CoresetKMeans(SolvedStrategy):
    """Cluster the result of a query by a coreset of it.

    Args:
        query: whose rows are clustered; its label, if it has one, is left out.
        settings: of the run; keyword arguments override single ones.
    """

    name = "coreset-kmeans"

    def solve(
        self, federation: Federation, replies: Replies, weights: FloatArray
    ) -> Mapping[str, FloatArray]:
        """Return the centres' own coordinates at every table."""
        rng = generator(federation.seed, Stream.SOLVE)
        clusters = self.settings.clusters
        if self.solver == DISTDIM:
            labels, local = _local_clusters(federation, replies, clusters)
            centres = distdim(labels, local, weights, clusters, rng)
        else:
            blocks = joined_rows(federation.train, federation.tables, replies)
            self._measure(list(blocks.values()), rng)
            points = np.concatenate(list(blocks.values()), axis=1)
            centres = weighted_kmeans(points, weights, clusters, rng)
        self.chosen["clusters"] = len(centres)
        # fewer distinct rows than clusters: one more of a centre changes no distance
        centres = centres[np.minimum(np.arange(clusters), len(centres) - 1)]
        edges = np.cumsum([table.features for table in federation.tables.values()])
        own = np.split(centres, edges[:-1], axis=1)
        return {
            name: block.ravel()
            for name, block in zip(federation.tables, own, strict=True)
        }

    def _measure(self, blocks: list[FloatArray], rng: np.random.Generator) -> None:
        """Measure tau, and warn where the paper's guarantee asks for less."""
        found = tau(blocks, rng)
        warnings = []
        if found.largest > MOST_TAU:
            warnings.append(
                f"tau is {found.largest:.3g} (of the middle pair {found.median:.3g}): "
                "no single table tells all rows apart (Assumption 5.1), so that only "
                "the robust guarantee holds, which leaves out a small share of the "
                "rows (Remark 5.3)"
            )
        facts = {"tau": found.largest, "tau-median": found.median}
        self.add_facts(
            {name: own if math.isfinite(own) else None for name, own in facts.items()},
            warnings,
        )


def _local_clusters(
    federation: Federation, replies: Replies, clusters: int
) -> tuple[AnyArray, list[FloatArray]]:
    """Return the local centre of each sampled joined row (k, T), and the centres."""
    labels, local = [], []
    for name, table in federation.tables.items():
        nearest, centres = _table_clusters(table, replies, clusters)
        labels.append(nearest[federation.train.tables[name].row_of])
        local.append(centres)
    return np.stack(labels, axis=1), local


def _table_clusters(
    table: Table, replies: Replies, clusters: int
) -> tuple[AnyArray, FloatArray]:
    """Return the local centre of each row of a table (n_i,), and its shards' centres.

    Raises:
        ReplyError: a shard sent too many centres, or the number of none.
    """
    nearest = np.zeros(table.total_rows, np.int64)
    centres = np.zeros((0, table.features))
    for part, rows in zip(table.parts, table.rows, strict=True):
        own = array_of(replies, part, "centres", (None, table.features))
        labels = array_of(replies, part, "nearest", (rows.trained,))
        _check_clusters(part, len(own), labels, clusters)
        nearest[rows.trained_slice] = labels + np.int64(len(centres))
        centres = np.concatenate([centres, own])
    return nearest, centres


def _check_clusters(part: Part, count: int, labels: AnyArray, clusters: int) -> None:
    if count > clusters:
        raise refuse(part, f"{count} centres, but was asked for {clusters} at most")
    if labels.size and int(labels.max()) >= count:
        raise refuse(part, f"the number of a centre that is not among its {count}")
