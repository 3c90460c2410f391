"""Shards that lack a column (the paper's umbrella schema, section 8): it is missing in
their rows.

A run equals the one over files that have the column, empty, bit for bit; and the one
over the union of the shards with NULLs in one file, up to the order of sums.
"""

import numpy as np
import pandas as pd
import pytest

from strategies.explain.explanation import Explain
from tests.support import predicted
from tests.support.federated import (
    WatchedGrid,
    on_requests,
    one_per_site,
    pieces,
    site_per_table,
    train,
    write_site,
)
from tests.support.policies import OPEN, lenient
from tp_flower.errors import QueryError, SchemaError, SiteError
from tp_flower.query import Query
from tp_flower.settings import Settings

ROWS = 90
CUT = 50
SQL = """SELECT v.cost AS label, v.smoker, v.dose,
  EXTRACT(year FROM v.day) AS year, p.age
FROM visits v JOIN patients p ON v.patient = p.id"""
ALONE = "SELECT cost AS label, smoker, dose FROM visits"
LACKED = {"north": (), "south": ("Smoker", "day")}
CUTS = {"north": slice(0, CUT), "south": slice(CUT, ROWS)}


def tables() -> dict[str, pd.DataFrame]:
    rng = np.random.default_rng(3)
    patients = pd.DataFrame({"id": range(20), "age": rng.integers(20, 80, 20)})
    visits = pd.DataFrame(
        {
            "patient": rng.integers(0, 20, ROWS),
            "smoker": rng.choice(["yes", "no", "ex"], ROWS),
            "day": pd.Timestamp("2019-06-01")
            + pd.to_timedelta(rng.integers(0, 900, ROWS), "D"),
            "dose": rng.normal(size=ROWS),
        }
    )
    age = patients.age.to_numpy()[visits.patient]
    visits["cost"] = (
        visits.dose + 2 * (visits.smoker == "yes") + 0.1 * age + rng.normal(size=ROWS)
    )
    visits.loc[CUT:, ["smoker", "day"]] = None
    return {"visits": visits, "patients": patients}


def files(folder, *, absent=True, lacked=LACKED, policy=OPEN):
    """A tables file for each of three sites; absent columns, or empty ones."""
    frames = tables()
    named = {"clinic": write_site(folder / "clinic", {"patients": frames["patients"]})}
    for site, names in lacked.items():
        (folder / site).mkdir(parents=True)
        rows = frames["visits"][CUTS[site]]
        columns = [name.lower() for name in names] if absent else []
        rows.drop(columns=columns).to_csv(folder / site / "visits.csv", index=False)
        named[site] = folder / site / "tables.toml"
        text = f"[tables.visits]\npath = 'visits.csv'\nsite = '{site}'\n"
        text += f"absent = {list(names)}\n" if absent and names else ""
        named[site].write_text(text + policy)
    return named


def run(sites, sql=SQL, strategy="cg", **settings):
    settings = {"num_epochs": 4, "device": "cpu", **settings}
    grid = sites if isinstance(sites, WatchedGrid) else WatchedGrid(sites)
    return train(grid, sql, strategy, **settings)


def final(strategy):
    report = strategy.report
    return [*report.final_train.values(), *report.final_test.values()]


@pytest.mark.cases("cg-*", "boost-*", "personalised-*")
@pytest.mark.parametrize(
    ("strategy", "sql", "table", "columns"),
    [
        *(
            (name, SQL, "v", ["day", "smoker"])
            for name in ("cg", "admm", "sgd", "boost")
        ),
        ("personalised", ALONE, "visits", ["smoker"]),
    ],
)
def test_absent_columns_are_as_empty_ones(tmp_path, strategy, sql, table, columns):
    # few rounds are enough
    more = {"batch_size": 20} if strategy == "sgd" else {}
    runs = []
    for absent in (True, False):
        sites = files(tmp_path / str(absent), absent=absent)
        if strategy == "personalised":
            del sites["clinic"]
        runs.append(run(sites, sql, strategy, **more))
    assert final(runs[0]) == final(runs[1])
    encoders = [done.training_problem.encoders for done in runs]
    assert encoders[0] == encoders[1]
    texts = [text for text in runs[0].warnings if "absent" in text]
    assert runs[0].report.warnings[: len(texts)] == texts
    assert texts == [
        f"table {table!r}: column {name!r} is absent at 'south', and so missing in 40 "
        "of 90 rows (44 %)"
        for name in columns
    ]
    assert not any("absent" in text for text in runs[1].warnings)


def test_the_run_is_that_of_the_table_with_nulls(tmp_path):
    shards = run(files(tmp_path), num_epochs=40)
    expected = run(site_per_table(tmp_path / "a", tables()), num_epochs=40)
    assert final(shards) == pytest.approx(final(expected), rel=1e-9)
    encoders = [done.training_problem.encoders["v"] for done in (shards, expected)]
    assert encoders[0].features == encoders[1].features
    # three texts and the missing ones
    assert encoders[0].features["smoker"] == 4


@pytest.mark.parametrize("suffix", [" WHERE v.day IS NULL OR v.smoker <> 'no'", ""])
def test_explain_says_the_share_of_rows_after_the_filters(tmp_path, suffix):
    query = Query.from_sql(SQL + suffix)
    explained = Explain(query, Settings(sql=SQL, mode="explain"))
    explained.start(WatchedGrid(files(tmp_path)))
    frames = tables()["visits"]
    rows = frames[frames.day.isna() | (frames.smoker != "no")] if suffix else frames
    expected = f"missing in 40 of {len(rows)} rows ({4000 / len(rows):.0f} %)"
    assert sum(expected in text for text in explained.explanation["warnings"]) == 2


def test_the_refusal_names_what_works(tmp_path):
    lacking = files(tmp_path)
    text = lacking["south"].read_text()

    def declare(entry):
        lacking["south"].write_text(text.replace("absent = ['Smoker', 'day']", entry))

    declare("")
    match = (
        r"column 'smoker' is at site 'north', but not at 'south': .*rename = \{ theirs "
        r"= "
        r'"smoker" \}\).*absent = \["smoker"\] there'
    )
    with pytest.raises(SchemaError, match=match):
        run(lacking)
    declare('absent = ["smoker"]')
    with pytest.raises(SchemaError, match=r'absent = \["day"\] there'):
        run(lacking)
    declare('absent = ["smoker", "day"]')
    assert run(lacking).report.final_train


@pytest.mark.parametrize(
    ("lacked", "sql", "match"),
    [
        (
            ("cost",),
            SQL,
            "the label reads column 'cost', which is absent there .*without a label",
        ),
        (
            ("dose",),
            SQL.replace("v.cost", "v.cost + v.dose"),
            "the label reads column 'dose'",
        ),
        (("patient",), SQL, "'south': join key 0 reads column 'patient'.*would match"),
        (
            ("dose",),
            SQL.replace("v.smoker", "abs(v.dose) AS weight").replace("v.dose, E", "E"),
            "the weight reads column 'dose'",
        ),
    ],
)
def test_labels_weights_and_keys_must_be_there(tmp_path, lacked, sql, match):
    sites = files(tmp_path / "lacking", lacked={"north": (), "south": lacked})
    with pytest.raises(
        SchemaError, match=rf"{match}.*Run without this shard, or add the column"
    ):
        run(sites, sql)
    # both remedies that the error names
    del sites["south"]
    assert run(sites, sql).report.final_train
    assert run(files(tmp_path / "added"), sql).report.final_train


def test_a_split_needs_its_column_at_all_shards(tmp_path):
    with pytest.raises(SchemaError, match=r"reads column 'day', which is absent there"):
        run(files(tmp_path), test_split="time(v.day)")


def test_a_column_that_all_shards_lack_is_refused(tmp_path):
    everywhere = dict.fromkeys(CUTS, ("smoker", "day"))
    match = (
        r"column 'day' is absent at all its sites \('north', 'south'\).*leave it out"
    )
    with pytest.raises(SchemaError, match=match):
        run(files(tmp_path, lacked=everywhere))


def test_a_policy_is_about_absent_columns_too(tmp_path):
    """A strict policy without expressions lets the query read them, if it lists
    them.
    """
    columns = ["patient", "smoker", "dose", "cost", "day"]
    sql = SQL.replace("EXTRACT(year FROM v.day) AS year", "v.day")
    policy = f"[tables.visits.policy]\n{lenient(columns, 'expressions = false')}\n"
    allowed = files(tmp_path / "a", policy=policy)
    expected = run(files(tmp_path / "b"), sql)
    assert final(run(allowed, sql)) == final(expected)
    rules = lenient([name for name in columns if name != "smoker"])
    hidden = files(tmp_path / "c", policy=f"[tables.visits.policy]\n{rules}\n")
    with pytest.raises(QueryError, match="has no column 'smoker'"):
        run(hidden, sql)


def test_a_shard_of_new_rows_may_lack_columns(tmp_path):
    """Predictions are those for rows with empty columns, as every shard of the table
    lacks them.

    The type of a column that no shard has is that of training.
    """
    sites = files(tmp_path / "train", lacked=dict.fromkeys(CUTS, ()), absent=False)
    model = predicted.train(tmp_path / "state", sites, SQL, "cg", num_epochs=4)
    lacking = dict.fromkeys(CUTS, ("smoker", "day"))
    new = files(tmp_path / "new", lacked=lacking)
    empty = files(tmp_path / "empty", absent=False)
    frame = tables()["visits"][CUTS["north"]].assign(smoker=None, day=None)
    frame.to_csv(tmp_path / "empty" / "north" / "visits.csv", index=False)
    prediction = model.predict(new)
    expected = predicted.scored(model.table(empty))
    assert predicted.scored(prediction.predictions) == expected
    assert sum("90 of 90 rows (100 %)" in text for text in prediction.warnings) == 2


def test_empty_columns_take_the_type_of_other_shards():
    """A shard whose dates are all empty has no type of its own for EXTRACT."""
    frames = tables()
    shards = pieces(frames["visits"], CUT)
    shards[1]["day"] = pd.Series([None] * len(shards[1]), dtype=object)
    shards[1]["smoker"] = np.nan
    others = {"patients": [frames["patients"]]}
    done = train(one_per_site({"visits": shards, **others}), SQL, "cg")
    whole = train([{name: [frame]} for name, frame in frames.items()], SQL, "cg")
    assert final(done) == pytest.approx(final(whole), rel=1e-9)


@pytest.mark.parametrize(
    ("types", "match"),
    [
        # values have the type that the site says
        ({"age": "VARCHAR"}, "'types' declares 'age' as VARCHAR, which it cannot be"),
        ({"day": "BLOB"}, "'types' declares 'day' as BLOB, which it cannot be"),
        ({"none": "DATE"}, "'types' declares 'none' as DATE, which it cannot be"),
        ({"day": "DATE) FROM x; --"}, "'types"),
    ],
)
def test_a_server_names_types_of_columns_without_values_alone(tmp_path, types, match):
    @on_requests("query.extract")
    def change(seen):
        for part in seen.header["parts"]:
            part["types"] = types

    with pytest.raises(SiteError, match=match):
        run(WatchedGrid(files(tmp_path), change))
