"""Conjugate gradients over joins and unions, against those on the materialised join."""

import functools

import numpy as np
import pytest

from client_apps.operator import participant
from strategies.setup import problem
from tests.support.examples.store_runs import (
    FRAMES,
    after,
    assert_optimal,
    each_layout,
    each_loss,
    reference_of,
)
from tests.support.examples.store_runs import trained as on_store
from tests.support.federated import one_per_site, run_query, whole
from tests.support.reference.families import Family
from tests.support.reference.training import conjugate_gradients
from tp_flower.learning import solvers
from tp_flower.methods.cg.messages import DescentStep, DescentUpdate, DirectionUpdate
from tp_flower.privacy.sealed_sums import read_words
from tp_flower.protocol.fields import layout_of
from tp_flower.settings import PrivacySettings

CLEAR = PrivacySettings(scores="clear", unions="clear")
trained = functools.partial(on_store, strategy="cg", num_epochs=6, tolerance=1e-9)


def slow_iterates(problem):
    """The parameters after up to 5 epochs with dense matrices."""
    classes = {"squared": 0, "logistic": 2, "softmax": 3}[problem.loss]
    curvature = Family(problem.loss, classes).on([]).curvature(problem.base)
    return conjugate_gradients(problem, 5, float(curvature))


def check_iterates(finished, most):
    expected = slow_iterates(reference_of(finished))
    for epoch in range(6):
        # a step comes with the next message
        assert np.abs(after(finished, epoch + 1) - expected[epoch]).max() <= most


@pytest.mark.cases(
    "privacy0-5e-07-whole-squared",
    "privacy0-5e-07-sharded-logistic",
    "privacy0-5e-07-whole-softmax",
    "privacy1-2e-06-sharded-squared",
    "privacy1-2e-06-whole-logistic",
    "privacy1-2e-06-sharded-softmax",
)
@each_loss
@each_layout
@pytest.mark.parametrize(
    ("privacy", "most"), [(CLEAR, 5e-7), (PrivacySettings(), 2e-6)]
)
def test_every_iterate_is_that_on_the_materialised_join(loss, layout, privacy, most):
    # one bit more in masked scores halves what is left
    check_iterates(trained(loss, layout, privacy=privacy), most)


@pytest.mark.cases("whole-squared", "sharded-logistic", "whole-softmax")
@each_loss
@each_layout
def test_it_is_by_the_rounding_of_messages_alone_that_iterates_differ(
    loss, layout, monkeypatch
):
    for kind in (DescentStep, DescentUpdate, DirectionUpdate):
        arrays = layout_of(kind).arrays
        for name in {"step", "scores"} & arrays.keys():
            attribute, spec = arrays[name]
            monkeypatch.setitem(
                arrays, name, (attribute, spec._replace(dtype="float64"))
            )
    for module in (problem, participant):
        monkeypatch.setattr(module, "row_numbers", lambda numbers: numbers)
    # a tolerance of its own, as runs are cached
    finished = trained(loss, layout, privacy=CLEAR, tolerance=2e-9)
    check_iterates(finished, 1e-10 if loss == "squared" else 5e-7)


@pytest.mark.cases("whole-squared", "sharded-logistic", "whole-softmax")
@each_loss
@each_layout
def test_it_ends_at_the_optimum_of_the_joined_rows(loss, layout):
    assert_optimal(trained(loss, layout, num_epochs=60), 1e-8, gradient=1e-6)


def test_one_table_in_one_shard_is_solved_in_one_step():
    sql = "SELECT qty AS label, day, online FROM orders"
    finished = run_query(
        sql, [{"orders": FRAMES["orders"]}], "cg", l2=0.3, num_epochs=2, privacy=CLEAR
    )
    assert finished.losses[1] == pytest.approx(finished.losses[0], rel=1e-9)
    assert finished.strategy.history[-2].residuals["gradient"] < 1e-5


def test_a_table_of_few_rows_is_factorised_by_them(monkeypatch):
    sql = "SELECT o.qty AS label, o.day, i.item, i.price FROM orders o JOIN items i ON "
    how = {"l2": 0.1, "num_epochs": 5, "encoders": "i.item=hash(32)"}
    sites = one_per_site(whole({name: FRAMES[name] for name in ("orders", "items")}))

    def train():
        return run_query(f"{sql} o.item = i.item", sites, "cg", privacy=CLEAR, **how)

    by_rows = train()
    assert by_rows.chosen["solver"] == {"o": "columns", "i": "rows"}
    monkeypatch.setattr(solvers, "factorisation", lambda *_, **__: "columns")
    np.testing.assert_allclose(by_rows.flat, train().flat, atol=1e-6)


def test_products_are_read_of_all_tables_together_alone():
    by_round: dict[int, list[np.ndarray]] = {}
    for reply in trained("squared").seen:
        words = [a for (_, name), a in reply.arrays.items() if name == "products"]
        by_round.setdefault(reply.round, []).extend(words)
    rounds = [words for words in by_round.values() if words]
    assert [len(words) for words in rounds] == [3] * 6
    for words in rounds:
        # in units of their size
        alone = read_words(np.stack(words).view(np.int64))
        together = read_words(np.sum(words, axis=0).view(np.int64))
        assert np.abs(alone).min() > 1000.0 > np.abs(together).max()
