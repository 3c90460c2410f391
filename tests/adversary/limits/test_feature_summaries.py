"""An operator with a table of chosen persons, who asks what of them is missing, run
after run.
"""

import numpy as np
import pandas as pd
import pytest

from client_apps.handlers.encoding import FEWEST_ROWS
from tests.support.examples.explained import explain, printed
from tests.support.federated import write_site
from tp_flower.features.columns import CategoricalColumn, nearly_numbers
from tp_flower.features.statistics_codec import STEP, percent
from tp_flower.protocol.setup_messages import Detail

PERSONS = 700
# who has a value of the marker; the others have none
IS_ILL = np.arange(PERSONS) % 7 == 3
KNOWN = np.flatnonzero(~IS_ILL)[:49]
RULES = """min-rows = 50\nfilters = []\nexpressions = false\nqueries-per-day = 10000"""
SQL = (
    "SELECT m.y AS label, m.z, p.marker FROM mine AS m JOIN patients AS p ON m.id = "
    "p.id"
)


def victim(folder, rules=RULES):
    """A hospital whose policy allows joins by id, and no filter."""
    frame = pd.DataFrame(
        {
            "id": np.arange(PERSONS),
            "marker": np.where(IS_ILL, np.arange(PERSONS) % 5 + 0.5, np.nan),
        }
    )
    return write_site(folder / "hospital", {"patients": frame}, {"patients": rules})


def share_missing(folder, persons, rules=RULES):
    """Return what explain says of the marker's missing values, of chosen persons."""
    rows = np.arange(len(persons))
    mine = pd.DataFrame({"id": persons, "z": rows % 3 * 1.0, "y": rows % 2 == 0})
    sites = [{"mine": [mine]}, victim(folder, rules)]
    explanation = explain(SQL, sites, test_fraction=0.0)
    (table,) = [table for table in explanation["tables"] if table["table"] == "p"]
    (row,) = table["encoding"]
    text = " ".join(printed(explanation).split())
    is_untold = "of p, the sites tell numbers of columns alone" in text
    assert is_untold == (row["missing"] is None)
    return row["missing"]


def test_no_share_of_few_persons_is_told(tmp_path):
    """Of 50 persons, 49 of them known, whole percents told the status of the last, 12
    of 12.
    """
    for person in (696, 699):
        assert share_missing(tmp_path, [*KNOWN, person]) is None
    assert share_missing(tmp_path, np.arange(FEWEST_ROWS - 1)) is None


def test_one_person_often_joined_does_not_count_for_many(tmp_path):
    persons = np.append(np.arange(PERSONS), [3, 3])
    assert share_missing(tmp_path, persons) is None
    assert share_missing(tmp_path, np.arange(PERSONS)) == 86


def test_a_policy_that_lets_single_rows_out_and_a_simulation_tell_whole_percents(
    tmp_path,
):
    rules = RULES.replace("50", "1")
    assert share_missing(tmp_path, [*KNOWN, 699], rules) == 100
    assert share_missing(tmp_path, [*KNOWN, 696], rules) == 98


def test_of_two_tables_that_differ_in_a_person_one_pair_in_ten_lies_at_an_edge():
    """The figure of PRIVACY.md: the smallest table, every number of missing values."""
    missing = np.arange(FEWEST_ROWS)
    told = np.array(
        [percent(int(n), FEWEST_ROWS, Detail.STEPS) for n in range(FEWEST_ROWS + 1)]
    )
    at_edges = told[missing] != told[missing + 1]
    assert at_edges.mean() == pytest.approx(1 / (STEP * FEWEST_ROWS / 100), abs=0.001)
    # none is told of those without, or with nothing but, missing values
    assert set(told[:5]) == {0}
    assert set(told[-5:]) == {100}
    assert not at_edges[[0, -1]].any()


def test_an_operator_who_runs_on_finds_an_edge():
    """The figure of PRIVACY.md: some eight runs find it, and then each run tells a
    person.

    The operator exchanges persons of the table for some who have no value, one after
    the other, until the share steps, and from there the last of them for others.
    """
    rng = np.random.default_rng(0)
    first = []
    then = []
    size = FEWEST_ROWS
    for _ in range(200):
        people = rng.permutation(100_000)[:2_000] % 5 == 0

        def told(rows):
            return percent(int(rows.sum()), len(rows), Detail.STEPS)

        runs = 1
        start = told(people[:size])
        # exchange known persons without a value for persons with one: at most a step's
        # worth
        while told(np.append(people[: size - runs], np.ones(runs))) == start:
            runs += 1
        edge = np.append(people[: size - runs], np.ones(runs))
        victims = people[size : size + 12]
        guesses = [told(np.append(edge[:-1], victim)) != start for victim in victims]
        first.append(runs + 1)
        then.append(np.mean(guesses == victims))
    assert np.mean(then) == 1.0
    assert 5 <= np.mean(first) <= 12


def test_a_single_text_does_not_make_a_column_nearly_numbers():
    """Whether a column is read as text though it holds numbers is told, and is no one's
    fact.
    """
    texts = ["12", "13", "1.5"]

    def column(fractions):
        codes = np.zeros(500, np.int32)
        codes[:fractions] = 2
        return CategoricalColumn(codes, texts)

    assert not nearly_numbers(column(0), 0.01)
    assert not nearly_numbers(column(1), 0.01)
    assert nearly_numbers(column(1))
    assert nearly_numbers(column(6), 0.01)


@pytest.mark.parametrize(
    ("rules", "settings", "tells"),
    [
        (RULES, {}, True),
        (
            f"{RULES}\nreleases = {{ statistics = 'never' }}",
            {"encoders": "p.sick=range(0, 1)"},
            False,
        ),
    ],
)
def test_the_number_of_encoded_columns_tells_a_person_unless_encoders_are_declared(
    tmp_path, rules, settings, tells
):
    """The figure of PRIVACY.md: a feature that is constant but for one of 50 persons
    has a column.

    Here it is the last of 50, of whom 49 are known to be well.
    """
    sick = pd.DataFrame({"id": np.arange(PERSONS), "sick": IS_ILL.astype(int)})
    site = write_site(tmp_path / "hospital", {"patients": sick}, {"patients": rules})
    sql = SQL.replace("p.marker", "p.sick")
    columns = []
    for person in (696, 699):
        mine = pd.DataFrame(
            {"id": [*KNOWN, person], "z": np.arange(50) % 3, "y": np.arange(50) % 2}
        )
        sites = [{"mine": [mine]}, site]
        explained = explain(sql, sites, test_fraction=0.0, **settings)
        columns.append(explained["tables"][1]["encoding"][0]["columns"])
    assert columns == ([1, 0] if tells else [1, 1])
