"""Runs hold out what `test-split` says: compared with the join built by DuckDB."""

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from strategies.report_page.page import render
from tests.support.examples.store_runs import (
    FRAMES,
    LAYOUTS,
    LEFT,
    each_layout,
    query,
    trained,
)
from tests.support.federated import SOURCE, store, train, write_site
from tp_flower.errors import QueryError, SiteError, TPFlowerError
from tp_flower.keyed_hash import KeyedHasher
from tp_flower.privacy.key_agreement import GroupSecret
from tp_flower.reports.records import report_dict
from tp_flower.splits import TEST, Shares, split_by_hash

ROWS = "o.rowid AS o, c.rowid AS c, i.rowid AS i"
SPLITS = ["group(o.day)", "group(c.id)", "group(o.day, o.online)", "time(o.day)"]
SPLITS += ["time(c.age)", "time(i.price)"]


def joined(columns: str, source: str) -> tuple[list[dict], list[tuple]]:
    """The rows behind each joined row, by table, and the values of some columns."""
    with duckdb.connect() as engine:
        for name, frame in FRAMES.items():
            engine.register("frame", frame)
            engine.execute(f"CREATE TABLE {name} AS SELECT * FROM frame")
        rows = engine.sql(f"SELECT {ROWS}, {columns} {source}").fetchall()
    keys = [dict(zip("oci", row[:3], strict=True)) for row in rows]
    return keys, [row[3:] for row in rows]


def canonical(value: object) -> str:
    kind = "boolean" if isinstance(value, bool) else "number"
    text = str(value).lower() if kind == "boolean" else f"{value:.15g}"
    return f"{kind}{len(text)}:{text}"


def is_held_out(values: list[tuple], split: str) -> list[bool]:
    """Whether each joined row is held out, in plain Python."""
    share = 0.2
    if split.startswith("time"):
        times = sorted(time for (time,) in values if time is not None)
        first = times[-round(len(times) * share)]
        return [time is not None and time >= first for (time,) in values]
    hasher = KeyedHasher(GroupSecret.of_simulation(0).value).purpose("split 0")
    decided = {}
    for value in set(values):
        text = "".join(map(canonical, value)) if None not in value else None
        hashes = hasher.hash_texts(pa.array([text or ""]))
        is_test = split_by_hash(hashes, Shares(share))[0] == TEST
        decided[value] = text is not None and is_test
    return [bool(decided[value]) for value in values]


@pytest.mark.cases(
    "inner-sharded-group(o.day)",
    "inner-whole-group(c.id)",
    "left-whole-group(o.day, o.online)",
    "left-sharded-time(o.day)",
    "inner-sharded-time(c.age)",
    "left-whole-time(c.age)",
    "inner-whole-time(i.price)",
)
@pytest.mark.parametrize("split", SPLITS)
@each_layout
@pytest.mark.parametrize("source", [SOURCE, LEFT], ids=["inner", "left"])
def test_the_split_is_that_of_the_join(split, layout, source):
    finished = trained(
        "squared", layout, "admm", source, test_split=split, num_epochs=1
    )
    problem = finished.problem
    rows, values = joined(split.partition("(")[2].rstrip(")"), source)
    held_out = is_held_out(values, split)
    assert problem.joined_rows == (held_out.count(False), held_out.count(True))
    assert 0 < held_out.count(True) < len(rows)
    for table, frame in zip("oci", FRAMES.values(), strict=True):
        for masks, expected in ((finished.trained, False), (finished.tested, True)):
            of_table = np.zeros(len(frame), bool)
            for row, is_test in zip(rows, held_out, strict=True):
                if is_test == expected and row[table] is not None:
                    of_table[row[table]] = True
            np.testing.assert_array_equal(masks[table], of_table)
    # no value is on both sides
    pairs = {*zip(values, held_out, strict=True)}
    assert not [
        v for v, is_test in pairs if (v, not is_test) in pairs and None not in v
    ]


@each_layout
def test_random_rows_of_another_table_are_held_out_whole(layout):
    finished = trained("squared", layout, test_split="random(C)", num_epochs=1)
    is_trained = finished.trained["c"]
    is_tested = finished.tested["c"]
    assert not (is_trained & is_tested).any()
    assert is_tested.sum() == round(0.2 * (is_trained | is_tested).sum())


@pytest.mark.parametrize("strategy", ["cg", "sgd", "coreset-ridge"])
def test_every_strategy_holds_out_the_same_rows(strategy):
    counted = [
        trained(
            "squared", "whole", name, test_split="group(c.id)", num_epochs=1
        ).report.joined_rows_test
        for name in ("admm", strategy)
    ]
    assert counted[0] == counted[1] > 0


def test_what_leaves_for_a_split():
    by_hash, by_rank, by_value = (
        trained("squared", layout, test_split=split, num_epochs=1)
        for layout, split in (
            ("whole", "group(c.id)"),
            ("whole", "time(c.age)"),
            ("sharded", "time(c.age)"),
        )
    )
    ages = FRAMES["customers"]["age"]
    for run, name, expected in (
        (by_rank, "rank", ages.rank(method="dense") - 1),
        (by_value, "value", ages),
    ):
        sent = run.arrays("query.extract", replies=True)
        times = [array for key, array in sorted(sent.items()) if key[1] == "times"]
        np.testing.assert_array_equal(np.concatenate(times), expected)
        messages = run.report.privacy["messages"]
        carried = [item["carries"] for item in messages]
        assert f"the {name} of c.age in every row" in carried
        assert "times" in {release["what"] for release in run.releases}
    sent = by_hash.arrays("query.extract", replies=True)
    (subset,) = (array for key, array in sent.items() if key[1] == "subset")
    assert subset.dtype == np.uint8


@pytest.mark.parametrize(
    ("split", "problem"),
    [
        ("group(x.day)", "test-split x.day: no table is called 'x'"),
        ("time(o.dya)", "o.dya: table 'o' has no column 'dya' .did you mean 'day'"),
        ("group(o.day, c.id)", "columns of the tables o, c: rows are held out by the"),
        ("group(c.region)", "holds out none of the 89 joined rows: raise test-"),
        ("random(x)", "test-split names table 'x'; the query has o, c, i"),
        ("time(c.region)", "type text has no order .* name a number"),
    ],
)
def test_refused_columns(split, problem):
    with pytest.raises(TPFlowerError, match=problem):
        trained("squared", test_split=split)


def test_a_fraction_that_leaves_no_rows_to_train_on():
    with pytest.raises(QueryError, match=r"held out for testing: lower test-fraction"):
        trained("squared", test_split="time(o.day)", test_fraction=0.999)


@pytest.mark.parametrize("rules", ["releases.weights = 'never'", "weights = ['id']"])
def test_policies_on_values_of_rows_are_policies_on_times(rules, tmp_path):
    # the keys of real sites are random: of 55 ages some are held out, and some are not
    frames = store(orders=200, customers=150)
    site = write_site(tmp_path / "shop", frames, {"customers": rules})
    train([site], query(), test_split="group(c.age)", test_fraction=0.5)
    with pytest.raises(SiteError, match=r"policy .*weights.* refuses"):
        train([site], query(), test_split="time(c.age)")


def warnings_of(sql: str = "", method: str = "admm", **settings: object) -> list[str]:
    sites = [LAYOUTS["whole"](FRAMES)]
    how = {"num_epochs": 1, **settings}
    warnings = train(sites, sql or query(), method, **how).report.warnings
    # these labels may also be made from features, or from join keys
    others = ("no better than a constant", "from which the label is made")
    return [text for text in warnings if not any(words in text for words in others)]


@pytest.mark.parametrize("method", ["admm", "moments"])
def test_few_validation_rows_are_warned_of(method):
    (warning,) = warnings_of(method=method, validation_fraction=0.02)
    assert "joined rows validate: with so few, chance decides" in warning
    assert not warnings_of(method=method, validation_fraction=0.7)


def test_classes_that_no_training_row_has_are_named():
    label = (
        "CASE WHEN o.day > 26 THEN 'late' WHEN o.day > 9 THEN 'mid' ELSE 'early' END"
    )
    sql = query().replace("o.qty AS", f"{label} AS")
    (unseen,) = warnings_of(sql, test_split="time(o.day)", test_fraction=0.05)
    assert "has 1 of the label's classes (late; time: o.day" in unseen
    assert not warnings_of(sql)


def test_a_label_that_follows_an_entity_is_told_of():
    (warning,) = warnings_of(query().replace("o.qty AS", "o.item * 2 AS"))
    assert warning.startswith("the label is the same in all joined rows of a row of i,")
    assert 'test-split = "random(i)"' in warning
    assert not warnings_of(query().replace("o.qty AS", "o.item + o.day AS"))


def test_the_page_names_the_split_beside_the_metrics():
    report = trained("squared", test_split="group(o.day)", num_epochs=1).report
    page = render(report_dict(report))
    assert page.count("held-out rows (held-out o.day)") >= 2
    assert report_dict(report)["split"]["name"] == "held-out o.day"
