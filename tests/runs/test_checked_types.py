"""What `check` passes, `explain` does not refuse for its types: it binds what sites
describe.
"""

import pandas as pd
import pytest

from tests.support.command_line import invoke, printed_by, refused_by
from tests.support.files import toml_lines
from tests.support.policies import OPEN

JOIN = "FROM orders o JOIN customers c ON {}"
ORDERS = {
    "customer": [1, 2, 3, 1, 2, 3],
    "code": ["a", "b", "c", "d", "e", "f"],
    "day": [
        "2024-01-01",
        "2024-02-01",
        "2024-03-01",
        "2024-01-05",
        "2024-01-06",
        "2024-04-01",
    ],
    "is_paid": [True, False, True, True, False, False],
    "qty": [1.5, 2, 4, 3, 2.5, 6],
    "nothing": [None] * 6,
}
CUSTOMERS = {
    "id": [1, 2, 3],
    "name": ["x", "y", "z"],
    "since": ["2024-01-01", "2024-02-01", "2024-03-01"],
    "age": [30, 50, 40],
}
TABLES = {"orders": ORDERS, "customers": CUSTOMERS}
COUNTS = "(SELECT name, COUNT(*) AS n FROM customers GROUP BY name)"
BOTH = "(SELECT * FROM customers UNION ALL SELECT * FROM customers)"


@pytest.fixture
def run(home, monkeypatch):
    """Write the settings of a query over two tables of text files."""
    folder = home.parent
    monkeypatch.chdir(folder)
    text = ""
    for name, rows in TABLES.items():
        pd.DataFrame(rows).to_csv(folder / f"{name}.csv", index=False)
        text += f"[tables.{name}]\npath = '{name}.csv'\nsite = 'at-{name}'\n{OPEN}"
    (folder / "tables.toml").write_text(text)

    def write(sql, **settings):
        file = folder / "run.toml"
        file.write_text(toml_lines({"tables": "tables.toml", "sql": sql, **settings}))
        return file

    return write


def check_refused(file, words):
    """Assert that `check` and `explain` refuse a run in these words."""
    for reason in (refused_by("check", file), invoke("explain", file).stderr):
        assert words in " ".join(reason.split())


@pytest.mark.parametrize(
    ("on", "kinds", "mended"),
    [
        ("o.code = c.id", "o: text, c: number", "o.code = CAST(c.id AS VARCHAR)"),
        (
            "o.customer = c.name",
            "o: number, c: text",
            "CAST(o.customer AS VARCHAR) = c.name",
        ),
        ("o.customer = c.since", "o: number, c: time", "o.customer = YEAR(c.since)"),
        (
            "o.is_paid = c.id",
            "o: boolean, c: number",
            "CAST(o.is_paid AS INTEGER) = c.id",
        ),
        ("o.day = c.name", "o: time, c: text", "CAST(o.day AS VARCHAR) = c.name"),
        (
            "o.customer = c.id AND o.day = c.name",
            "o: number+time, c: number+text",
            "o.customer = c.id AND o.day = c.since",
        ),
        (
            "UPPER(o.code) = c.age + 1",
            "o: text, c: number",
            "o.customer = c.age / 10 - 2",
        ),
    ],
)
def test_keys_of_different_kinds_are_refused_by_both_in_the_same_words(
    run, on, kinds, mended
):
    file = run(f"SELECT o.qty AS label, c.age {JOIN.format(on)}")
    check_refused(file, f"differ in type: {kinds}; cast")
    sql = f"SELECT o.qty AS label, c.age {JOIN.format(mended)}"
    assert "fit together" in printed_by("check", run(sql))


LONE = "FROM orders o"


@pytest.mark.parametrize(
    ("sql", "settings", "words"),
    [
        (
            f"SELECT o.qty * o.code AS label, o.customer {LONE}",
            {},
            "No function matches",
        ),
        (f"SELECT o.qty AS label, ABS(o.code) AS a {LONE}", {}, "abs"),
        (
            f"SELECT o.qty AS label, o.customer {LONE} WHERE o.is_paid > 3.5",
            {},
            "compare",
        ),
        (
            f"SELECT o.day AS label, o.customer {LONE}",
            {},
            "the label is a date or time",
        ),
        (
            f"SELECT o.code AS label, o.day {LONE}",
            {"task": "regression"},
            "label is text",
        ),
        (
            f"SELECT o.qty AS label, o.day, o.code AS weight {LONE}",
            {},
            "must be a number",
        ),
        (
            f"SELECT o.qty AS label, s.n {LONE} JOIN {COUNTS} s ON s.name = o.customer",
            {},
            "differ in type: o: number, s: text",
        ),
    ],
)
def test_other_types_that_do_not_fit_are_refused_by_both(run, sql, settings, words):
    check_refused(run(sql, **settings), words)


@pytest.mark.parametrize(
    "sql",
    [
        (
            "SELECT o.qty AS label, o.day, o.code, c.age "
            f"{JOIN.format('o.customer = c.id')}"
        ),
        (
            "SELECT o.qty AS label, MONTH(o.day) AS m, c.name "
            f"{JOIN.format('o.day = c.since')}"
        ),
        (
            f"SELECT o.qty AS label, b.age {LONE} LEFT JOIN {BOTH} b ON b.id = "
            "o.customer + 0.0"
        ),
        f"SELECT o.qty AS label, o.customer {LONE} WHERE o.code LIKE '_' OR o.qty > 1",
        # a column without values has no type that could differ
        (
            f"SELECT o.qty AS label, o.day, d.name {LONE} LEFT JOIN customers d ON "
            "d.age = o.nothing"
        ),
        f"SELECT *, o.qty AS label {LONE}",
    ],
)
def test_what_fits_passes_both(run, sql):
    file = run(sql, **{"test-fraction": 0.0})
    assert "fit together; no row was read" in printed_by("check", file)
    result = invoke("explain", file)
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    "how",
    [{"sealed-cutoffs": True}, {"cutoff-grid": "1 day from 2024-01-01 to 2024-12-31"}],
)
def test_cutoffs_of_another_site_have_its_types(run, how):
    """A text is compared with a time, and a time with a text."""
    sql = (
        "SELECT o.qty AS label, w.n FROM orders o LEFT JOIN LATERAL (SELECT COUNT(*) "
        "AS n, MIN(EPOCH(o.day) - EPOCH(c.since)) AS ago FROM customers c WHERE "
        "c.id = o.customer AND c.since < o.day) w ON TRUE"
    )
    assert "fit together" in printed_by("check", run(sql, **how))
    other = sql.replace("EPOCH(o.day) - ", "o.day / ")
    assert "No function matches" in refused_by("check", run(other, **how))
