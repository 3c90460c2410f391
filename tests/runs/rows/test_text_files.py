"""What a text file means: once for all shards of a table, said, and kept with the
model.

A run is compared with the same run on the values themselves, in Parquet files that
declare them.
"""

from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.support.command_line import invoke, printed_by, refused_by
from tests.support.federated import (
    WatchedGrid,
    on_requests,
    site_per_table,
    train,
)
from tests.support.files import read_json, toml_lines
from tp_flower.errors import SiteError

pytestmark = pytest.mark.usefixtures("home")


class Tables:
    """Tables ``a`` and ``b`` in CSV files of a folder, and runs over them.

    A table is a frame, or a list of one per shard; ``options`` are lines of the entry
    of ``a``, or of both with ``for_both``.
    """

    def __init__(self, folder, a, b, options="", *, for_both=False):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        lines = []
        for table, value in (("a", a), ("b", b)):
            shards = value if isinstance(value, list) else [value]
            for number, frame in enumerate(shards):
                path = folder / f"{table}{number}.csv"
                frame.to_csv(path, index=False)
                lines += [f"[[tables.{table}.shards]]", f"path = '{path.name}'"]
                lines.append(f"site = '{table}{number}'")
                lines += [options] * (for_both or table == "a")
        (folder / "tables.toml").write_text("\n".join(lines))

    def run(self, sql, task="train", refuses=False, **settings):
        """The report of a run, or why it was refused."""
        how = {"tables": "tables.toml", "sql": sql, "model-name": "texts"}
        if task == "train":
            how |= {"test-fraction": 0.0, "strategy": "admm", "num-epochs": 3}
        file = self.folder / "run.toml"
        file.write_text(toml_lines(how | settings))
        if refuses:
            result = invoke(task, file)
            assert result.exit_code != 0
            return " ".join((result.stdout + result.stderr).split())
        output = printed_by(task, file)
        path = next(line for line in output.splitlines() if line.startswith("Report: "))
        return read_json(Path(path.removeprefix("Report: ")))


SQL = "SELECT a.y AS label, a.x, b.z FROM a JOIN b ON a.k = b.k"


def warnings_of(report, words):
    return [text for text in report["warnings"] if words in text]


def codes(values, rows):
    """Rows of ``a`` with these keys in turn, and the keys of ``b``."""
    number = np.arange(rows)
    keys = np.array(values)[number % len(values)]
    a = pd.DataFrame({"k": keys, "y": number % 10 + 0.5, "x": number})
    return a, pd.DataFrame({"k": values, "z": np.arange(len(values))})


@pytest.mark.cases("values1-*", "values2-*", "values3-*", "values4-*")
@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1E5", "10E4", "1.0E5", "2E5", "20E4", "7"], "DOUBLE"),
        (["1.1", "1.10", "2.5", "2.50", "3", "3.0", "4"], "DOUBLE"),
        (["2024-01-02", "2024-1-2", "2024/01/02", "2024-01-03", "2024-1-3"], "DATE"),
        (
            ["2024-01-02 10:00:00", "2024-01-02T10:00:00", "2024-01-02 10:00"],
            "TIMESTAMP",
        ),
        (["0.123456789012345678", "0.123456789012345679", "0.5"], "DOUBLE"),
    ],
)
def test_keys_that_would_be_equal_values_are_compared_as_texts(tmp_path, values, kind):
    a, b = codes(values, 60)
    tables = Tables(tmp_path, a, b)
    report = tables.run(SQL)
    assert report["joined-rows"]["train"] == 60
    remedy = f'types = {{ k = "{kind}" }}'
    warnings = warnings_of(report, "'k' is compared as text")
    assert len(warnings) == 2
    assert all(remedy in text for text in warnings)
    # followed, the advice compares values, and no longer warns
    typed = Tables(tmp_path / "typed", a, b, remedy, for_both=True)
    report = typed.run(SQL)
    assert report["joined-rows"]["train"] > 60
    assert not warnings_of(report, "compared as text")


def test_building_codes_are_no_dates(tmp_path):
    a, b = codes(["01-02-03", "2-1-3", "02-01-03", "3-1-2", "03-01-02"], 50)
    report = Tables(tmp_path, a, b).run(SQL)
    assert report["joined-rows"]["train"] == 50


def test_numbers_that_are_written_alike_stay_numbers(tmp_path):
    a, b = codes(["1.10", "2.50", "3.00"], 30)
    b["k"] = [1.1, 2.5, 3.0]
    report = Tables(tmp_path, a, b).run(SQL)
    assert report["joined-rows"]["train"] == 30


def days(written, first_days_only=True):
    """Days of 2024, as dates and as written texts."""
    every = [date(2024, 1, 1) + timedelta(days=n) for n in range(366)]
    chosen = [day for day in every if not first_days_only or day.day <= 12]
    return chosen, [day.strftime(written) for day in chosen]


@pytest.mark.parametrize("written", ["%m/%d/%Y", "%d-%m-%y", "%m-%d-%Y"])
def test_key_of_two_formats_is_refused_until_one_is_named(tmp_path, written):
    dates, texts = days(written)
    number = np.arange(len(dates))
    level = np.sin(number)
    a = pd.DataFrame({"d": texts, "y": level + 0.01 * (number % 3), "x": 0.1 * number})
    b = pd.DataFrame({"d": dates, "t": level})
    sql = "SELECT a.y AS label, a.x, b.t FROM a JOIN b ON a.d = b.d"
    message = Tables(tmp_path, a, b).run(sql, refuses=True)
    assert "all of which fit the formats" in message
    assert f'dates = "{written}"' in message
    # `check` says it, too
    assert "all of which fit the formats" in refused_by("check", tmp_path / "run.toml")
    report = Tables(tmp_path, a, b, f'dates = "{written}"').run(sql, strategy="cg")
    assert report["joined-rows"]["train"] == len(dates)
    assert report["final"]["train"]["r2"] > 0.999
    assert not warnings_of(report, "formats")


def test_days_that_are_equal_in_both_formats_are_no_obstacle(tmp_path):
    texts = [f"{n:02}/{n:02}/2024" for n in range(1, 13)]
    a, b = codes(texts, 60)
    b["k"] = [date(2024, n, n) for n in range(1, 13)]
    assert Tables(tmp_path, a, b).run(SQL)["joined-rows"]["train"] == 60


def test_split_by_a_time_of_two_formats_is_refused(tmp_path):
    _, texts = days("%m/%d/%Y")
    number = np.arange(len(texts))
    a = pd.DataFrame({"d": texts, "y": number % 7, "x": number, "k": number % 3})
    b = pd.DataFrame({"k": [0, 1, 2], "z": [0.0, 1.0, 4.0]})
    settings = {"test-split": "time(a.d)", "test-fraction": 0.2}
    message = Tables(tmp_path, a, b).run(SQL, refuses=True, **settings)
    assert "splits by the days of column 'd'" in message
    tables = Tables(tmp_path, a, b, 'dates = "%m/%d/%Y"')
    assert sum(tables.run(SQL, **settings)["joined-rows"].values()) == len(texts)


MONTHS = "SELECT a.y AS label, month(a.d) AS m, b.z FROM a JOIN b ON a.k = b.k"


def months(written, chosen):
    """Rows whose label is nearly the month of their day."""
    number = np.arange(len(chosen))
    label = [day.month + 0.05 * (n % 3) for n, day in enumerate(chosen)]
    frame = pd.DataFrame(
        {"k": number % 5, "y": label, "d": [d.strftime(written) for d in chosen]}
    )
    return frame, pd.DataFrame({"k": range(5), "z": np.cos(range(5))})


def test_shards_of_a_table_read_days_alike(tmp_path):
    """One shard shows the month first; the other fits both, and follows it."""
    every = days("%Y", first_days_only=False)[0]
    first = days("%Y")[0]
    clear, b = months("%m/%d/%Y", every)
    open_, _ = months("%m/%d/%Y", first)
    iso, _ = months("%Y-%m-%d", first)
    report = Tables(tmp_path, [open_, clear, iso], b).run(MONTHS, strategy="cg")
    assert report["joined-rows"]["train"] == len(every) + 2 * len(first)
    assert report["final"]["train"]["r2"] > 0.999
    assert not warnings_of(report, "are read as")


def test_feature_of_two_formats_is_said_and_explained(tmp_path):
    first = days("%Y")[0]
    a, b = months("%m/%d/%Y", first)
    tables = Tables(tmp_path, a, b)
    (warning,) = warnings_of(tables.run(MONTHS), "column 'd'")
    assert "are read as %d/%m/%Y, but all of them fit %m/%d/%Y, too" in warning
    output = " ".join(printed_by("explain", tmp_path / "run.toml", "--full").split())
    assert "days of d in the texts of a: %d/%m/%Y" in output


def test_model_reads_new_files_as_it_has_read_the_old_ones(tmp_path):
    every = days("%Y", first_days_only=False)[0]
    first = days("%Y")[0]
    a, b = months("%m/%d/%Y", every)
    Tables(tmp_path, a, b).run(MONTHS, strategy="cg")
    new, _ = months("%m/%d/%Y", first)
    report = Tables(tmp_path / "new", new, b).run(MONTHS, "evaluate")
    assert report["metrics"]["r2"] > 0.999
    assert not report["warnings"]
    # another format that reads all texts is one of the same kind of values
    iso, _ = months("%Y-%m-%d", first)
    report = Tables(tmp_path / "iso", iso, b).run(MONTHS, "evaluate")
    assert report["metrics"]["r2"] > 0.999


def labelled(x, y):
    number = np.arange(len(x))
    a = pd.DataFrame({"k": number % 5, "y": y, "x": x})
    return a, pd.DataFrame({"k": range(5), "z": np.cos(range(5))})


def predictions(report):
    return pd.read_parquet(report["predictions"]["file"])


@pytest.mark.parametrize(
    ("texts", "new"),
    [
        (["02139", "10001", "90210", "60601"], ["10001", "90210", "60601"]),
        (["T", "F", "U"], ["T", "F"]),
        (["Yes", "No", "Maybe"], ["Yes", "No"]),
        (["true", "false", "unknown"], ["true", "false"]),
        (["2024-01-01", "2024-02-01", "unknown"], ["2024-01-01", "2024-02-01"]),
        (["1.5", "2.5", "few"], ["1.5", "2.5"]),
    ],
)
def test_texts_that_look_like_numbers_in_the_new_file(tmp_path, texts, new):
    effect = dict(zip(texts, (1.0, 5.0, 9.0, 2.0), strict=False))
    x = [texts[n % len(texts)] for n in range(60)]
    a, b = labelled(x, [effect[text] for text in x])
    Tables(tmp_path, a, b).run(SQL, strategy="cg")
    new_a, _ = labelled(new * 3, [0.0] * len(new) * 3)
    report = Tables(tmp_path / "new", new_a, b).run(SQL, "predict")
    actual = predictions(report)["prediction"].to_numpy()
    assert actual == pytest.approx([effect[text] for text in new * 3], abs=0.3)


def test_feature_of_another_kind_is_refused_with_both(tmp_path):
    a, b = labelled(np.arange(60) % 7, np.arange(60) % 7 * 0.5)
    for strategy in ("boost", "cg"):
        Tables(tmp_path, a, b).run(SQL, strategy=strategy)
        new, _ = labelled(days("%Y-%m-%d")[1][:20], np.zeros(20))
        message = Tables(tmp_path / "new", new, b).run(SQL, "predict", refuses=True)
        assert "column 'x' is DATE, but was BIGINT when model texts@" in message
        assert 'types = { "x" = "BIGINT" }' in message
    # where the values are of that type after all, the advice reads them
    new, _ = labelled(np.arange(20) % 7, np.zeros(20))
    new["x"] = new["x"].astype(str) + "?"
    new.loc[new.index[3:], "x"] = "5"
    tables = Tables(tmp_path / "new", new, b)
    assert "is VARCHAR, but was BIGINT" in tables.run(SQL, "predict", refuses=True)
    options = 'types = { "x" = "BIGINT" }\nnulls = ["0?", "1?", "2?"]'
    tables = Tables(tmp_path / "new", new, b, options)
    assert len(predictions(tables.run(SQL, "predict"))) == 20


def test_yes_and_no_are_the_classes_of_a_label(tmp_path):
    x = np.arange(60)
    a, b = labelled(x, np.where(x % 60 > 30, "yes", "no"))
    Tables(tmp_path, a, b).run(SQL, strategy="cg")
    report = Tables(tmp_path / "new", a, b).run(SQL, "predict")
    table = predictions(report)
    assert set(table["prediction"]) == {"yes", "no"}
    assert {"probability.no", "probability.yes"} <= set(table.columns)
    maybe = a.assign(y=["maybe", *a["y"][1:]])
    message = Tables(tmp_path / "new", maybe, b).run(SQL, "evaluate", refuses=True)
    assert "the model does not know ('maybe'): its classes are 'no', 'yes'" in message


@pytest.mark.parametrize("first", [0, 1])
def test_shard_without_values_has_the_types_of_its_table(tmp_path, first):
    """Whichever shard comes first: expressions over its columns have a meaning
    there.
    """
    x = np.arange(40)
    a, b = labelled(x % 7, x % 7 + 0.1 * (x % 3))
    a["d"] = [f"2024-01-{n % 28 + 1:02}" for n in x]
    shards = [a[:0], a] if first == 0 else [a, a[:0]]
    sql = (
        "SELECT a.y * 2 AS label, a.x * 2 AS twice, MONTH(a.d) AS m, DAY(a.d) AS d, "
        "b.z FROM a"
    )
    report = Tables(tmp_path, shards, b).run(f"{sql} JOIN b ON a.k = b.k")
    whole = Tables(tmp_path / "whole", a, b).run(f"{sql} JOIN b ON a.k = b.k")
    assert report["joined-rows"]["train"] == 40
    losses = [each["final"]["train"]["loss"] for each in (report, whole)]
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.parametrize(
    ("written", "options"),
    [
        ("%Y-%m-%d", 'types = { d = "date" }'),
        ("%Y-%m-%d", 'types = { d = "timestamp" }'),
        ("%d_%m_%Y", 'dates = "%d_%m_%Y"'),
        ("%d|%m|%Y", 'dates = "%d|%m|%Y"'),
        ("%d %b %Y", 'dates = "%d %b %Y"'),
    ],
)
def test_owner_says_how_days_are_written_in_any_spelling(tmp_path, written, options):
    every, _ = days("%Y", first_days_only=False)
    a, b = months(written, every)
    report = Tables(tmp_path, a, b, options).run(MONTHS, strategy="cg")
    assert report["final"]["train"]["r2"] > 0.999


@pytest.mark.parametrize(
    ("readings", "match"),
    [
        (
            {"x": {"type": "DATE"}},
            "'readings' has a reading of 'x' that does not fit its texts",
        ),
        (
            {"d": {"type": "DATE", "format": "%m.%d.%Y"}},
            "a reading of 'd' that does not fit",
        ),
        (
            {"none": {"type": "VARCHAR"}},
            "'readings' names 'none', which is no column of texts",
        ),
        ({"x": {"type": "DATE) FROM x; --"}}, "'readings"),
    ],
)
def test_a_server_chooses_among_the_readings_that_a_site_has_listed(
    tmp_path, readings, match
):
    a, b = labelled(np.arange(40) % 7, np.arange(40))
    a["d"] = [f"{n % 12 + 1:02}/{n % 12 + 1:02}/2024" for n in range(40)]
    sites = site_per_table(tmp_path, {"a": a, "b": b})

    @on_requests("query.extract")
    def change(seen):
        seen.header["parts"][0]["readings"] = readings

    with pytest.raises(SiteError, match=match):
        train(WatchedGrid(sites, change, state=tmp_path / "state"), SQL, "cg")
