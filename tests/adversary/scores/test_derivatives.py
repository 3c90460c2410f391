"""What the derivatives of each strategy tell a site of the scores of its rows' joined
rows.
"""

import numpy as np
import pytest
from scipy.special import expit, logit

from strategies.setup.problem import TrainingProblem
from tests.support import federated
from tests.support.federated import one_per_site, store, whole

ORDERS = 2  # the node of the orders, which are in up to three joined rows each


def run(strategy, monkeypatch, loss="logistic"):
    """Train; return what the orders' site is sent by epoch, joined rows' scores, and
    the run.
    """
    scores = []
    metrics = TrainingProblem.train_metrics

    def noted(problem, *total):
        scores.append(problem.rows.whole("scores")[:, 0].copy())
        return metrics(problem, *total)

    monkeypatch.setattr(TrainingProblem, "train_metrics", noted)
    sites = one_per_site(whole(store(300, 60)))
    finished = federated.run(
        loss, sites, strategy, num_epochs=4, test_fraction=0.0, validation_fraction=0.0
    )
    sent = [
        {name: array[:, 0].astype(float) for (_, name), array in seen.arrays.items()}
        for seen in finished.seen
        if seen.action in ("train.descent", "train.boost", "train.admm")
        and (seen.node, seen.is_reply) == (ORDERS, False)
    ]
    return sent, scores[: len(sent) - 1], finished.strategy


def base_of(strategy):
    return strategy.training_problem.base_score[0]


def of_rows(strategy, scores, times):
    """The scores of the joined rows of the rows that are in so many, (rows, times),
    sorted.
    """
    rows = strategy.training_problem.train.tables["o"]
    chosen = np.flatnonzero(rows.multiplicity == times)
    order = np.argsort(rows.row_of, kind="stable")
    ends = np.searchsorted(rows.row_of[order], chosen)
    return chosen, np.sort(scores[order[ends[:, None] + np.arange(times)]], axis=1)


@pytest.mark.parametrize("strategy", ["cg", "boost"])
def test_a_row_that_is_joined_once_tells_the_score_of_its_joined_row(
    strategy, monkeypatch
):
    sent, scores, trained = run(strategy, monkeypatch)
    name, sign = ("step", -1.0) if strategy == "cg" else ("gradient", 1.0)
    for arrays, joined in zip(sent[1:], scores, strict=True):
        chosen, true = of_rows(trained, joined, 1)
        assert len(chosen) > 50
        moved = sign * (arrays[name] - sent[0][name])[chosen]
        np.testing.assert_allclose(
            logit(expit(base_of(trained)) + moved), true[:, 0], atol=1e-3
        )


def test_second_derivatives_tell_the_scores_of_rows_that_are_joined_twice(monkeypatch):
    """Two sums, of p and of p (1 - p), are two equations for two probabilities."""
    sent, scores, trained = run("boost", monkeypatch)
    for arrays, joined in zip(sent[1:], scores, strict=True):
        chosen, true = of_rows(trained, joined, 2)
        assert len(chosen) > 50
        total = (
            2.0 * expit(base_of(trained))
            + (arrays["gradient"] - sent[0]["gradient"])[chosen]
        )
        squares = total - arrays["hessian"][chosen]
        half = np.sqrt(np.maximum(2.0 * squares - total**2, 0.0)) / 2.0
        read = logit(total[:, None] / 2.0 + np.column_stack([-half, half]))
        # the difference of two nearly equal probabilities is a root of their rounding
        np.testing.assert_allclose(read, true, atol=0.02)


def test_first_derivatives_do_not(monkeypatch):
    sent, scores, trained = run("cg", monkeypatch)
    chosen, true = of_rows(trained, scores[0], 2)
    mean = expit(base_of(trained)) - (sent[1]["step"] - sent[0]["step"])[chosen]
    np.testing.assert_allclose(mean, expit(true).mean(axis=1), atol=1e-5)
    assert np.ptp(expit(true), axis=1).mean() > 0.01


def test_steps_of_admm_tell_scores_to_who_repeats_the_server_s_update(monkeypatch):
    """With a squared loss z and the duals are linear in h, and the first step has h =
    b.
    """
    sent, scores, trained = run("admm", monkeypatch, "squared")
    rho = trained.chosen["rho"]
    relaxation = trained.chosen["over-relaxation"]
    kappa = rho * len(trained.training_problem.tables)
    chosen, _ = of_rows(trained, scores[0], 1)
    z = base = np.full(len(chosen), base_of(trained))
    # v = z - y + rho (b - z) with z = (rho b + y) / (1 + rho)
    first = -kappa * sent[0]["step"][chosen]
    label = base + first * (1.0 + rho) / (-2.0 * rho)
    z = (rho * base + label) / (1.0 + rho)
    for arrays, joined in zip(sent[1:], scores, strict=True):
        message = -kappa * arrays["step"][chosen]
        # z = (rho (a h + (1 - a) z) + duals + y) / (1 + rho), and the duals are z - y
        start = (rho * (1.0 - relaxation) + 1.0) * z / (1.0 + rho)
        slope = rho * relaxation / (1.0 + rho)
        read = (message + label - (1.0 - rho) * start) / ((1.0 - rho) * slope + rho)
        z = start + slope * read
        np.testing.assert_allclose(
            read, of_rows(trained, joined, 1)[1][:, 0], atol=1e-3
        )
