"""How far the labels of joined rows differ between the shards of a table.

A model whose shards have parameters of their own, such as trees that each shard grows
alone, has the shard as a feature. Where the shard tells the label (a clinic with the
sick, a register with the well), such a model is perfect on held-out rows of the same
shards, and says nothing about rows whose label does not follow from where they are.

    tau = between / total,  between = sum_s n_s |m_s - m|^2,  total = sum_j |y_j - m|^2

with y_j the label, for C classes an indicator of each, and m_s the mean of shard s. If
the shards do not differ, (n - 1) (C - 1) tau has about a chi-square distribution with
(S - 1) (C - 1) degrees of freedom (C = 2 for numbers).

Reference:
    Light and Margolin 1971, "An analysis of variance for categorical data".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from strategies.setup.joined_rows import JoinedTables, TableLayout
from tp_flower.arrays import AnyArray, BoolArray, FloatArray, IntArray

LARGEST_SHARE: Final = 0.05
"""Of the label's variance, between shards: of the flights, those of carriers have
0.013."""
CHANCE: Final = 1e-6  # that shards which do not differ look as if they did


@dataclass(frozen=True)
class ShardLabels:
    """The finding that the shards of a table tell the labels.

    Attributes:
        share: tau, the share of the label's variance that is between the shards.
        sites: those whose shard has one label only, where chance does not explain it.
    """

    table: str
    share: float
    sites: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The finding as a clause."""
        clause = (
            f"{self.share:.0%} of the label's variance is between the shards of "
            f"{self.table}"
        )
        if self.sites:
            return f"{clause} ({', '.join(self.sites)}: one label only)"
        return clause


def shards_that_tell_labels(joined: JoinedTables) -> Iterator[ShardLabels]:
    """Yield the tables whose shards tell the labels of joined training rows."""
    if not joined.target.has_label:
        return
    rows = joined.train.tables[joined.bound.label_table]
    labelled = rows.expand(np.arange(rows.rows, dtype=np.int32))
    for layout in joined.layouts.values():
        if len(layout.parts) > 1 and (labels := _compare(joined, layout, labelled)):
            yield labels


def _compare(
    joined: JoinedTables, layout: TableLayout, labelled: AnyArray
) -> ShardLabels | None:
    """Return what a table's shards tell about the labels, if it is more than chance."""
    # a run without shards does not wait for it
    from scipy.stats import chi2

    target = joined.train_objective.target
    labels = target.numbers
    classes = len(target.classes) or 2
    shards = len(layout.parts)
    rows_by_shard = [rows.total for rows in layout.rows]
    table = joined.train.tables[layout.name]
    is_matched = ~table.is_absent
    shard = table.expand(np.repeat(np.arange(shards), rows_by_shard))[is_matched]
    labels = labels[is_matched]
    independent = _independent_rows(layout, shard, labelled[is_matched])
    present = np.flatnonzero(np.bincount(shard, minlength=shards))
    if len(present) < 2:
        return None
    share = _share_between(labels, shard, shards, is_numbers=not target.classes)
    freedom = (len(present) - 1) * (classes - 1)
    statistic = (independent.sum() - 1) * (classes - 1) * share
    is_large = share >= LARGEST_SHARE and chi2.sf(statistic, freedom) < CHANCE
    sites = tuple(
        layout.parts[number].site
        for number in present
        if _has_one_label(labels, shard == number, int(independent[number]))
    )
    if is_large or sites:
        return ShardLabels(layout.name, share, sites)
    return None


def _independent_rows(
    layout: TableLayout, shard: IntArray, labelled: AnyArray
) -> IntArray:
    """Return how many rows of each shard say something of their own, (S,).

    A row of the table in many joined rows counts once, and so does a row of the label
    table.
    """
    rows = np.array([part.trained for part in layout.rows])
    # pairs of a shard and a row of the label table
    size = int(labelled.max(initial=0)) + 1
    pairs = np.unique(shard * size + labelled)
    independent: IntArray = np.minimum(
        rows, np.bincount(pairs // size, minlength=len(rows))
    )
    return independent


def _share_between(
    labels: FloatArray, shard: IntArray, shards: int, *, is_numbers: bool
) -> float:
    """Return tau of labels (N,), numbers or codes of classes."""
    sizes = np.bincount(shard, minlength=shards)
    if is_numbers:
        columns = [labels]
    else:
        columns = [(labels == code).astype(np.float64) for code in np.unique(labels)]
    between = total = 0.0
    for column in columns:
        centred = column - column.mean()
        sums = np.bincount(shard, centred, shards)
        between += float((sums**2 / np.maximum(sizes, 1)).sum())
        total += float(centred @ centred)
    return between / total if total else 0.0


def _has_one_label(labels: FloatArray, is_here: BoolArray, rows: int) -> bool:
    """Whether all labels of a shard are equal, which they are not by chance."""
    shard_labels = labels[is_here]
    if not len(shard_labels) or (shard_labels != shard_labels[0]).any():
        return False
    return float(np.mean(labels == shard_labels[0])) ** rows < CHANCE
