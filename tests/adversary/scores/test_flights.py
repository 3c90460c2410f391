"""What the built-in example, run as it is by default, tells its sites and its
server.
"""

import numpy as np
import pytest
from scipy.sparse import csr_matrix, hstack
from scipy.sparse.linalg import lsqr

from tests.support.federated import LocalGrid, train
from tests.support.peers.curious import quoted, watch_sites, watch_sums
from tp_flower.sources.flights import FLIGHTS_SQL

pytestmark = pytest.mark.slow
OTHERS = {"p": "planes", "w": "weather", "a": "airports"}


@pytest.fixture(scope="module")
def flown():
    """The sites' memory, the server's sums and the run; more epochs would tell more."""
    with pytest.MonkeyPatch.context() as patch:
        memory = watch_sites(patch)
        sums = watch_sums(patch)
        with LocalGrid(5) as grid:
            strategy = train(grid, FLIGHTS_SQL, "cg", num_epochs=3)
    return memory, sums, strategy


def separated(problem, sums):
    """The scores of each table's rows, (n_i,), that explain sums (N,) best.

    Both the flights' owners and the server know which joined rows share a plane, an
    hour's weather, an airport.
    """
    mapping = problem.train
    total = mapping.joined_rows
    columns = [
        csr_matrix(
            (np.ones(total), (np.arange(total), mapping.tables[name].row_of)),
            shape=(total, mapping.tables[name].rows),
        )
        for name in OTHERS
    ]
    solution = lsqr(hstack(columns).tocsr(), sums - sums.mean(), atol=1e-7, btol=1e-7)[
        0
    ]
    ends = np.cumsum([column.shape[1] for column in columns])[:-1]
    return dict(zip(OTHERS, np.split(solution, ends), strict=True))


def correlations(memory, problem, sums):
    """By table, of the separated scores with the true ones, over the rows trained
    on.
    """
    for name, scores in separated(problem, sums).items():
        is_joined = problem.train.tables[name].multiplicity > 0
        true = memory.table(problem, name, "scores", 1)
        yield np.corrcoef(scores[is_joined], true[is_joined])[0, 1]


def test_the_flights_owners_read_the_other_tables_scores_and_separate_them(flown):
    memory, _, strategy = flown
    problem = strategy.training_problem
    flights = problem.train.tables["f"].row_of
    read = memory.read(problem, "f", 1)[flights]
    true = memory.others(problem, "f", 1)
    error = np.abs(read - true).max() / true.std()
    rows, stated, correlation = quoted(
        "owners read planes + weather + airports of all # rows trained on to # "
        "deviations, and separate them (correlation #)"
    )
    foretold = strategy.report.privacy["readings"]
    assert (
        rows == len(read) == sum(item.single for item in foretold if item.table == "f")
    )
    assert error < stated < 10 * error
    assert min(correlations(memory, problem, read)) == pytest.approx(
        correlation, abs=1e-3
    )


def test_the_server_estimates_tables_by_averaging_over_joined_rows(flown):
    memory, sums, strategy = flown
    stated = quoted(
        "averages the first epoch's sums over the joined rows of a row estimates "
        "planes' own scores (correlation #), weather's (#) and airports' (#)"
    )
    assert list(
        correlations(memory, strategy.training_problem, sums[0])
    ) == pytest.approx(stated, abs=0.02)
