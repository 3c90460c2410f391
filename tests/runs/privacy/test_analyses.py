"""docs/reference/analyses.md: the lines of a policy that an analysis needs, and the
kinds that its ledger then shows.
"""

import re
from itertools import chain

import pytest

from scripts.render_pages import ANALYSES, policy_lines
from tests.support.federated import site_per_table, store, train
from tests.support.files import ROOT, case_table, text_of
from tp_flower.errors import SiteError
from tp_flower.privacy.epsilons import KINDS

CASES = case_table(__file__)
BY_HAND = text_of(ROOT / ANALYSES).partition("## Lines of a policy")[0]
SQL = """
SELECT o.qty AS label, o.day, c.age, c.region
FROM orders AS o JOIN customers AS c ON o.customer = c.id
"""


def names_in(text: str) -> set[str]:
    """Return what stands in backticks, of `line = value` the line."""
    return {name.partition(" =")[0] for name in re.findall(r"`([^`]+)`", text)}


def table_rows() -> dict[str, tuple[set[str], set[str]]]:
    """Return the lines and the kinds of each analysis of the page."""
    lines = [line for line in BY_HAND.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0]: (names_in(row[2]), names_in(row[4])) for row in cells[1:]}


ROWS = table_rows()


def test_the_page_names_the_lines_and_the_kinds_that_there_are_and_no_other():
    kinds = set(chain.from_iterable(KINDS.values()))
    named = names_in(BY_HAND)
    assert kinds - named == set()
    assert set(policy_lines()) - named == set()
    for lines, shown in ROWS.values():
        assert lines <= set(policy_lines())
        assert shown <= kinds


@pytest.mark.cases("moments", "coefficients", "bins")
@pytest.mark.parametrize("name", CASES)
def test_an_analysis_needs_its_line_and_is_in_the_ledger(tmp_path, name):
    case = CASES[name]
    lines, shown = ROWS[case["row"]]
    kinds = set(case["kinds"])
    assert case["line"] in lines
    assert kinds <= shown
    if "stays" in case:
        assert not kinds & kinds_of_run(tmp_path / "without", case, "without")
    else:
        with pytest.raises(
            SiteError, match=rf"\({re.escape(case['line'])}\b.* refuses"
        ):
            kinds_of_run(tmp_path / "without", case, "without")
    assert kinds <= kinds_of_run(tmp_path / "with", case, "with")


def kinds_of_run(folder, case: dict, policy: str) -> set[str]:
    """Train under a policy of both tables, and return the ledgers' kinds."""
    tables = {name: store()[name] for name in ("orders", "customers")}
    files = site_per_table(folder, tables, dict.fromkeys(tables, case[policy]))
    settings = {"strategy": "cg", "num_epochs": 2, **case.get("settings", {})}
    method = settings.pop("strategy")
    run = train(files, SQL, method, task="regression", loss="squared", **settings)
    return {line["release"]["what"] for own in run.ledgers.values() for line in own}
