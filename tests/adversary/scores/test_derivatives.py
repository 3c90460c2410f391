"""What the derivatives of each strategy tell a site of the scores of its rows' joined rows."""

import numpy as np
import pytest
from scipy.special import expit, logit

from strategies.setup.problem import TrainingProblem
from tests.support.federated import one_per_site, run_query, store, store_sql, whole

ORDERS = 2  # the node of the orders, which are in up to three joined rows each


def run(strategy, monkeypatch):
    """Train; return the arrays that the orders' site is sent by epoch, the scores, and the rows."""
    scores, metrics = [], TrainingProblem.train_metrics

    def noted(problem, joined):
        scores.append(joined[:, 0].copy())
        return metrics(problem, joined)

    monkeypatch.setattr(TrainingProblem, "train_metrics", noted)
    sites = one_per_site(whole(store(300, 60)))
    how = {"num_epochs": 4, "test_fraction": 0.0, "validation_fraction": 0.0, "device": "cpu"}
    finished = run_query(store_sql("logistic"), sites, strategy, **how)
    sent = [
        {name: array[:, 0].astype(float) for (_, name), array in seen.arrays.items()}
        for seen in finished.seen
        if seen.action in ("train.descent", "train.boost")
        and (seen.node, seen.is_reply) == (ORDERS, False)
    ]
    problem = finished.strategy.training_problem
    return sent, scores[: len(sent) - 1], problem.base_score[0], problem.train.tables["o"]


def of_rows(rows, scores, times):
    """The scores of the joined rows of the rows that are in so many, (rows, times), sorted."""
    chosen = np.flatnonzero(rows.multiplicity == times)
    order = np.argsort(rows.row_of, kind="stable")
    ends = np.searchsorted(rows.row_of[order], chosen)
    return chosen, np.sort(scores[order[ends[:, None] + np.arange(times)]], axis=1)


@pytest.mark.parametrize("strategy", ["cg", "boost"])
def test_a_row_that_is_joined_once_tells_the_score_of_its_joined_row(strategy, monkeypatch):
    sent, scores, base, rows = run(strategy, monkeypatch)
    name, sign = ("step", -1.0) if strategy == "cg" else ("gradient", 1.0)
    for arrays, joined in zip(sent[1:], scores, strict=True):
        chosen, true = of_rows(rows, joined, 1)
        assert len(chosen) > 50
        moved = sign * (arrays[name] - sent[0][name])[chosen]
        np.testing.assert_allclose(logit(expit(base) + moved), true[:, 0], atol=1e-3)


def test_second_derivatives_tell_the_scores_of_rows_that_are_joined_twice(monkeypatch):
    """Two sums, of p and of p (1 - p), are two equations for two probabilities."""
    sent, scores, base, rows = run("boost", monkeypatch)
    for arrays, joined in zip(sent[1:], scores, strict=True):
        chosen, true = of_rows(rows, joined, 2)
        assert len(chosen) > 50
        total = 2.0 * expit(base) + (arrays["gradient"] - sent[0]["gradient"])[chosen]
        squares = total - arrays["hessian"][chosen]
        half = np.sqrt(np.maximum(2.0 * squares - total**2, 0.0)) / 2.0
        read = logit(total[:, None] / 2.0 + np.column_stack([-half, half]))
        # the difference of two nearly equal probabilities is a root of their rounding
        np.testing.assert_allclose(read, true, atol=0.02)


def test_first_derivatives_do_not(monkeypatch):
    sent, scores, base, rows = run("cg", monkeypatch)
    chosen, true = of_rows(rows, scores[0], 2)
    mean = expit(base) - (sent[1]["step"] - sent[0]["step"])[chosen]
    np.testing.assert_allclose(mean, expit(true).mean(axis=1), atol=1e-5)
    assert np.ptp(expit(true), axis=1).mean() > 0.01
