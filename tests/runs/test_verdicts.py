"""Training ends when it has converged, or says that it has not; defaults never
diverge.
"""

import re

import numpy as np
import pandas as pd
import pytest

from strategies.report_page.page import render
from strategies.training.trend import BACK_OFF, StepControl, trend_verdict
from tests.support.examples.reports import small_report
from tests.support.examples.store_runs import FRAMES, query
from tests.support.federated import one_per_site, run_query, train, whole
from tp_flower.errors import DivergedError
from tp_flower.reports.records import report_dict
from tp_flower.settings import PrivacySettings, Settings

SITES = one_per_site(whole(FRAMES))
EPOCHS = np.arange(1.0, 101.0)


@pytest.mark.parametrize(
    ("losses", "is_convex", "expected"),
    [
        (1.0 + 0.1**EPOCHS, True, "converged: the loss has settled$"),
        (1.0 + 0.1**EPOCHS, False, "converged: .*; as models are not linear"),
        (1.0 + 0.1 / EPOCHS, True, "nearly converged: .* num-epochs = 200 goes on"),
        (
            1.0 + 1.0 / EPOCHS**0.5,
            True,
            r"not converged: .* falling by 0.0\d+% per epoch",
        ),
        (1.0 + 0.1 / EPOCHS, False, "not converged"),
        (2.0 + np.sin(EPOCHS), True, "not converged: .* wavering|falling"),
        ([2.0, 1.0], True, "not judged after 2 epochs"),
    ],
)
def test_a_verdict_is_that_of_the_trend(losses, is_convex, expected):
    assert re.match(expected, trend_verdict([*losses], is_convex=is_convex))


def collinear():
    """Two tables that nearly agree, and a label that is in their difference."""
    draw = np.random.default_rng(3)
    rows = 300
    x = draw.normal(size=rows)
    a, b = (
        pd.DataFrame({"id": range(rows), "x": x + 1e-3 * draw.normal(size=rows)})
        for _ in "ab"
    )
    f = pd.DataFrame({"k": range(rows), "q": draw.normal(size=rows)})
    f["y"] = 300.0 * (a.x - b.x) + f.q + 0.3 * draw.normal(size=rows)
    sql = """SELECT f.y AS label, f.q, a.x, b.x
    FROM f JOIN a ON f.k = a.id JOIN b ON f.k = b.id"""
    return sql, one_per_site(whole({"f": f, "a": a, "b": b}))


def test_nearly_collinear_tables_end_at_their_optimum():
    sql, sites = collinear()
    how = {"test_fraction": 0.0, "privacy": PrivacySettings(scores="clear")}

    def objective(**settings):
        run = run_query(sql, sites, "cg", **how, **settings)
        # of q, (intercept), x and x
        penalty = 0.5e-4 * (np.delete(run.flat, 1) ** 2).sum()
        return run.losses[-1] + penalty, run.report

    ended, report = objective(num_epochs=0)
    best, _ = objective(num_epochs=60, tolerance=1e-9)
    assert report.verdict == "converged: the gradient is below the tolerance"
    assert report.epochs < 60
    assert ended < 1.003 * best


@pytest.mark.parametrize(
    ("strategy", "more"),
    [("admm", {}), ("sgd", {"batch_size": 20}), ("gd", {}), ("cg", {})],
)
def test_a_run_that_ends_early_says_so(strategy, more):
    how = {"num_epochs": 4, "l2": 0.0, "tolerance": 1e-9, **more}
    report = train(SITES, query(), strategy, **how).report
    assert "num-epochs = 8 goes on" in report.verdict
    is_warned_of = report.verdict in report.warnings
    assert report.verdict.startswith("not converged") == is_warned_of


def test_a_run_without_num_epochs_ends_where_its_loss_settles():
    report = train(SITES, query(), "admm", num_epochs=0, l2=1.0).report
    assert report.epochs < 100
    assert report.verdict == "converged: the loss has settled"
    assert not report.warnings


def test_page_and_report_have_the_verdict():
    content = report_dict(small_report())
    assert content["verdict"] == "converged: it has settled"
    assert "it has settled" in render(content)


@pytest.mark.parametrize(
    ("settings", "share", "patience"),
    [
        ({}, 0.0, 0),
        ({"model": "mlp"}, 0.1, 10),
        ({"models": "o=mlp", "strategy": "sgd"}, 0.1, 10),
        ({"strategy": "boost"}, 0.1, 2),
        ({"strategy": "boost", "boost_from": "late"}, 0.1, 2),
        ({"model": "mlp", "validation_fraction": 0.0}, 0.0, 0),
        ({"model": "mlp", "coreset_size": 50}, 0.0, 0),
        ({"model": "mlp", "privacy": PrivacySettings(predictions=1.0)}, 0.0, 0),
    ],
)
def test_models_that_overfit_have_validation_rows(settings, share, patience):
    read = Settings(**settings)
    assert (read.validation_share, read.patience_epochs) == (share, patience)


def test_trees_without_validation_rows_end_soon_and_say_so():
    report = train(
        SITES,
        query(),
        "boost",
        validation_fraction=0.0,
        num_epochs=0,
        trees_per_round=2,
        min_rows_per_leaf=1,
    ).report
    assert report.epochs == 6
    assert report.verdict.startswith(
        "not judged: no rows validate; validation-fraction = 0.1"
    )


@pytest.mark.cases("linear-5250.0", "mlp-0.0001", "mlp-1000000.0")
@pytest.mark.parametrize("scale", [1e-4, 5250.0, 1e6])
@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_chosen_rates_of_sgd_never_diverge(scale, model):
    sql = query().replace("o.qty AS label", f"o.qty * {scale} AS label")
    strategy = train(
        SITES, sql, "sgd", model=model, device="cpu", num_epochs=2, batch_size=6
    )
    assert max(strategy.losses) < 1.5 * strategy.baseline


def test_advice_after_divergence_names_what_is_not_at_its_default():
    with pytest.raises(
        DivergedError, match=r"Lower learning-rate \(here 3000.0\), or look"
    ) as caught:
        train(SITES, query(), "sgd", learning_rate=3000.0, num_epochs=9)
    assert "rho" not in str(caught.value)


def test_steps_shrink_where_the_loss_stalls_or_explodes():
    problem = train(SITES, query(), "gd", num_epochs=1).training_problem
    objective = problem.objective
    base = problem.base_score
    pace = StepControl(baseline=1.0)
    for distance in (0.0, 0.0, 1e3, 1e2):
        pace.after_batch(objective, np.full((len(objective), 1), base + distance), base)
        pace.after_epoch()
    # the second epoch stalled, the third exploded and was no lower
    assert pace.factor == 1.0 / (2.0 * BACK_OFF * 2.0)
    assert pace.peak > 1e5
