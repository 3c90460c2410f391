"""What a server that knows some joined rows reads of the others from their sums.

Sums over T epochs are T equations h = X Theta. Whoever knows X of as many rows as there
are columns knows Theta, and X of all rows where Theta has as many independent columns.
"""

import numpy as np
import pandas as pd
import pytest

from client_apps.operator.state import Stateless
from tests.support.federated import LocalGrid, train
from tests.support.peers.curious import quoted, share_read, watch_sums
from tp_flower.joins.rows import JoinedRows

SQL = """SELECT o.y AS label, o.a, o.b, o.c, p.d, p.e, p.f
FROM orders o JOIN people p ON o.person = p.id"""
COLUMNS = 6
KNOWN = 40


def tables():
    rng = np.random.default_rng(0)
    orders = pd.DataFrame(rng.normal(size=(400, 3)), columns=list("abc"))
    orders["person"] = rng.integers(0, 150, 400)
    people = pd.DataFrame(rng.normal(size=(150, 3)), columns=list("def"))
    people["id"] = np.arange(150)
    mean = orders["a"] + people["d"].to_numpy()[orders["person"]]
    orders["y"] = mean + rng.normal(size=400)
    return [{"orders": orders}, {"people": people}]


def sums_and_features(epochs, monkeypatch, change=None, strategy="admm", **how):
    """The sums that a run tells the server, (N, epochs), and the features, (N, 6)."""
    sums = watch_sums(monkeypatch)
    add_up = JoinedRows.sums

    def changed(rows, name):
        rows.fill("changed", change(rows.whole(name)))
        return add_up(rows, "changed")

    if change is not None:
        monkeypatch.setattr(JoinedRows, "sums", changed)
    seen = {}

    def look(report):
        if report.train and not seen:
            for node in grid.contexts:
                for part in grid.site(node).parts(Stateless):
                    seen[part.data.table] = np.asarray(part.data.trained)

    with LocalGrid(tables()) as grid:
        how = {"num_epochs": epochs, "tolerance": 1e-9, "task": "regression", **how}
        problem = train(grid, SQL, strategy, on_round=look, **how).training_problem
    rows = problem.train.tables
    features = np.hstack([seen[name][rows[name].row_of] for name in rows])
    return np.column_stack(sums)[:, -epochs:], features


def share_of(*arguments, **how):
    """The share of the features that such a run tells."""
    return share_read(*sums_and_features(*arguments, **how), KNOWN)


@pytest.mark.parametrize(
    ("epochs", "least", "most"), [(COLUMNS // 2, 0.0, 0.25), (2 * COLUMNS, 0.4, 0.9)]
)
def test_honest_epochs_tell_features_once_they_outnumber_them(
    epochs, least, most, monkeypatch
):
    """With few features they do not hide for long."""
    assert least <= share_of(epochs, monkeypatch) < most


def test_conjugate_directions_tell_all_after_as_many_epochs_as_columns(monkeypatch):
    """By default a run ends before."""
    few = share_of(COLUMNS // 2, monkeypatch, strategy="cg")
    enough = share_of(COLUMNS, monkeypatch, strategy="cg")
    known, columns, percent, epochs, all_epochs = quoted(
        "knows # joined rows reads of # columns # % to a tenth of a deviation after # "
        "epochs, and all after #"
    )
    expected = (KNOWN, COLUMNS, COLUMNS // 2, COLUMNS)
    assert (known, columns, epochs, all_epochs) == expected
    assert 100.0 * few == pytest.approx(percent, abs=2.0)
    assert enough > 0.95


def test_conjugate_gradients_end_before_they_tell_features(monkeypatch):
    sums, features = sums_and_features(100, monkeypatch, strategy="cg", tolerance=0.0)
    assert sums.shape[1] < COLUMNS
    assert share_read(sums, features, KNOWN) < 0.25


def test_steps_at_random_tell_all_features_after_as_many_epochs_as_columns(monkeypatch):
    """A server that departs from the protocol need not wait for directions to
    differ.
    """
    rng = np.random.default_rng(1)

    def at_random(message):
        return message.std() * rng.normal(size=message.shape)

    few, enough = (
        share_of(epochs, monkeypatch, at_random)
        for epochs in (COLUMNS // 2, COLUMNS + 3)
    )
    assert few < 0.25
    assert enough > 0.95
