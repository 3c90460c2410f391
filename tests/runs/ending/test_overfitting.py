"""A run whose held-out loss rises says so, and what to set; what it says helps."""

import functools
import re

import numpy as np
import pandas as pd
import pytest

from tests.support.federated import run_query, whole

SQL = """SELECT f.y AS label, f.q, d.c, e.c
FROM f JOIN d ON f.d = d.id JOIN e ON f.e = e.id"""


@functools.cache
def frames(noise: float) -> dict[str, pd.DataFrame]:
    """Facts of two dimensions, whose categories matter little."""
    rng = np.random.default_rng(4)
    rows = 3000
    kinds = 500
    keys = rng.integers(0, kinds, (2, rows))
    effects = 0.3 * rng.normal(size=(2, kinds))
    q = rng.normal(size=rows)
    label = q + effects[0][keys[0]] + effects[1][keys[1]]
    label += noise * rng.normal(size=rows)
    facts = pd.DataFrame({"d": keys[0], "e": keys[1], "q": q, "y": label})
    dimension = pd.DataFrame({"id": range(kinds), "c": [f"c{n}" for n in range(kinds)]})
    return {"f": facts, "d": dimension, "e": dimension}


def report_of(noise: float, strategy: str = "cg", **settings: object):
    how = {"num_epochs": 0, "task": "regression", "device": "cpu"}
    how |= {"max_categories": 500, **settings}
    return run_query(SQL, [whole(frames(noise))], strategy, **how).report


def held_out_losses(report) -> list[float]:
    return [item.test["loss"] for item in report.history if item.test]


def warnings_of(report) -> list[str]:
    return [text for text in report.warnings if "overfits" in text]


@pytest.mark.parametrize("strategy", ["cg", "admm"])
def test_a_run_that_overfits_says_so_and_its_remedies_help(strategy):
    report = report_of(2.0, strategy)
    (warning,) = warnings_of(report)
    losses = held_out_losses(report)
    best = int(np.argmin(losses)) + 1
    rise = losses[-1] / min(losses) - 1.0
    above = rf"random rows\) is {100.0 * rise:.2g} % above that"
    text = f"{above} after epoch {best} of {len(losses)};"
    assert re.search(text, warning)
    assert "l2 = 0.001 (here 0.0001) or validation-fraction = 0.1" in warning
    stronger = report_of(2.0, strategy, l2=1e-3)
    assert stronger.final_test["loss"] < report.final_test["loss"]
    patient = report_of(2.0, strategy, validation_fraction=0.1)
    assert patient.final_test["loss"] < report.final_test["loss"]
    # where rows validate, the best epoch is saved already
    assert not warnings_of(patient)


def test_a_run_that_does_not_overfit_says_nothing():
    assert not warnings_of(report_of(0.01))
    # a penalty that is too strong: the loss on held-out rows rises a little from its
    # lowest, that on training rows does not fall, and l2 = 0.01 would end higher still
    penalised = report_of(0.01, l2=1e-3)
    losses = held_out_losses(penalised)
    assert losses[-1] > 1.005 * min(losses)
    assert not warnings_of(penalised)


def test_without_a_penalty_one_is_named():
    (warning,) = warnings_of(report_of(2.0, l2=0.0))
    assert "l2 = 0.001 (here 0) or" in warning
