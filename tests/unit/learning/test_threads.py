"""Work in threads is the work of one, whatever the rows and the threads."""

import threading

import numpy as np
import pytest

from tp_flower.arrays import in_threads, thread_count
from tp_flower.learning import admm
from tp_flower.learning.admm import AdmmState, admm_step, residuals
from tp_flower.learning.losses import SoftmaxLoss
from tp_flower.learning.models import local_model
from tp_flower.learning.models.local_model import LinearModel, moment


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_spans_cover_the_rows_in_order(monkeypatch, rows, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    spans = in_threads(lambda span: span, rows, least_rows=1)
    assert len(spans) == max(min(threads, rows), 1)
    assert [row for span in spans for row in range(span.start, span.stop)] == list(
        range(rows)
    )


def test_few_rows_stay_in_this_thread_and_many_take_as_many_as_allowed(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    names = in_threads(lambda _: threading.current_thread(), 19, least_rows=10)
    assert names == [threading.current_thread()]
    meet = threading.Barrier(3, timeout=30)
    # passes only if three threads are inside together
    assert len(in_threads(lambda _: meet.wait(), 30, least_rows=10)) == 3

    def fail(span):
        if span.start:
            raise ValueError("not the first")

    with pytest.raises(ValueError, match="not the first"):
        in_threads(fail, 30, least_rows=10)


@pytest.mark.parametrize("text", ["", "0", "-2", "many"])
def test_what_is_no_number_of_threads_bounds_nothing(monkeypatch, text):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machine = thread_count()
    assert machine >= 1
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert thread_count() == machine


@pytest.mark.parametrize("rows", [0, 1, 5, 400])
def test_products_in_threads_are_the_products(rows, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(local_model, "LEAST_VALUES", 1)
    monkeypatch.setattr(local_model, "CACHED_VALUES", 50)
    rng = np.random.default_rng(3)
    features = rng.normal(size=(rows, 7)).astype(np.float32)
    messages = rng.normal(size=(rows, 2))
    model = LinearModel(7, 2, intercept=True)
    model.parameters = rng.normal(size=16)
    wide = np.hstack([features.astype(np.float64), np.ones((rows, 1))])
    near = {"rtol": 1e-12, "atol": 1e-11}
    scores, moments = model.scores(features), moment(features, messages, intercept=True)
    np.testing.assert_allclose(scores, wide @ model.weights, **near)
    np.testing.assert_allclose(moments, wide.T @ messages, **near)


def test_a_step_and_its_residuals_in_threads_are_those_of_one(monkeypatch):
    monkeypatch.setattr(admm, "LEAST_VALUES", 1)
    rng = np.random.default_rng(5)
    scores, before, z, duals = rng.normal(size=(4, 500, 3))
    labels = rng.integers(0, 3, 500).astype(float)
    state, actual = AdmmState(z, duals, 0.2), []
    for threads in ("1", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        stepped, message = admm_step(state, scores, labels, SoftmaxLoss(3), 1.4)
        gap = residuals(stepped, scores, before, np.zeros(3))
        actual.append((stepped.z, stepped.duals, message, gap.primal, gap.dual))
    for one, three in zip(*actual, strict=True):
        np.testing.assert_allclose(three, one, rtol=1e-12)
