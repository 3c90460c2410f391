"""From the sites' labels to numbers, classes and a loss."""

import numpy as np
import pytest

from strategies.setup.labels import Labels, choose_loss, read_labels
from tp_flower.errors import QueryError
from tp_flower.extraction.extracted import LabelColumn
from tp_flower.losses import (
    MAX_CLASSES,
    LogisticLoss,
    SoftmaxLoss,
    SquaredLoss,
)
from tp_flower.settings import Settings

NAN = float("nan")


def labels(*shards, task="auto"):
    """Read shards given as (kind, values) or (kind, values, categories)."""
    columns = [
        LabelColumn(kind, np.array(values, dtype=float), tuple(*rest))
        for kind, values, *rest in shards
    ]
    return read_labels(columns, task)


@pytest.mark.parametrize(
    ("shards", "task", "values", "classes"),
    [
        ([("number", [3, 1]), ("number", [2.5])], "auto", [3.0, 1.0, 2.5], ""),
        ([("boolean", [0, 1, 1])], "auto", [0.0, 1.0, 1.0], "0 1"),
        ([("boolean", [0, 1])], "regression", [0.0, 1.0], ""),
        ([("number", [7, -2]), ("number", [7])], "classification", [1, 0, 1], "-2 7"),
        # texts of all shards are numbered in common
        ([("text", [0, 1], "bd"), ("text", [1], "ab")], "auto", [1, 2, 1], "a b d"),
    ],
)
def test_labels_are_numbers_or_classes(shards, task, values, classes):
    column = labels(*shards, task=task)
    assert column.values.tolist() == values
    assert column.classes == tuple(classes.split())


NULLS = [
    ([(kind, [0, NAN, NAN], ["a"]), (kind, [NAN], [])], task, "NULL in 3 rows: add a f")
    for kind in ("number", "text")
    for task in ("auto", "regression", "classification")
]
MANY = MAX_CLASSES + 1
TOO_MANY = f"has {MANY} distinct values; classification takes at most {MAX_CLASSES}"


@pytest.mark.parametrize(
    ("shards", "task", "match"),
    [
        *NULLS,
        ([("number", [1.0]), ("text", [NAN], [])], "auto", "label is NULL in 1 rows"),
        ([("number", [1]), ("text", [0], "a")], "auto", r"s: \['number', 'text'\]"),
        ([("text", [0], "a")], "regression", "text, but the task is regression: CAST"),
        ([("number", [1.0, -1e300])], "auto", r"1e\+300, beyond 1e\+18: divide it"),
        ([("number", range(MANY))], "classification", TOO_MANY),
        ([("text", range(MANY), map(str, range(MANY)))], "auto", TOO_MANY),
    ],
)
def test_labels_that_cannot_be_learned_are_refused(shards, task, match):
    with pytest.raises(QueryError, match=match):
        labels(*shards, task=task)


def loss(classes, joined, **settings):
    label = Labels(np.arange(float(len(classes))), tuple(classes))
    return choose_loss(label, np.array(joined, dtype=float), Settings(**settings))


@pytest.mark.parametrize(
    ("classes", "joined", "wanted", "kind"),
    [
        ((), [1.5, 2.5], "auto", SquaredLoss),
        ((), [1.5, 2.5], "squared", SquaredLoss),
        (("a", "b"), [0, 1], "auto", LogisticLoss),
        (("a", "b"), [0, 1], "logistic", LogisticLoss),
        (("a", "b"), [0, 1], "softmax", SoftmaxLoss),
        (("a", "b", "c"), [0, 2], "auto", SoftmaxLoss),
    ],
)
def test_choice(classes, joined, wanted, kind):
    chosen = loss(classes, joined, loss=wanted)
    assert isinstance(chosen, kind)
    assert chosen.outputs == (len(classes) if kind is SoftmaxLoss else 1)


@pytest.mark.parametrize(
    ("classes", "joined", "wanted", "match"),
    [
        ((), [2.5, 2.5], "auto", r"constant in the 2 joined .* \(one value: 2.5\)"),
        (("a", "b"), [1, 1, 1], "auto", r"in the 3 joined .* \(one class: b\)"),
        (
            (),
            [1, 2],
            "logistic",
            "'logistic' does not fit a label of numbers: use s",
        ),
        ((), [1, 2], "softmax", "'softmax' does not fit a label of numbers: use s"),
        (("a", "b"), [0, 1], "squared", "with 2 classes: use logistic, softmax"),
        (("a", "b", "c"), [0, 1], "logistic", r"'logistic' .* 3 classes: use softmax$"),
        ((), [], "auto", r"all joined rows are held out .* test-fraction \(0.2\)"),
    ],
)
def test_refusals(classes, joined, wanted, match):
    with pytest.raises(QueryError, match=match):
        loss(classes, joined, loss=wanted)
