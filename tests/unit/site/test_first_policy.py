"""The first policy that is written for an owner: each line means what it says."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.support.command_line import printed_by, refused_by
from tests.support.files import case_table
from tests.support.tables.sources import sources_of, tables_file
from tp_flower.sources.policy import BUDGETED, RUNS_PER_BUDGET, Releases
from tp_flower.sources.shards import describe, load_tables

CASES = case_table(__file__)
TABLES = CASES["tables"]
ODD = ['a "quoted" column', "two\nlines", "ünïcode 😀", "amount"]
NOTE = "came on foot and left by taxi"


@pytest.fixture
def tables(tmp_path):
    rows = [f"{k},{k % 4}.5,{NOTE} {k % 2},{'ab'[k % 2]}" for k in range(60)]
    (tmp_path / "orders.csv").write_text(
        "\n".join(["customerId,amount,note,state", *rows])
    )
    header = ",".join('"' + name.replace('"', '""') + '"' for name in ODD)
    for name, columns in (("odd", header), ("more", f"{header},x")):
        row = "1,2,3,4" + ",5" * (name == "more")
        (tmp_path / f"{name}.csv").write_text(f"{columns}\n{row}\n{row}\n")
    return Path(tables_file(tmp_path, TABLES))


def written(tables, *options):
    return printed_by("policy", "--tables", tables, *options)


def policies(tables, text=""):
    shards = sources_of(tables.parent, TABLES + text)
    return {source.table: source.policy for source in shards}


def test_it_allows_nothing(tables):
    text = written(tables)
    before = policies(tables)
    after = policies(tables, text)
    strict = policies(
        tables, '[tables.orders.policy]\n[tables."odd \\"name\\"".policy]'
    )
    assert after == strict != before
    assert after["public"] == before["public"]
    # all shards of a table have these columns
    for source in load_tables(str(tables)):
        source.policy.check_names(describe(source).columns)


def test_each_line_allows_what_it_says(tables):
    """One line is uncommented at a time; all else must stay as it was."""
    lines = written(tables).splitlines()
    none = policies(tables, "\n".join(lines))
    table = entry = ""
    changes = []
    for number, line in enumerate(lines):
        table = tomllib.loads(line) if line.startswith("[") else table
        entry = line.removesuffix(" = [") if line.endswith("= [") else entry
        if not re.match(r"\s*# ", line):
            assert re.match(r"$|##|\[|\]|[\w-]+ = \[$", line), line
            continue
        (name,) = table["tables"]
        changed = [*lines]
        changed[number] = line.replace("# ", "", 1)
        found = policies(tables, "\n".join(changed))
        assert {key: found[key] for key in found if key != name} == {
            key: none[key] for key in none if key != name
        }
        difference = {
            key: rule
            for key, rule in vars(found[name]).items()
            if rule != vars(none[name])[key]
        }
        if line.startswith(" "):
            (column,) = tomllib.loads(f"x = [\n{changed[number]}\n]")["x"]
            assert difference == {entry.replace("-", "_"): (column,)}
            changes.append((name, entry, column))
        else:
            changes.append((name, line, None))
            check_rule(tomllib.loads(changed[number]), difference)
    assert {entry for _, entry, column in changes if column} == {
        "columns",
        "labels",
        "filters",
        "keys",
        "join-only",
    }
    listed = {column for _, entry, column in changes if entry == "columns"}
    assert listed == {*ODD, "customerId", "amount", "note", "state"}


def check_rule(rule, difference):
    """Assert that a rule outside the lists changes itself alone."""
    ((key, value),) = rule.items()
    if key == "epsilon":
        budget = {"epsilon": value, "epsilon_per_run": value / RUNS_PER_BUDGET}
        assert difference == {**budget, "releases": BUDGETED}
    elif key == "releases":
        strict = {"models": "sealed", "scores": "masked", "regions": 0, "bins": 0}
        strict |= {"moments": "never", "factors": "never", "covariance": "never"}
        strict |= {"categories": "never", "regressions": "never"}
        strict |= {"inspection": "never"}
        assert difference == {key: Releases(**{**strict, **value})}
    elif key == "scores-per-rank":
        assert difference == {"scores_per_rank": "any"}
    else:
        value = tuple(value) if isinstance(value, list) else value
        assert difference == {key.replace("-", "_"): value}


def test_it_warns_of_identifiers_and_free_text(tables):
    remarks = dict(
        re.findall(r'# "(\w+)",  # (.*)', written(tables, "--table", "orders"))
    )
    assert remarks == CASES["expected"]


def test_it_warns_of_a_person_who_has_several_rows(tmp_path):
    """A text names every other row; a ward of thirty beds names nobody."""
    rows = [f"DE-{k // 2},{k % 30},W{k % 5},{k // 2}" for k in range(60)]
    (tmp_path / "stays.csv").write_text("\n".join(["who,bed,ward,patient", *rows]))
    text = written(tables_file(tmp_path, "[tables.stays]\npath = 'stays.csv'\n"))
    remarks = dict(re.findall(r'# "(\w+)",  # (.*)', text))
    assert [name for name, remark in remarks.items() if "CAREFUL" in remark] == [
        "who",
        "patient",
    ]


def test_a_table_that_is_not_there_is_refused(tables):
    for option, match in (("nothing", "no table 'nothing'"), ("", "without a policy")):
        if not option:
            policies(tables, written(tables))
        assert match in refused_by("policy", "--tables", tables, "--table", option)


def test_tables_that_others_are_derived_from_need_no_policy(tmp_path):
    """Those of the tables file that has the lines are its owner's to allow."""
    for name in ("a.csv", "d.csv"):
        (tmp_path / name).write_text("k,x\n1,5\n")
    text = "[tables.a]\npath = 'a.csv'\nsite = 'h'\n[tables.b]\nsql = 'FROM a'\n"
    text += "[tables.c]\npath = 'd.csv'\nsite = 'h'\nsql = 'SELECT k FROM c'\n"
    tables = tables_file(tmp_path, text)
    lines = written(tables)
    policies = re.findall(r"^\[tables\.(.*)\.policy\]", lines, re.MULTILINE)
    assert policies == ['"b"', '"c"']
    assert '[tables."a".policy]' in written(tables, "--table", "a")
    assert len(sources_of(tmp_path, text + lines)) == 3


def test_a_policy_beside_one_that_allows_more_is_not_written(tables):
    text = tables.read_text()
    first = written(tables, "--table", "orders")
    tables.write_text(f"{text}\n{first}")
    reason = refused_by("policy", "--tables", tables, "--table", "orders")
    assert "table 'orders' has a policy in the tables file" in reason
    tables.write_text(text)
    assert written(tables, "--table", "orders") == first
