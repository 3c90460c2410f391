"""A table's figures have one meaning in every report, and a table with two names is
one.
"""

import pandas as pd

from strategies.report_page.overview import head_of
from tests.support.examples.explained import explain
from tests.support.federated import train
from tests.support.reference.joins import engine_of
from tp_flower.reports.blocks import Record
from tp_flower.reports.records import report_dict

PEOPLE = pd.DataFrame(
    {"id": range(6), "boss": [9, 0, 0, 1, 1, 1], "age": [61, 52, 40, 33, 28, 25]}
)
VISITS = pd.DataFrame(
    {"person": [1, 1, 2, 3, 4, 5, 5, 8], "cost": [3.0, 1, 4, 1, 5, 9, 2, 6]}
)
TOWNS = pd.DataFrame({"person": range(4), "size": [7.0, 1, 3, 2]})
SITES = [{"visits": [VISITS]}, {"people": [PEOPLE]}, {"towns": [TOWNS]}]
JOIN = """FROM visits v JOIN people p ON v.person = p.id JOIN people b ON p.boss = b.id
LEFT JOIN (SELECT person, MAX(size) AS size FROM towns GROUP BY person) t
  ON t.person = p.id"""
SQL = f"SELECT v.cost AS label, p.age, b.age AS of_boss, t.size {JOIN}"


def times_joined(alias, table, key):
    """How often each row of a table is in the join that DuckDB builds."""
    counts = (
        f"SELECT {alias}.{key} AS k, count(*) AS times {JOIN} GROUP BY {alias}.{key}"
    )
    with engine_of({"visits": VISITS, "people": PEOPLE, "towns": TOWNS}) as engine:
        row = engine.execute(
            "SELECT min(coalesce(times, 0)), avg(coalesce(times, 0)), "
            f"max(coalesce(times, 0)) FROM {table} r LEFT JOIN ({counts}) c ON c.k = "
            f"r.{key}"
        ).fetchone()
    return dict(zip(("min", "mean", "max"), row, strict=True))


def test_joined_counts_all_rows_of_a_table_in_explain_and_in_training():
    held_out = {"test_fraction": 0.4, "seed": 1}
    trained = report_dict(train(SITES, SQL, "cg", num_epochs=1, **held_out).report)
    explained = explain(SQL, SITES, **held_out)
    assert trained["joined-rows"]["test"] > 0
    for alias, table, key in (
        ("p", "people", "id"),
        ("b", "people", "id"),
        ("t", "towns", "person"),
    ):
        expected = times_joined(alias, table, key)
        for report in (trained, explained):
            counts = next(t for t in report["tables"] if t["table"] == alias)[
                "multiplicity"
            ]
            assert {name: counts[name] for name in expected} == expected, (
                alias,
                report["mode"],
            )


def test_a_table_under_two_names_is_counted_once():
    trained = report_dict(train(SITES, SQL, "cg", num_epochs=1).report)
    for report in (trained, explain(SQL, SITES)):
        assert len(report["tables"]) == 4
        assert "3 tables at 3 sites" in head_of(Record(report))["subject"]
    union = "(SELECT * FROM visits UNION ALL SELECT * FROM more)"
    both = f"SELECT v.cost AS label, v.person FROM {union} v"
    sites = [{"visits": [VISITS]}, {"more": [VISITS]}]
    for report in (report_dict(train(sites, both, "cg").report), explain(both, sites)):
        assert "2 tables at 2 sites" in head_of(Record(report))["subject"]
