"""Labels of classes are kept in a byte each, and read as numbers."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tp_flower.objectives import Target, make_objective

TWO = ("no", "yes")


@pytest.mark.parametrize(
    ("values", "classes", "size"),
    [
        ([0.0, 1.0, 1.0], TWO, 1),
        ([0.0, 255.0], tuple(map(str, range(256))), 1),
        ([0.0, 256.0], tuple(map(str, range(257))), 8),
        # the label of a row without a class, a soft label, and a number
        ([0.0, np.nan], TWO, 8),
        ([0.25, 1.0], TWO, 8),
        ([-1.0, 1.0], TWO, 8),
        ([0.0, 1.0], (), 8),
    ],
)
def test_indices_of_classes_take_a_byte(values, classes, size):
    target = Target.of(np.array(values), classes)
    assert target.stored.itemsize == size
    for read in (target.columns[:, 0], target.numbers, target.column_named("label")):
        assert read.dtype == np.float64
        assert_array_equal(read, values)
    some = target.select(np.array([1]))
    assert some.stored.itemsize == size
    assert_array_equal(some.numbers, values[1:2])


@pytest.mark.parametrize("loss", ["logistic", "softmax"])
def test_losses_read_numbers_of_compact_labels(loss):
    """Unsigned bytes would wrap around below 0."""
    classes = TWO if loss == "logistic" else ("a", "b", "c")
    codes = np.arange(6.0) % len(classes)
    compact = make_objective(loss, Target.of(codes, classes))
    plain = make_objective(loss, Target(codes[:, None], classes))
    scores = np.random.default_rng(0).normal(size=(6, compact.outputs))
    assert compact.target.stored.dtype != plain.target.stored.dtype
    for method in ("row_values", "gradient", "hessian"):
        results = [getattr(each, method)(scores) for each in (compact, plain)]
        assert_array_equal(*results)
    assert_array_equal(compact.base_scores(), plain.base_scores())
    assert compact.metrics(scores) == plain.metrics(scores)
    blocks = [each.on(each.vectors).prox(scores, 0.3) for each in (compact, plain)]
    assert_array_equal(*blocks)
