"""Candidates of grids: all combinations, or random ones; what is no grid is refused."""

import itertools
import math
import re

import numpy as np
import pytest
from scipy import stats

from tp_flower.errors import SettingsError
from tp_flower.tuning.candidates import (
    grid_candidates,
    random_candidates,
    read_candidates,
    read_grid,
)


def test_a_grid_is_the_product_of_its_values_and_grids_add_up():
    grids = [{"l2": [0.1, 1.0], "rho": np.array([1, 2])}, {"strategy": "boost"}]
    product = itertools.product([0.1, 1.0], [1, 2])
    expected = [{"l2": l2, "rho": rho} for l2, rho in product]
    assert grid_candidates(grids) == [*expected, {"strategy": "boost"}]
    assert grid_candidates([grids[0], grids[0]]) == expected
    assert type(grid_candidates(grids)[0]["rho"]) is int


def test_random_candidates_are_of_their_distributions():
    grid = {"l2": "log(1e-4, 1)", "leaves": "int(3, 5)", "rho": stats.uniform(1, 2)}
    drawn = random_candidates(grid, 300, seed=3)
    assert drawn == random_candidates(grid, 300, seed=3)
    assert drawn[0] != random_candidates(grid, 1, seed=4)[0]
    logs = [math.log10(each["l2"]) for each in drawn]
    # of a uniform one on [-4, 0] the mean is -2, its error 0.067
    assert np.mean(logs) == pytest.approx(-2.0, abs=0.3)
    assert min(logs) >= -4.0
    assert max(logs) <= 0.0
    assert {each["leaves"] for each in drawn} == {3, 4, 5}
    assert all(1.0 <= each["rho"] <= 3.0 for each in drawn)


def test_a_grid_of_a_command_is_read_as_its_settings_are():
    text = 'l2=0.01, 1; strategy=cg,admm; hidden-sizes=["16,8"]; test=log(1, 2)'
    assert read_grid(text) == {
        "l2": [0.01, 1],
        "strategy": ["cg", "admm"],
        "hidden-sizes": ["16,8"],
        "test": "log(1, 2)",
    }
    assert read_candidates(["l2=1,2"], 1, seed=0)[0]["l2"] in (1, 2)
    assert read_candidates([], 5, seed=0) == []


@pytest.mark.parametrize(
    ("make", "reason", "mended"),
    [
        (
            lambda: grid_candidates({"l2": "log(0.1, 1)"}),
            "is no list of values, as a grid has them; a search of random candidates",
            lambda: random_candidates({"l2": "log(0.1, 1)"}, 1, 0),
        ),
        (
            lambda: random_candidates({"l2": [1, 2]}, 3, 0),
            "there are not 3 different candidates: try fewer, or more values",
            lambda: random_candidates({"l2": [1, 2]}, 2, 0),
        ),
        (
            lambda: random_candidates({"l2": "log(0, 1)"}, 1, 0),
            "l2: 'log(0, 1)' is not one of \"uniform(a, b)\"",
            lambda: random_candidates({"l2": "uniform(0, 1)"}, 1, 0),
        ),
        (
            lambda: read_grid("l2"),
            "--grid 'l2': write key=value, value, such as l2=0.01,0.1,1",
            lambda: read_grid("l2=0.01,0.1,1"),
        ),
        (
            lambda: read_grid("l2=[1, "),
            "--grid l2: [1, is no list",
            lambda: read_grid("l2=[1, 2]"),
        ),
        (
            lambda: grid_candidates([]),
            "a grid is a dictionary of settings to lists of values",
            lambda: grid_candidates([{"l2": [1]}]),
        ),
    ],
)
def test_what_is_no_grid_is_refused_and_what_the_message_says_is_one(
    make, reason, mended
):
    with pytest.raises(SettingsError, match=re.escape(reason)):
        make()
    assert mended()
