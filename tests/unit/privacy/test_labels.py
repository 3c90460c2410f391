"""From the sites' labels to numbers, classes and a loss."""

import numpy as np
import pytest

from strategies.setup.labels import Labels, choose_loss, read_labels
from tp_flower.errors import QueryError
from tp_flower.extraction.extracted import LabelColumn
from tp_flower.learning.losses import (
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


def test_numbers_are_regression():
    found = labels(("number", [3, 1]), ("number", [2.5]))
    assert found.values.tolist() == [3.0, 1.0, 2.5]
    assert found.classes == ()


def test_booleans_are_classes():
    found = labels(("boolean", [0, 1, 1]))
    assert (found.values.tolist(), found.classes) == ([0.0, 1.0, 1.0], ("0", "1"))


def test_booleans_can_be_regressed():
    assert labels(("boolean", [0, 1]), task="regression").classes == ()


def test_numbers_can_be_classes():
    found = labels(("number", [7, -2]), ("number", [7, 0.5]), task="classification")
    assert found.values.tolist() == [2.0, 0.0, 2.0, 1.0]
    assert found.classes == ("-2", "0.5", "7")


def test_texts_of_all_shards_are_numbered_in_common():
    found = labels(("text", [0, 1], ["b", "d"]), ("text", [1, 0], ["a", "b"]))
    assert found.classes == ("a", "b", "d")
    assert found.values.tolist() == [1.0, 2.0, 1.0, 0.0]


@pytest.mark.parametrize("task", ["auto", "regression", "classification"])
@pytest.mark.parametrize("kind", ["number", "text"])
def test_null_labels(task, kind):
    shards = (kind, [0, NAN, NAN], ["a"]), (kind, [NAN], [])
    with pytest.raises(QueryError, match=r"label is NULL in 3 rows: add a filter"):
        labels(*shards, task=task)


def test_shard_with_null_labels_only_is_told_as_such():
    with pytest.raises(QueryError, match="label is NULL in 1 rows"):
        labels(("number", [1.0]), ("text", [NAN], []))


def test_shards_that_differ_in_kind():
    with pytest.raises(QueryError, match=r"between the shards: \['number', 'text'\]"):
        labels(("number", [1.0]), ("text", [0], ["a"]))


def test_text_in_regression():
    with pytest.raises(
        QueryError, match="is text, but the task is regression: CAST it"
    ):
        labels(("text", [0], ["a"]), task="regression")


def test_label_beyond_float32():
    match = r"the label reaches 1e\+300, beyond 1e\+18: divide it in the query"
    with pytest.raises(QueryError, match=match):
        labels(("number", [1.0, -1e300]))


def test_too_many_classes():
    many = MAX_CLASSES + 1
    match = f"has {many} distinct values; classification takes at most {MAX_CLASSES}"
    with pytest.raises(QueryError, match=match):
        labels(("number", range(many)), task="classification")
    names = [f"n{k}" for k in range(many)]
    with pytest.raises(QueryError, match=match):
        labels(("text", range(many), names))


def loss(classes, joined, **settings):
    own = Labels(np.arange(float(len(classes))), tuple(classes))
    return choose_loss(own, np.array(joined, dtype=float), Settings(**settings))


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
        ((), [1, 2], "logistic", "'logistic' needs a classification task"),
        ((), [1, 2], "softmax", "'softmax' needs a classification task"),
        (("a", "b"), [0, 1], "squared", "'squared' needs a regression task"),
        (("a", "b", "c"), [0, 1], "logistic", "needs two classes, the label has 3"),
        ((), [], "auto", r"all joined rows are held out .* test-fraction \(0.2\)"),
    ],
)
def test_refusals(classes, joined, wanted, match):
    with pytest.raises(QueryError, match=match):
        loss(classes, joined, loss=wanted)
