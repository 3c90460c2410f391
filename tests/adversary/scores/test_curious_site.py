"""What one site alone reads of the other tables, from the derivatives of an honest
run.
"""

import numpy as np
import pandas as pd
import pytest

from tests.support.examples.site_examples import noise_of_known_keys
from tests.support.federated import LocalGrid, train
from tests.support.peers.curious import quoted, share_read, solved, watch_sites
from tp_flower.features.sparse import dense
from tp_flower.settings import PrivacySettings

# with random keys, one run in some hundreds has equations that are nearly singular
__all__ = ["noise_of_known_keys"]

ROWS = 400
PEOPLE = 150
KNOWN = 20
NOISY = PrivacySettings(labels="randomised-response", label_epsilon=3.0)
CATEGORIES = 4
each_privacy = pytest.mark.parametrize(
    "privacy", [PrivacySettings(), NOISY], ids=["labels", "private-labels"]
)


def people_of(columns, rng):
    return pd.DataFrame(rng.normal(size=(PEOPLE, columns)), columns=names(columns))


def names(columns):
    return [f"x{n}" for n in range(columns)]


def tables(people, mean, task, rng):
    """Orders of people; the label follows ``mean``, (people,), and the order's own
    ``a``.
    """
    orders = pd.DataFrame(rng.normal(size=(ROWS, 3)), columns=list("abc"))
    orders["person"] = rng.integers(0, PEOPLE, ROWS)
    label = orders["a"] + mean[orders["person"]] + rng.normal(size=ROWS)
    orders["y"] = label if task == "regression" else label > 0
    return [{"orders": orders}, {"people": people.assign(id=np.arange(PEOPLE))}]


def trained(monkeypatch, columns=3, task="classification", people=None, **how):
    """Train by conjugate gradients; return what the sites kept, and the problem."""
    rng = np.random.default_rng(0)
    if people is None:
        people = people_of(columns, rng)
        mean = people.to_numpy() @ (rng.normal(size=columns) / np.sqrt(columns))
    else:
        mean = rng.normal(size=PEOPLE)
    features = ", ".join(f"p.{name}" for name in names(columns))
    sql = f"""SELECT o.y AS label, o.a, o.b, o.c, {features}
        FROM orders o JOIN people p ON o.person = p.id"""
    memory = watch_sites(monkeypatch)
    with LocalGrid(tables(people, mean, task, rng)) as grid:
        strategy = train(grid, sql, "cg", num_epochs=100, task=task, **how)
    return memory, strategy.training_problem


def equations(memory, problem):
    """What the orders' site reads of people, (people, epochs), and their features,
    (people, d).
    """
    epochs = len(memory.epochs[0])
    read = [memory.read(problem, "o", epoch) for epoch in range(1, epochs)]
    rows = problem.train.tables
    person, first = np.unique(rows["p"].row_of, return_index=True)
    sums = np.column_stack(read)[rows["o"].row_of[first]]
    (part,) = problem.tables["p"].parts
    return sums, dense(memory.features[part.number])[person]


@pytest.mark.parametrize("task", ["classification", "regression"])
@each_privacy
def test_a_site_reads_the_other_table_s_scores_in_every_epoch(
    task, privacy, monkeypatch
):
    if task == "regression" and privacy is NOISY:
        privacy = PrivacySettings(
            labels="laplace", label_epsilon=2.0, label_range=(-6.0, 6.0)
        )
    memory, problem = trained(monkeypatch, task=task, privacy=privacy)
    rows = problem.train.tables["o"]
    assert set(rows.multiplicity[rows.row_of]) == {1}
    for epoch in range(1, len(memory.epochs[0])):
        read = memory.read(problem, "o", epoch)[rows.row_of]
        true = memory.others(problem, "o", epoch)
        assert np.abs(read - true).max() < 1e-3 * true.std()


def test_the_sign_of_a_derivative_is_the_label(monkeypatch):
    memory, problem = trained(monkeypatch)
    steps = memory.table(problem, "o", "step", 0)[problem.train.tables["o"].row_of]
    assert ((steps > 0) == (problem.objective.target.numbers > 0)).all()


def test_a_site_reads_exact_means_of_the_others_with_squared_loss(monkeypatch):
    """Persons have several orders each: what their site reads is the mean over
    these.
    """
    memory, problem = trained(monkeypatch, task="regression")
    rows = problem.train.tables["p"]
    assert rows.multiplicity.max() > 2
    for epoch in range(1, len(memory.epochs[0])):
        others = rows.segment_sum(memory.others(problem, "p", epoch)[:, None])[:, 0]
        mean = others * rows.inverse_multiplicity
        read = memory.read(problem, "p", epoch)
        assert np.abs(read - mean)[rows.multiplicity > 0].max() < 1e-5 * mean.std()


@each_privacy
def test_known_persons_tell_all_columns_of_the_others_where_these_are_few(
    privacy, monkeypatch
):
    sums, features = equations(*trained(monkeypatch, 3, privacy=privacy))
    assert share_read(sums[:, :3], features, KNOWN) == 1.0


def test_known_persons_tell_more_with_every_epoch(monkeypatch):
    sums, features = equations(*trained(monkeypatch, 6))
    shares = [share_read(read, features, KNOWN) for read in (sums, sums[:, :3])]
    measured = [*(100.0 * share for share in shares), guessed(features)]
    known, whole, few, part, columns, half, epochs, constant = quoted(
        "knows # persons reads # % of # columns of the others to a tenth of a "
        "deviation, and # % of # (# % after the # epochs that the rank rule allows, # "
        "% by guessing)"
    )
    assert (known, whole, few, columns, epochs) == (KNOWN, 100, 3, 6, 3)
    assert [part, half, constant] == pytest.approx(measured, abs=2.0)


def guessed(features):
    """The percentage of values within a tenth of a deviation of the best constant
    guess.
    """
    return 100.0 * np.mean(
        np.abs(features - features.mean(axis=0)) < 0.1 * features.std(axis=0)
    )


def test_columns_of_few_values_are_read_from_one_epoch(monkeypatch):
    """The limit of counting equations: half the rank of such columns is more than
    enough.
    """
    rng = np.random.default_rng(1)
    codes = rng.integers(0, CATEGORIES, (PEOPLE, 3))
    people = pd.DataFrame(np.array(list("uvwx"))[codes], columns=names(3))
    sums, features = equations(*trained(monkeypatch, people=people))
    rank = np.linalg.matrix_rank(features - features.mean(axis=0))
    theta, constant = solved(sums[:KNOWN, :1], features[:KNOWN])
    # a person has one of at most 64 combinations
    kinds = np.unique(features, axis=0)
    distance = np.abs((sums[KNOWN:, :1] - constant) - (kinds @ theta)[:, 0])
    right = (kinds[distance.argmin(axis=1)] == features[KNOWN:]).all(axis=1)
    text = (
        "of # columns of # categories each, of rank #, one epoch tells # % of the rows"
    )
    told = pytest.approx(100 * right.mean(), abs=1.0)
    assert quoted(text) == [3, CATEGORIES, rank, told]
