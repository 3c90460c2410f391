"""Runs with private statistics: equal without noise, noisy, and paid for."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from tests.support.federated import (
    LABELS,
    Run,
    Seen,
    one_per_site,
    run,
    sharded,
    store,
    whole,
)
from tp_flower.learning.models.local_model import moment
from tp_flower.learning.solvers import gram
from tp_flower.privacy.accounting import epsilon
from tp_flower.privacy.mechanisms import Gaussian
from tp_flower.settings import PrivacySettings

LAYOUTS = {"whole": whole, "sharded": sharded}
EPOCHS, DELTA = 4, 1e-5
NO_BOUND, NO_NOISE = 10.0, 1e-8
UNBOUNDED = PrivacySettings(
    features="statistics",
    clip=NO_BOUND,
    target_clip=NO_BOUND,
    noise_multiplier=NO_NOISE,
)
PRIVATE = PrivacySettings(features="statistics", epsilon=1.0, delta=DELTA)
# scores with noise move the targets further than any label does
COVERED = replace(UNBOUNDED, target_clip=100.0, predictions=2.0)

each_layout = pytest.mark.parametrize("layout", list(LAYOUTS))


@functools.cache
def trained(loss: str, layout: str, **settings) -> Run:
    """A run of plain ADMM: where there is noise, nothing is mixed or balanced."""
    sites = one_per_site(LAYOUTS[layout](store()))
    plain = {"anderson_memory": 0, "over_relaxation": 1.0, "rho": 0.3, "l2": 0.01}
    return run(loss, sites, num_epochs=EPOCHS, **plain, **settings)


def replies(finished: Run, name: str) -> dict[tuple[int, int], np.ndarray]:
    """The arrays of a name that sites have sent, by (round, part)."""
    return {
        (seen.round, number): array
        for seen in finished.seen
        if seen.is_reply
        for (number, own), array in seen.arrays.items()
        if own == name
    }


def parts_of(finished: Run) -> dict[int, tuple]:
    """By part: the encoded rows, how many of them are trained on, G, intercept."""
    federation = finished.strategy.training_problem
    found = {}
    for name, table in federation.tables.items():
        counts = federation.train.tables[name].multiplicity
        for part, rows in zip(table.parts, table.rows, strict=True):
            own = finished.features[name][rows.slice][: rows.trained]
            trained_on = counts[rows.trained_slice]
            found[part.number] = (own, trained_on, table.has_intercept)
    return found


@pytest.mark.parametrize("loss", list(LABELS))
@each_layout
def test_without_bounds_and_noise_training_is_that_without_privacy(loss, layout):
    clear = trained(loss, layout)
    found = trained(loss, layout, privacy=UNBOUNDED)
    # targets travel as float32, and each epoch starts from the other's result
    for one, other in zip(found.parameters, clear.parameters, strict=True):
        for alias, theta in other.items():
            np.testing.assert_allclose(one[alias], theta, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.losses, clear.losses, rtol=1e-6)


@each_layout
def test_no_statistic_leaves_as_it_is(layout):
    private = trained("logistic", layout, privacy=PRIVATE)
    parts, told = parts_of(private), replies(private, "gram")
    is_sharded = layout == "sharded"
    assert len(told) == (7 if is_sharded else 0)
    for (_, number), matrix in told.items():
        features, counts, intercept = parts[number]
        exact = gram(features, counts, intercept=intercept)
        assert (matrix != exact).all()
        np.testing.assert_array_equal(matrix, matrix.T)
    assert len(replies(private, "moments")) == (7 * EPOCHS if is_sharded else 0)
    assert len(replies(private, "gradient")) == 0
    assert len(replies(private, "proposal")) == 0


def test_noise_is_drawn_anew_by_every_shard_and_run():
    """One more run has other noise: what differs is of the planned size."""
    sites = one_per_site(sharded(store()))
    other = run("logistic", sites, num_epochs=EPOCHS, privacy=PRIVATE)
    one = replies(trained("logistic", "sharded", privacy=PRIVATE), "gram")
    for place, matrix in replies(other, "gram").items():
        assert (one[place] != matrix).all()


def test_moments_are_of_what_the_server_told_less_the_scores_it_had():
    """With noisy scores the residual is of those sent, else it would undo the noise."""
    finished = trained("squared", "sharded", privacy=COVERED)
    parts = parts_of(finished)
    kappas = sent_kappas(finished.seen)
    scores = replies(finished, "scores")
    targets = {
        (seen.round, number): array
        for seen in finished.seen
        for (number, own), array in seen.arrays.items()
        if own == "target"
    }
    checked = 0
    for (turn, number), sums in replies(finished, "moments").items():
        features, counts, intercept = parts[number]
        target = targets[turn, number]
        before = [own for own in scores if own[1] == number and own[0] < turn]
        had = scores[max(before)][: len(counts)] if before else np.zeros_like(target)
        residual = kappas[turn] * (target.astype(np.float64) - had)
        expected = moment(features, counts[:, None] * residual, intercept=intercept)
        scale = np.abs(expected).max()
        np.testing.assert_allclose(sums, expected, rtol=1e-4, atol=1e-4 * scale)
        checked += bool(before)
    assert checked == 7 * (EPOCHS - 1)


def sent_kappas(seen: list[Seen]) -> dict[int, float]:
    """kappa of every round of targets."""
    return {
        each.round: each.header["fit"]["kappa"]
        for each in seen
        if each.action == "train.admm" and not each.is_reply
    }


@each_layout
def test_each_site_has_paid_what_was_asked_for(layout):
    finished = trained("logistic", layout, privacy=PRIVATE)
    accounts = [
        seen.header["ledger"]
        for seen in finished.seen
        if seen.action == "query.finish" and seen.is_reply
    ]
    assert len(accounts) == (7 if layout == "sharded" else 3)
    for account in accounts:
        used = {
            line["release"]["what"]: Gaussian(
                line["release"]["mechanism"]["noise_multiplier"],
                line["used"],
            )
            for line in account
            if line["release"]["mechanism"]
        }
        assert {what: own.count for what, own in used.items()} == {
            "gram": 1,
            "moments": EPOCHS,
        }
        spent = epsilon(list(used.values()), DELTA)
        assert spent == pytest.approx(1.0, rel=1e-3)
        assert spent <= 1.0


def test_a_private_run_is_not_the_clear_one():
    clear, private = (
        trained("logistic", "whole", **settings)
        for settings in ({}, {"privacy": PRIVATE})
    )
    assert np.abs(clear.flat - private.flat).max() > 1e-2
