"""Whether the shards of a table tell the labels: against sums by pandas, and chance."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from numpy.random import default_rng

from strategies.setup.shard_labels import CHANCE, LARGEST_SHARE, shards_that_tell_labels
from tp_flower.joins.mapping import TableRows
from tp_flower.objectives import Target


def joined(labels, shards, *, classes=0, rows=None, table="t"):
    """Joined rows of a label table "t", in one or several shards, or of another table.

    ``shards`` is the shard of each row of the table; ``rows`` the row behind each
    joined row.
    """
    sizes = np.bincount(shards)
    # rows are numbered shard after shard
    number = np.empty(len(shards), np.int64)
    number[np.argsort(shards, kind="stable")] = np.arange(len(shards))
    row_of = number if rows is None else np.where(np.array(rows) < 0, -1, number[rows])
    layout = SimpleNamespace(
        name=table,
        parts=[SimpleNamespace(site=f"S{n}") for n in range(len(sizes))],
        rows=[SimpleNamespace(trained=size, total=size) for size in sizes],
    )
    tables = {"t": TableRows(np.arange(len(labels)), len(labels))}
    tables[table] = TableRows(row_of, len(shards))
    target = Target.of(labels, ("a", "b", "c")[:classes])
    return SimpleNamespace(
        target=target,
        train_objective=SimpleNamespace(target=target),
        bound=SimpleNamespace(label_table="t"),
        layouts={table: layout},
        train=SimpleNamespace(tables=tables),
    )


def found_in(labels, shards, **how):
    """The tables whose shards tell the labels of joined rows."""
    return list(shards_that_tell_labels(joined(labels, shards, **how)))


def test_the_share_is_that_of_the_variance_between_the_shards():
    rng = default_rng(0)
    shards = rng.integers(0, 3, 900)
    labels = shards + rng.normal(size=900)
    (found,) = found_in(labels, shards)
    frame = pd.DataFrame({"label": labels, "mean": labels}).assign(shard=shards)
    means = frame.groupby("shard")["mean"].transform("mean")
    assert found.share == pytest.approx(means.var(ddof=0) / frame["label"].var(ddof=0))
    assert found.table == "t"
    assert not found.sites
    assert found.text.endswith("of the label's variance is between the shards of t")


def test_of_classes_it_is_that_of_their_indicators():
    rng = default_rng(1)
    shards = rng.integers(0, 2, 600)
    labels = np.where(rng.random(600) < 0.6, shards, rng.integers(0, 3, 600))
    (found,) = found_in(labels, shards, classes=3)
    indicators = pd.get_dummies(labels).astype(float)
    means = indicators.groupby(shards).transform("mean")
    expected = means.var(ddof=0).sum() / indicators.var(ddof=0).sum()
    assert found.share == pytest.approx(expected)


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_shards_that_do_not_differ_are_not_found(classes):
    rng = default_rng(2)
    for _ in range(200):
        shards = rng.integers(0, 4, int(rng.integers(8, 200)))
        if classes:
            labels = rng.integers(0, classes, len(shards))
        else:
            labels = rng.normal(size=len(shards))
        assert not found_in(labels, shards, classes=classes)


def test_by_chance_the_share_is_as_large_as_its_distribution_says():
    """The bound of LARGEST_SHARE alone: of 200 rows in 2 shards, in 0.16 % of the
    draws.
    """
    from scipy.stats import chi2

    rng = default_rng(3)
    draws = 4000
    rows = 200
    shards = np.arange(rows) % 2
    labels = rng.normal(size=(draws, rows))
    labels -= labels.mean(axis=1, keepdims=True)
    share = (labels[:, ::2].sum(axis=1) ** 2 * 2 / 100) / (labels**2).sum(axis=1)
    assert np.mean(share >= 0.02) == pytest.approx(chi2.sf(199 * 0.02, 1), abs=0.01)
    assert chi2.sf(199 * LARGEST_SHARE, 1) > CHANCE
    # so a share that is large enough is not believed of so few rows
    unlike = np.where(shards, 0.24, -0.24) + default_rng(4).normal(size=rows)
    assert not found_in(unlike, shards)


def test_a_small_shard_of_one_class_is_found_if_chance_does_not_explain_it():
    rng = default_rng(5)
    labels = rng.integers(0, 2, 2000)
    for rows, is_found in ((10, False), (40, True)):
        shards = np.zeros(2000, int)
        few = labels.copy()
        few[:rows], shards[:rows] = 1, 1
        found = found_in(few, shards, classes=2)
        assert bool(found) == is_found
    assert found[0].sites == ("S1",)
    assert found[0].share < LARGEST_SHARE
    assert found[0].text.endswith("(S1: one label only)")


def test_rows_that_are_joined_often_are_not_many_rows():
    """A dimension of 6 rows in two shards, each in 100 joined rows: 6 rows say
    little.
    """
    rng = default_rng(6)
    rows = np.repeat(np.arange(6), 100)
    shards = np.array([0, 0, 0, 1, 1, 1])
    labels = np.where(rows < 3, 0.5, -0.5) + rng.normal(size=600)
    assert not found_in(labels, shards, rows=rows, table="d")
    # and of a table that is joined row by row all do, some of them without a match
    rows = np.where(np.arange(600) % 10 == 0, -1, np.arange(600))
    shards = (labels + rng.normal(size=600) > 0).astype(int)
    (found,) = found_in(labels, shards, rows=rows, table="d")
    is_matched = rows >= 0
    means = pd.Series(labels[is_matched]).groupby(shards[is_matched]).transform("mean")
    assert found.share == pytest.approx(means.var(ddof=0) / labels[is_matched].var())


def test_a_query_without_a_label_has_none_to_tell():
    empty = joined(np.zeros(9), np.arange(9) % 3)
    empty.values = np.zeros((9, 0))
    assert not list(shards_that_tell_labels(empty))
