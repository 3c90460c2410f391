"""The settings of a search: which candidates there are, and which are refused."""

import re

import pytest

from tp_flower.settings import Settings
from tp_flower.settings.declare import UnusableSettingsError
from tp_flower.settings.search import (
    candidates_of,
    fits_of,
    render_candidates,
    searched_fields,
    with_candidate,
)

L2 = '[{"l2": 0.1}, {"l2": 1.0}]'
BOOST = '[{"strategy": "boost"}]'
GROUPS = {"folds": 2, "test-split": "group(c.region)"}
REFUSED = [
    # the config, why it is refused, and what the message says to write
    ({"candidates": L2}, "they are tried on folds of the rows: set fold", {"folds": 2}),
    ({"folds": 1}, "folds: 1 is not 0, or from 2 to 20", {"folds": 2}),
    (
        {"folds": 2, "candidates": '[{"sql": "SELECT 1"}]'},
        "candidates: sql is not a setting that a search tries: it tries batch-size",
        {"candidates": L2},
    ),
    (
        {"folds": 2, "candidates": '[{"l2": -1.0}]'},
        'candidates: {"l2": -1.0}: l2: -1.0 is out of range',
        {"candidates": L2},
    ),
    (
        {"folds": 2, "candidates": "l2=0.1"},
        "candidates: 'l2=0.1' is not a JSON list",
        {"candidates": L2},
    ),
    (
        {"folds": 2, "candidates": '[{"l2": 0.1}, {"l2": 0.1}]'},
        "two candidates are the same",
        {"candidates": L2},
    ),
    (
        {"folds": 2, "candidates": '[{"l2": [0.1]}]'},
        "has no settings with plain values",
        {"candidates": L2},
    ),
    (
        {"folds": 2, "candidates": '[{"strategy": "moments"}]'},
        "strategy 'moments' does not train on folds of joined rows",
        {"candidates": BOOST},
    ),
    (
        {**GROUPS, "candidates": BOOST},
        "share of the groups than others, which the groups' site decides once: set",
        {"validation-fraction": 0.1},
    ),
    (
        {"folds": 2, "strategy": "sgd", "privacy.features": "dp-sgd"},
        "a search does not go with privacy.features, whose epsilon is of one training",
        {"privacy.features": "clear"},
    ),
    (
        {"folds": 2, "strategy": "admm", "coreset-size": 10},
        "a search trains on all rows of a fold: leave coreset-size 0",
        {"coreset-size": 0},
    ),
    (
        {"folds": 2, "strategy": "boost", "boost-from": "first"},
        "a search does not start from a saved model: leave it out",
        {"boost-from": ""},
    ),
    (
        {"folds": 2, "bins": 8, "validation-fraction": 0.1},
        "bin numbers of rows leave once, not for each fit: leave bins out",
        {"bins": "none"},
    ),
]


@pytest.mark.parametrize(("config", "reason", "mended"), REFUSED)
def test_what_cannot_be_searched_is_refused_and_its_advice_helps(
    config, reason, mended
):
    with pytest.raises(UnusableSettingsError, match=re.escape(reason)):
        Settings.from_run_config(config)
    assert Settings.from_run_config({**config, **mended}).folds


def test_a_candidate_replaces_settings_and_is_no_search_of_its_own():
    settings = Settings(folds=3, l2=0.5, candidates='[{"num_epochs": 4}, {"l2": 2.0}]')
    first, second = (with_candidate(settings, each) for each in candidates_of(settings))
    assert (first.num_epochs, first.l2, first.candidates) == (4, 0.5, ())
    assert (second.num_epochs, second.l2, second.folds) == (0, 2.0, 3)
    assert len(fits_of(settings)) == 3 * 2 + 1
    assert len(fits_of(first)) == 3 + 1


def test_candidates_are_read_back_from_their_text():
    settings = Settings(folds=2, candidates=[{"l2": 1e-3}, {"strategy": "boost"}])
    text = render_candidates(settings.candidates)
    assert text == '[{"l2": 0.001}, {"strategy": "boost"}]'
    assert Settings.from_run_config(settings.to_dict()) == settings
    assert settings.proposed()["candidates"] == text


def test_candidates_ask_nothing_else_of_rows_labels_and_owners():
    others = {"sql", "encoders", "loss", "bins", "row_weight", "test_split", "seed"}
    assert not searched_fields() & {*others, "folds", "candidates", "sample", "task"}
    assert {"l2", "leaves", "strategy", "rho", "hidden_sizes"} <= searched_fields()
