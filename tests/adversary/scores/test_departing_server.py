"""What a server that departs from the protocol reads, with steps that it chooses."""

import numpy as np

from tests.support.federated import store, store_sql, train, whole
from tests.support.peers.curious import change_steps, quoted, watch_sites, watch_sums

VICTIM = "c"


def first_sum(monkeypatch, change):
    """The server's first sum, (N,), and the scores of the victim's row in each joined
    row, (N,).
    """
    sums = watch_sums(monkeypatch)
    memory = watch_sites(monkeypatch)
    change_steps(monkeypatch, change)
    sites = [{name: frames} for name, frames in whole(store(300, 60)).items()]
    problem = train(sites, store_sql("squared"), "cg", num_epochs=2).training_problem
    rows = problem.train.tables[VICTIM]
    return sums[0], memory.table(problem, VICTIM, "scores", 1)[rows.row_of]


def residual(sums, scores):
    """How far the sums are from a multiple of the scores, relative to the largest."""
    (length,) = np.linalg.lstsq(scores[:, None], sums, rcond=None)[0]
    return np.abs(sums - length * scores).max() / np.abs(sums).max()


def test_steps_of_zero_to_all_other_tables_leave_the_scores_of_one(monkeypatch):
    """No site can see it: the victim's own steps are those of an honest run."""
    left = residual(*first_sum(monkeypatch, lambda name, step: (name == VICTIM) * step))
    (stated,) = quoted(
        "steps of 0 to all other tables leave one table's scores, to # of their"
    )
    assert left < stated < 10 * left


def test_the_sums_of_an_honest_run_are_no_table_s_scores(monkeypatch):
    assert residual(*first_sum(monkeypatch, lambda _, step: step)) > 0.1
