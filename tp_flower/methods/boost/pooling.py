"""Trees of one column each, grown on sums over all shards of a table.

A shard that grows trees alone, averaged with others or not, sees the labels of its own
rows: where these are all alike, no split of its columns says anything, although the
shards' rows together would. Here each shard shows the others, for every column,

    G_b = sum_r G_r,  H_b = sum_r H_r    over the rows r whose value is in interval b

and every shard grows the same trees on the sums of all shards. The shards' intervals
differ; within one of them the sums are taken to be spread evenly. The function is a sum
over the columns: what two of them tell together is left to other tables, or to shards
that are alike.

Notation:
    G, H  (n, d_c): the derivatives' sums over the joined rows of each trained row
"""

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import numpy as np
import numpy.typing as npt

from tp_flower.arrays import MISSING, AnyArray, FloatArray, IntArray
from tp_flower.errors import ModelError
from tp_flower.methods.boost.bagging import read_trees, write_trees
from tp_flower.methods.boost.messages import Growth
from tp_flower.methods.boost.trees import TreeModel, grow

MOST_INTERVALS: Final = 64  # of a shard's column, besides categories


class ColumnSums(msgspec.Struct, frozen=True, array_like=True):
    """The sums of one column, by interval or category.

    ``gradient`` and ``hessian`` are (b, d_c). ``values`` (b,) are means of intervals
    or the codes of categories; a group of rows without a value is the last, with None.
    ``edges`` (k - 1,) separate the intervals.
    """

    values: list[float | None]
    edges: list[float]
    gradient: list[list[float]]
    hessian: list[list[float]]

    @property
    def intervals(self) -> int:
        """The number of groups with a value, k."""
        return len(self.values) - (self.values[-1:] == [None])

    def is_valid(self, outputs: int, *, is_code: bool) -> bool:
        """Whether the sums fit such a column, and so many outputs."""
        sums = [*self.gradient, *self.hessian]
        count = self.intervals
        edge_count = 0 if is_code else max(count - 1, 0)
        if None in self.values[:count] or len(self.edges) != edge_count:
            return False
        values = np.array(self.values[:count], np.float64)
        return (
            len(self.gradient) == len(self.hessian) == len(self.values)
            and all(len(row) == outputs for row in sums)
            and bool(np.isfinite(values).all() and np.isfinite(sums).all())
            and (is_code or _are_ordered(values, np.array(self.edges)))
            and bool((np.array(self.hessian) > 0.0).all())
        )


def _are_ordered(means: FloatArray, edges: FloatArray) -> bool:
    """Whether each edge is above the mean before it, and below the one after it."""
    return bool((means[:-1] < edges).all() and (edges < means[1:]).all())


class ShardSums(msgspec.Struct, frozen=True):
    """The sums over a shard's rows, by column."""

    joined_rows: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    columns: list[ColumnSums]


def shown_sums(
    rows: npt.NDArray[np.float32],
    codes: Sequence[int],
    gradient: FloatArray,
    hessian: FloatArray,
    counts: AnyArray,
    least_rows: int,
) -> bytes:
    """Return the sums over a shard's rows as another shard may see them.

    Args:
        rows: (n, d), the trained rows.
        codes: the columns that are codes of categories.
        gradient: G.
        hessian: H, above 0.
        counts: the joined rows of each row, (n,).
        least_rows: minimum of joined rows of an interval or category; categories with
            fewer are left out.
    """
    columns = []
    for column, values in enumerate(np.asarray(rows, np.float64).T):
        group, means, edges = _group_values(
            values, counts, least_rows, is_code=column in codes
        )
        values_or_none = [None if np.isnan(mean) else float(mean) for mean in means]
        sums = (
            _sums_by_group(numbers, group, len(means))
            for numbers in (gradient, hessian)
        )
        columns.append(ColumnSums(values_or_none, edges.tolist(), *sums))
    return msgspec.msgpack.encode(ShardSums(float(counts.sum()), columns))


def _sums_by_group(
    numbers: FloatArray, group: IntArray, groups: int
) -> list[list[float]]:
    """Return each group's sum, (groups, d_c), of numbers (n, d_c) over its rows."""
    is_in = group >= 0
    sums = [np.bincount(group[is_in], column[is_in], groups) for column in numbers.T]
    columns: list[list[float]] = np.stack(sums, axis=1).tolist()
    return columns


def _group_values(
    values: FloatArray, counts: AnyArray, least_rows: int, *, is_code: bool
) -> tuple[IntArray, FloatArray, FloatArray]:
    """Return the group of each value (n,), each group's mean value, and the edges.

    A value outside all groups has -1. The mean of a group without values is NaN. Edges
    separate the groups of numbers.
    """
    group = np.full(len(values), -1, np.int64)
    is_missing = values <= MISSING
    distinct, value_index = np.unique(values[~is_missing], return_inverse=True)
    mass: FloatArray = np.bincount(
        value_index, counts[~is_missing], len(distinct)
    ).astype(np.float64)
    if is_code:
        is_frequent = mass >= least_rows
        value_groups = np.where(is_frequent, np.cumsum(is_frequent) - 1, -1)
        edges = np.zeros(0)
    else:
        value_groups = _intervals(mass, least_rows)
        interval_ends = np.flatnonzero(np.diff(value_groups))
        edges = (distinct[interval_ends] + distinct[interval_ends + 1]) / 2.0
    group[~is_missing] = value_groups[value_index]
    size = int(value_groups.max(initial=-1)) + 1
    is_in = group >= 0
    weights = np.bincount(group[is_in], counts[is_in], size)
    means = np.bincount(group[is_in], (counts * values)[is_in], size) / weights
    if counts[is_missing].sum() >= least_rows:
        group[is_missing] = size
        means = np.append(means, np.nan)
    return group, means, edges


def _intervals(mass: FloatArray, least_rows: int) -> IntArray:
    """Return the interval of each distinct value, (k,), of about equal masses.

    ``mass`` (k,) are the joined rows of each value, in ascending order of values.
    """
    total = float(mass.sum())
    if total < least_rows:
        return np.full(len(mass), -1, np.int64)
    width = max(float(least_rows), total / MOST_INTERVALS)
    centres = np.cumsum(mass) - mass / 2.0
    _, bins = np.unique(centres // width, return_inverse=True)
    bin_masses = np.bincount(bins, mass)
    merged = np.zeros(len(bin_masses), np.int64)
    interval = 0
    interval_mass = 0.0
    # a loop over bins, not rows: there are about MOST_INTERVALS
    for position, bin_mass in enumerate(bin_masses):
        merged[position] = interval
        interval_mass += bin_mass
        if interval_mass >= least_rows:
            interval += 1
            interval_mass = 0.0
    if interval_mass:
        merged[merged == interval] = interval - 1
    intervals: IntArray = merged[bins]
    return intervals


def grow_pooled(
    documents: Sequence[bytes],
    codes: Sequence[int],
    columns: int,
    outputs: int,
    growth: Growth,
) -> AnyArray:
    """Return trees grown on all shards' sums, as the bytes of LightGBM's text.

    Raises:
        ModelError: a document does not hold sums of the columns, for so many outputs.
    """
    try:
        shards = [
            msgspec.msgpack.decode(document, type=ShardSums) for document in documents
        ]
    except msgspec.DecodeError:
        raise ModelError("malformed sums of columns") from None
    for shard in shards:
        if len(shard.columns) != columns or not all(
            sums.is_valid(outputs, is_code=column in codes)
            for column, sums in enumerate(shard.columns)
        ):
            raise ModelError("malformed sums of columns")
    joined_rows = sum(shard.joined_rows for shard in shards)
    # as many trees of all columns together as of one, about, that go as far
    growth = growth.of_shards(max(columns, 1))
    trees = list[bytes]()
    for column in range(columns):
        column_sums = [shard.columns[column] for shard in shards]
        rows, gradient, hessian = _pool_column(
            column_sums, outputs, is_code=column in codes
        )
        if len(rows) < 2:
            continue
        model = TreeModel(outputs)
        model.start([0] if column in codes else [])
        text, _ = grow(model, rows, gradient, hessian, joined_rows, growth)
        for tree in read_trees(text):
            column_tree = msgspec.structs.replace(
                tree, split_feature=[column] * len(tree.split_feature)
            )
            trees.append(column_tree.text(len(trees), 1.0))
    return write_trees(trees, columns, outputs)


def _pool_column(
    shards: Sequence[ColumnSums], outputs: int, *, is_code: bool
) -> tuple[npt.NDArray[np.float32], FloatArray, FloatArray]:
    """Return a column's values (b, 1), and the gradients and Hessians of each.

    The values are float32; the other two, (b, d_c), are sums over all shards.
    """
    shard_values = [np.array(x.values[: x.intervals], np.float64) for x in shards]
    if is_code:
        groups = np.unique(np.concatenate(shard_values))
    else:
        groups = np.unique(np.concatenate(list(map(_bounds, shards))))
    bins = len(groups) if is_code else max(len(groups) - 1, 0)
    # the last bin holds the rows without a value
    total = np.zeros((2, bins + 1, outputs))
    for shard, values in zip(shards, shard_values, strict=True):
        count = shard.intervals
        for derivative, entries in enumerate((shard.gradient, shard.hessian)):
            sums = np.array(entries).reshape(-1, outputs)
            if is_code:
                total[derivative, np.searchsorted(groups, values)] += sums[:count]
            elif count:
                total[derivative, :-1] += _spread(sums[:count], _bounds(shard), groups)
            total[derivative, -1] += sums[count:].sum(axis=0)
    centres = groups if is_code else (groups[:-1] + groups[1:]) / 2.0
    rows = np.append(centres, MISSING).astype(np.float32)[:, None]
    is_filled = (total[1] > 0.0).all(axis=1)
    return rows[is_filled], total[0][is_filled], total[1][is_filled]


def _bounds(sums: ColumnSums) -> FloatArray:
    """Return the bounds of a column's intervals, (k + 1,).

    The outer two are unknown: each is taken to be as far from the mean of its interval
    as the inner one.
    """
    values = np.array(sums.values[: sums.intervals], np.float64)
    edges = np.array(sums.edges)
    if not len(values):
        return np.zeros(0)
    if not len(edges):
        width = max(abs(float(values[0])), 1.0) * float(np.finfo(np.float32).eps)
        return np.array([values[0] - width, values[0] + width])
    first = 2.0 * values[0] - edges[0]
    last = 2.0 * values[-1] - edges[-1]
    return np.concatenate([[first], edges, [last]])


def _spread(sums: FloatArray, bounds: FloatArray, groups: FloatArray) -> FloatArray:
    """Spread sums (k, d_c) between bounds (k + 1,) over finer groups, (b, d_c)."""
    cumulative = np.concatenate([np.zeros((1, sums.shape[1])), np.cumsum(sums, axis=0)])
    interpolated = [np.interp(groups, bounds, column) for column in cumulative.T]
    spread: FloatArray = np.diff(np.stack(interpolated, axis=1), axis=0)
    return spread
