"""What is read within the rules of a first policy: half of the rank, and one table that
covers.
"""

import numpy as np
import pandas as pd
import pytest

from tests.support.federated import LocalGrid, train, write_site
from tests.support.peers.curious import quoted, watch_sites, watch_sums
from tp_flower.errors import SettingsError

RULES = "scores-per-rank = 0.5\ncover = 1\n"
ROWS = 400
KNOWN = 20
CATEGORIES = 4
COLUMNS = ("smoker", "region", "blood")


def tables(rng):
    """A register of persons, and a made-up table of who sides with the server."""
    codes = rng.integers(0, CATEGORIES, (ROWS, 3))
    persons = pd.DataFrame(np.array(list("uvwx"))[codes], columns=list(COLUMNS))
    dummy = pd.DataFrame(rng.normal(size=(ROWS, 4)), columns=list("abcd"))
    dummy["y"] = rng.normal(size=ROWS)
    return persons.assign(id=range(ROWS)), dummy.assign(id=range(ROWS))


def run(folder, epochs, monkeypatch):
    """Train under the rules; return the persons, the server's sums, and what it
    subtracts.
    """
    persons, dummy = tables(np.random.default_rng(0))
    persons = write_site(folder / "register", {"persons": persons}, {"persons": RULES})
    sites = {
        "register": persons,
        "partner": write_site(folder / "partner", {"dummy": dummy}),
    }
    features = ", ".join(f"p.{name}" for name in COLUMNS)
    sql = f"""SELECT d.y AS label, d.a, d.b, d.c, d.d, {features}
        FROM dummy d JOIN persons p ON d.id = p.id"""
    sums = watch_sums(monkeypatch)
    memory = watch_sites(monkeypatch)
    with LocalGrid(sites, state=folder / "state") as grid:
        problem = train(
            grid, sql, "cg", num_epochs=epochs, test_fraction=0.0, task="regression"
        ).training_problem
    rows = problem.train.tables
    own = memory.table(problem, "d", "scores", 1)[rows["d"].row_of]
    (part,) = problem.tables["p"].parts
    return memory.features[part.number], rows["p"].row_of, sums[0], own


def test_columns_of_few_values_are_read_within_the_rules(tmp_path, monkeypatch):
    """A partner that sides with the server covers as well as any: hence `partners`."""
    features, row_of, sums, own = run(tmp_path, 2, monkeypatch)
    kinds, kind_of = np.unique(features, axis=0, return_inverse=True)
    kind_of = kind_of.ravel()[row_of]
    # the direction of the first epoch, of which the partner knows its part but for the
    # length
    known = np.column_stack([features[row_of], own, np.ones(len(own))])[:KNOWN]
    theta = np.linalg.lstsq(known, sums[:KNOWN], rcond=None)[0]
    left = sums - theta[-2] * own - theta[-1]
    guess = np.abs(left[:, None] - kinds @ theta[:-2]).argmin(axis=1)
    right = 100.0 * np.mean((guess == kind_of)[KNOWN:])
    assert right > 99.0
    assert quoted(
        "of # columns of # categories each, of rank #, one epoch tells # % of the rows"
    )


def test_the_rules_leave_as_many_score_vectors_as_half_of_the_rank(
    tmp_path, monkeypatch
):
    with pytest.raises(SettingsError, match="lets 4 more score vectors leave"):
        run(tmp_path, 5, monkeypatch)
