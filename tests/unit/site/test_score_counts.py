"""How many score vectors have left of a source: by columns, once per round, over
processes.
"""

from dataclasses import replace

import pytest
from numpy.random import default_rng

from client_apps.data.ledger import Ledger
from client_apps.data.score_counts import ScoreLimit
from tp_flower.errors import PolicyError

RUN = "1f"
NEXT = "2f"
LIMIT = ScoreLimit("F", "p", ("a", "b", "c", "d"), rule=0.5, rank=6, allowed=3)


def count(ledger, limit=LIMIT, vectors=1, run=RUN, ident=""):
    ledger.count_scores(run, {(1, limit): vectors}, ident)


@pytest.fixture
def ledger(tmp_path):
    return Ledger(str(tmp_path))


def test_score_vectors_are_counted_up_to_the_limit(ledger, tmp_path):
    count(ledger, vectors=2)
    assert ledger.scores_used(LIMIT) == 2
    match = (
        r"\(scores-per-rank = 0.5\) refuses: .* 2 more score vectors of table 'p', .* "
        r"3 .* 2 have"
    )
    with pytest.raises(PolicyError, match=match):
        count(ledger, vectors=2)
    assert ledger.scores_used(LIMIT) == 2
    count(ledger)
    # in another process, another run, after the run has ended
    ledger.close(RUN)
    with pytest.raises(PolicyError, match=" 3 have left"):
        count(Ledger(str(tmp_path)), run=NEXT)


def test_a_round_is_counted_once(ledger):
    for _ in range(3):
        count(ledger, vectors=2, ident="round-7")
    assert ledger.scores_used(LIMIT) == 2
    count(ledger, vectors=1, ident="round-8")
    assert ledger.scores_used(LIMIT) == 3


def test_all_or_nothing_of_a_round(ledger):
    """A self join gives one source two parts: together they exceed what each alone
    may.
    """
    with pytest.raises(PolicyError):
        ledger.count_scores(RUN, {(1, LIMIT): 2, (2, LIMIT): 2})
    assert ledger.scores_used(LIMIT) == 0
    ledger.count_scores(RUN, {(1, LIMIT): 2, (2, LIMIT): 1})


def test_columns_that_no_query_reads_together_have_separate_counts(ledger):
    count(ledger, vectors=3)
    other = replace(LIMIT, columns=("e", "f", "g", "h"))
    count(ledger, other, vectors=3)
    # one of either in common
    both = replace(LIMIT, columns=("d", "e", "x", "y", "z"), allowed=7)
    assert ledger.scores_used(both) == 6
    count(ledger, both)
    with pytest.raises(PolicyError, match=" 7 have left"):
        count(ledger, both)
    # and counts there, too
    assert ledger.scores_used(LIMIT) == ledger.scores_used(other) == 4


def test_other_sources_have_counts_of_their_own(ledger):
    count(ledger, vectors=3)
    assert ledger.scores_used(replace(LIMIT, source="G")) == 0
    assert ledger.spent("F") == []


def test_no_set_of_columns_lets_more_leave_than_half_of_its_columns(tmp_path):
    """Whatever queries a server poses: of independent columns, any set keeps half its
    unknowns.
    """
    rng = default_rng(2)
    for trial in range(9):
        ledger = Ledger(str(tmp_path / str(trial)))
        left = []
        width = 8
        for _ in range(50):
            size = rng.integers(4, width + 1)
            columns = tuple(
                sorted(f"c{k}" for k in rng.choice(width, size, replace=False))
            )
            limit = ScoreLimit("F", "p", columns, 0.5, size, int(size // 2))
            try:
                count(ledger, limit)
            except PolicyError:
                continue
            left.append(set(columns))
        for mask in range(1 << width):
            chosen = {f"c{k}" for k in range(width) if mask >> k & 1}
            assert sum(columns <= chosen for columns in left) <= len(chosen) / 2
