"""From the sites' labels to numbers, classes and a loss."""

import numpy as np
import pytest

from strategies.setup.labels import choose_objective, read_labels
from tests.support.files import case_table
from tp_flower.errors import QueryError
from tp_flower.extraction.extracted import LabelColumn
from tp_flower.objectives import MAX_CLASSES, Target
from tp_flower.settings import Settings

CASES = case_table(__file__)
NAN = float("nan")


def labels(*shards, task="auto"):
    """Read shards given as (kind, values) or (kind, values, categories)."""
    columns = [
        LabelColumn(kind, np.array(values, dtype=float), tuple(*rest))
        for kind, values, *rest in shards
    ]
    return read_labels(columns, Settings(task=task), "t.y")


@CASES.each("values", "shards", "task", "values", "classes")
def test_labels_are_numbers_or_classes(shards, task, values, classes):
    column = labels(*shards, task=task)
    assert column.numbers.tolist() == values
    assert column.classes == tuple(classes.split())


TASKS = ("auto", "regression", "classification")
NULLS = [
    (
        [(kind, [0, NAN, NAN], ["a"]), (kind, [NAN], [])],
        task,
        "NULL in 3 rows: the others have one",
    )
    for kind in ("number", "text")
    for task in TASKS
]
HALVES = [k + 0.5 for k in range(51)]
MANY = MAX_CLASSES + 1
TOO_MANY = f"has {MANY} distinct values; classification takes at most {MAX_CLASSES}"


@pytest.mark.parametrize(
    ("shards", "task", "match"),
    [
        *NULLS,
        ([("number", [1.0]), ("text", [NAN], [])], "auto", "label is NULL in 1 rows"),
        ([("number", [1]), ("text", [0], "a")], "auto", r"s: \['number', 'text'\]"),
        ([("text", [0], "a")], "regression", "text, but the task is regression: CAST"),
        (
            [("number", [1.0, 2.0, -1e300])],
            "auto",
            r"1e\+300, beyond 1e\+18: divide it",
        ),
        ([("number", range(MANY))], "classification", TOO_MANY),
        *(([("time", [1.0, 9.0])], task, "date or time: .* EPOCH") for task in TASKS),
        (
            [("number", HALVES)],
            "classification",
            "has 51 classes that are numbers with frac",
        ),
        (
            [("text", range(51), [f"{x:g}".replace(".", ",") for x in HALVES])],
            "auto",
            "51 clas",
        ),
        ([("text", range(MANY), map(str, range(MANY)))], "auto", TOO_MANY),
    ],
)
def test_labels_that_cannot_be_learned_are_refused(shards, task, match):
    with pytest.raises(QueryError, match=match):
        labels(*shards, task=task)


@pytest.mark.parametrize("values", [HALVES[1:], range(900)])
def test_some_fractions_and_many_whole_numbers_are_classes(values):
    column = labels(("number", values), task="classification")
    assert [float(name) for name in column.classes] == list(values)


def objective(classes, joined, **settings):
    target = Target.of(np.array([*joined, 0.0]), tuple(classes))
    is_trained = np.arange(len(target)) < len(joined)
    return choose_objective(target, is_trained, Settings(**settings))


@pytest.mark.parametrize(
    ("classes", "joined", "wanted", "kind"),
    [
        ((), [1.5, 2.5], "auto", "squared"),
        ((), [1.5, 2.5], "squared", "squared"),
        (("a", "b"), [0, 1], "auto", "logistic"),
        (("a", "b"), [0, 1], "logistic", "logistic"),
        (("a", "b"), [0, 1], "softmax", "softmax"),
        (("a", "b", "c"), [0, 2], "auto", "softmax"),
    ],
)
def test_choice(classes, joined, wanted, kind):
    chosen = objective(classes, joined, loss=wanted)
    assert chosen.name == kind
    assert chosen.outputs == (len(classes) if kind == "softmax" else 1)


@CASES.each("losses", "classes", "joined", "wanted", "match")
def test_refusals(classes, joined, wanted, match):
    with pytest.raises(QueryError, match=match):
        objective(classes, joined, loss=wanted)
