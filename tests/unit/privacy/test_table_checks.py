"""What is tried of an owner's tables before a SuperNode starts."""

import pytest

from client_apps.privacy.table_checks import check_tables
from tests.support.policies import lenient
from tp_flower.errors import TPFlowerError

COLUMNS = ["patient", "cost"]
JOIN_ONLY = """columns = ['patient']
join-only = ['patient']
labels = ['cost']
filters = []
keys = []"""
SELECT = "SELECT * FROM raw WHERE patient NOT IN (SELECT patient FROM withdrawn)"


@pytest.fixture
def checked(tmp_path):
    """What is printed of a derived table with some rules, and of what it reads."""
    (tmp_path / "raw.csv").write_text("patient,cost\n1,2.5\n2,3.5\n3,4.5\n")
    (tmp_path / "withdrawn.csv").write_text("patient\n3\n")
    keys = tmp_path / "keys.txt"
    keys.write_text(f"lab {'11' * 32}\n")
    keys.chmod(0o600)

    def check(rules="", sql=SELECT):
        text = "".join(
            f"[tables.{name}]\npath = '{name}.csv'\nsite = 'h'\n"
            for name in ("raw", "withdrawn")
        )
        text += f"[tables.stays]\nsql = '{sql}'\nsite = 'h'\n[tables.stays.policy]\n"
        file = tmp_path / "tables.toml"
        file.write_text(text + lenient(COLUMNS, rules))
        return list(check_tables(str(file), str(tmp_path / "state"), str(keys)))

    return check


def test_tables_that_a_select_reads_need_no_policy(checked):
    free = "; without a policy it takes part in no run, 'sql' reads it"
    assert checked() == [
        f"  raw of h: 3 rows, 2 columns{free}",
        f"  withdrawn of h: 1 rows, 1 columns{free}",
        "  stays of h: 2 rows, 2 columns",
    ]
    with pytest.raises(TPFlowerError, match=r"table 'withdrawn' .* has no policy"):
        checked(sql="SELECT * FROM raw")


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ("columns = ['costs']", "its policy names an unknown column 'costs'"),
        ("privacy-unit = 'p'\nrows-per-unit = 2", "an unknown column 'p'"),
        ("partners = ['labb']", "'labb', to which allowed-keys gives no key; .* lab"),
    ],
)
def test_rules_about_what_does_not_exist_are_refused(checked, rules, reason):
    with pytest.raises(TPFlowerError, match=reason):
        checked(rules)


@pytest.mark.parametrize(
    ("rules", "warning"),
    [
        ("partners = ['lab']\nmin-rows = 2\nscores-per-rank = 1", ""),
        ("partners = ['lab', 'h']", "'partners' lists 'h' itself"),
        ("approved-runs = ['sha256:12']", "'approved-runs' has 'sha256:12', which is"),
        (f"approved-runs = ['sha256:{'0f' * 32}']", ""),
        ("models = ['linera', 'm:make']", "'models' has 'linera', which is none of"),
        ("min-rows = 3", "min-rows = 3 is more than the table has"),
        ("scores-per-rank = 2", "scores-per-rank = 2 is above 1"),
        (JOIN_ONLY, "no feature may read 'patient' of 'columns'"),
    ],
)
def test_rules_that_may_not_be_meant_have_a_warning(checked, rules, warning):
    warnings = checked(rules)[3:]
    assert [line.partition("warning: ")[2][: len(warning)] for line in warnings] == (
        [warning] if warning else []
    )
