"""A table by group is DuckDB's GROUP BY on the joined rows, and SciPy's tests of it."""

import numpy as np
import pandas as pd
import pytest
import scipy.stats

import tp_flower
from strategies.report_page.page import render
from tests.support.command_line import printed_by, refused_by
from tests.support.examples.orders import rows_of
from tests.support.federated import pieces, write_site
from tests.support.ledgers import ledger_lines
from tp_flower.errors import ModelError, QueryError, SettingsError, SiteError
from tp_flower.settings import PrivacySettings, Settings

SQL = """SELECT v.dose, v.ok, v.ward, p.age, p.sex, c.beds, c.kind FROM visits v
JOIN patients p ON v.pid = p.pid LEFT JOIN clinics c ON v.cid = c.cid"""
NAMES = {"v": ("dose", "ok", "ward"), "p": ("age", "sex"), "c": ("beds", "kind")}
NUMBERS = ("v.dose", "p.age", "c.beds")
KINDS = ["county", "private", "state"]
DECLARED = (
    f"c.kind=categories({', '.join(KINDS)}); p.sex=categories(f, m); "
    "v.ward=categories(a, b)"
)
ALLOWED = 'releases = { moments = "clear" }'
RANGES = "v.dose=range(0, 50); p.age=range(0, 120)"


def tables(seed: int = 0, visits: int = 300) -> dict[str, pd.DataFrame]:
    """Visits of patients, who may have two rows, in clinics that may lack."""
    rng = np.random.default_rng(seed)
    frames = {
        "visits": pd.DataFrame(
            {
                "pid": rng.integers(0, 60, visits),
                "cid": rng.integers(0, 9, visits),
                "dose": rng.gamma(2.0, 3.0, visits).round(2),
                "ok": rng.random(visits) < 0.3,
                "ward": rng.choice(np.array(["a", "b", "z", None]), visits),
                "code": (np.arange(visits) % 40).astype(str),
                "day": pd.date_range("2020-01-01", periods=visits),
            }
        ),
        "patients": pd.DataFrame(
            {
                "pid": rng.integers(0, 55, 70),
                "age": rng.normal(60.0, 12.0, 70).round(1),
                "sex": rng.choice(["f", "m"], 70),
            }
        ),
        "clinics": pd.DataFrame(
            {
                "cid": range(8),
                "beds": rng.integers(20, 900, 8).astype(float),
                "kind": rng.choice(KINDS, 8),
            }
        ),
    }
    frames["patients"].loc[rng.random(70) < 0.2, "age"] = np.nan
    return frames


def sites(frames: dict[str, pd.DataFrame], *cuts: int) -> dict[str, object]:
    visits = pieces(frames["visits"], *cuts)
    others = {name: frames[name] for name in ("patients", "clinics")}
    return {"hospital": {"visits": visits}} | {n: {n: f} for n, f in others.items()}


def joined(frames: dict[str, pd.DataFrame]) -> pd.DataFrame:
    rows = rows_of(SQL, frames)
    rows.columns = [f"{table}.{name}" for table in NAMES for name in NAMES[table]]
    return rows


def cells(frame: pd.DataFrame, variable: str, category: str = "") -> pd.DataFrame:
    chosen = (frame["variable"] == variable) & (frame["category"] == category)
    return frame[chosen].set_index("group")


@pytest.fixture(scope="module")
def described() -> tp_flower.FittedModel:
    how = {"strategy": "moments", "describe": "table-one", "test_fraction": 0.0}
    return tp_flower.fit(SQL, sites(tables()), group_by="c.kind", **how)


def check_numbers(frame: pd.DataFrame, rows: pd.DataFrame, by: str) -> None:
    for name in NUMBERS:
        found = cells(frame, name)
        for group, expected in [("all", rows), *rows.groupby(by, dropna=False)]:
            cell = found.loc["(missing)" if pd.isna(group) else group]
            values = expected[name]
            assert cell["count"] == values.count()
            assert cell["missing"] == values.isna().sum()
            if values.count() > 1:
                assert cell["mean"] == pytest.approx(values.mean(), rel=1e-6)
                assert cell["deviation"] == pytest.approx(values.std(), rel=1e-5)


@pytest.mark.parametrize("seed", range(2))
def test_figures_are_those_of_groups_of_the_join(seed):
    frames = tables(seed)
    frame = tp_flower.table_one(
        SQL, sites(frames), by="c.kind", encoders=DECLARED, min_cell=1
    )
    rows = joined(frames)
    check_numbers(frame, rows, "c.kind")
    sizes = cells(frame, "joined rows")["count"].drop("all")
    by_kind = rows["c.kind"].fillna("(missing)").value_counts()
    assert sizes[sizes > 0].to_dict() == by_kind.to_dict()
    # of values that are not declared one category, and none of those that are missing
    wards = rows["v.ward"].replace("z", "(other)")
    crossed = pd.crosstab(wards, rows["c.kind"].fillna("(missing)"))
    for ward in crossed.index:
        found = cells(frame, "v.ward", ward)
        counts = found.loc[crossed.columns, "count"]
        assert counts.tolist() == crossed.loc[ward].tolist()
        shares = crossed.loc[ward] / crossed.sum()
        np.testing.assert_allclose(found.loc[crossed.columns, "share"], shares)
        for group in crossed.columns:
            count, size = int(crossed.loc[ward, group]), int(crossed[group].sum())
            interval = scipy.stats.binomtest(count, size).proportion_ci(method="wilson")
            assert found.loc[group, ["low", "high"]].tolist() == pytest.approx(interval)
    rows["v.ward"] = wards
    for name in ("v.ward", "p.sex", "v.ok"):
        counts = pd.crosstab(rows[name], rows["c.kind"])
        expected = scipy.stats.chi2_contingency(counts, correction=False)
        found = frame[frame["variable"] == name].iloc[0]
        assert found["statistic"] == pytest.approx(expected.statistic, abs=1e-9)
        assert found["p"] == pytest.approx(expected.pvalue, abs=1e-9)
    for name in ("v.dose", "p.age"):
        groups = [of[name].dropna() for _, of in rows.groupby("c.kind")]
        expected = scipy.stats.f_oneway(*groups)
        found = cells(frame, name).iloc[0]
        assert found["statistic"] == pytest.approx(expected.statistic, rel=1e-5)
        assert found["p"] == pytest.approx(expected.pvalue, rel=1e-4)


def test_shards_have_the_figures_of_the_table():
    frames = tables()
    how = {"by": "c.kind", "encoders": f"{DECLARED}; {RANGES}", "min_cell": 1}
    whole = tp_flower.table_one(SQL, sites(frames), **how)
    parts = tp_flower.table_one(SQL, sites(frames, 120, 200), **how)
    check_numbers(parts, joined(frames), "c.kind")
    pd.testing.assert_frame_equal(whole, parts, rtol=1e-5)
    frames["visits"]["dose"] *= 99.0
    advice = r"moments of dose are .* encoders = 'v.dose=range\(<low>, <high>\)'$"
    with pytest.raises(SiteError, match=advice):
        tp_flower.table_one(SQL, sites(frames, 120), by="c.kind", min_cell=1)


@pytest.mark.parametrize("unit", [1e10, 1e20])
def test_huge_numbers_are_described_or_named(unit):
    frames = tables()
    frames["patients"]["age"] *= unit
    if unit < 1e15:
        # the squares have more bits than words
        how = {"by": "c.kind", "encoders": DECLARED, "min_cell": 1}
        frame = tp_flower.table_one(SQL, sites(frames), **how)
        check_numbers(frame, joined(frames), "c.kind")
        return
    with pytest.raises(SiteError, match="table p: the moments of age are out of range"):
        tp_flower.table_one(SQL, sites(frames))
    ranged = tp_flower.table_one(
        SQL, sites(frames), encoders=f"p.age=range(0, {unit * 120})"
    )
    mean = cells(ranged, "p.age").loc["all", "mean"]
    assert mean == pytest.approx(joined(frames)["p.age"].mean(), rel=1e-6)


def test_groups_need_not_be_selected_and_categories_have_numbers():
    frames = tables()
    frames["clinics"]["code"] = [1, 2, 1, 2, 1, 2, 1, 2]
    query = SQL.replace(", c.kind", "")
    frame = tp_flower.table_one(query, sites(frames), by="c.kind", min_cell=1)
    rows = joined(frames)
    sizes = cells(frame, "joined rows")["count"].drop(["all", "(missing)"])
    assert sorted(sizes) == sorted(rows["c.kind"].value_counts())
    texts = {*frame["category"], *frame["group"]}
    assert not texts & {"f", "m", "a", "b", "z", *KINDS}
    assert {"true", "false", "[0]", "[1]"} <= texts
    how = {"encoders": "c.code=categories(1, 2)", "min_cell": 1}
    coded = tp_flower.table_one(query, sites(frames), by="c.code", **how)
    assert cells(coded, "joined rows").index.tolist() == ["all", "1", "2", "(missing)"]


def test_labels_are_described_and_rates_are_counts_by_time():
    frames = tables()
    query = SQL.replace("v.dose, v.ok", "v.dose AS time, v.ok AS event")
    frame = tp_flower.table_one(
        query, sites(frames), by="p.sex", encoders="p.sex=categories(f, m)", min_cell=1
    )
    rows = joined(frames)
    rates = cells(frame, "rate")
    for group, of in [("all", rows), *rows.groupby("p.sex")]:
        events, time = of["v.ok"].sum(), of["v.dose"].sum()
        assert rates.loc[group, "events"] == events
        assert rates.loc[group, "rate"] == pytest.approx(events / time)
        low = scipy.stats.chi2.ppf(0.025, 2 * events) / 2 / time
        high = scipy.stats.chi2.ppf(0.975, 2 * events + 2) / 2 / time
        assert rates.loc[group, "low"] == pytest.approx(low)
        assert rates.loc[group, "high"] == pytest.approx(high)
    sums = rows.groupby("p.sex")[["v.ok", "v.dose"]].sum().astype(float)
    events, time = sums["v.ok"], sums["v.dose"]
    expected = scipy.stats.chisquare(events, events.sum() * time / time.sum())
    assert rates["statistic"].iloc[0] == pytest.approx(expected.statistic, rel=1e-6)
    assert rates["p"].iloc[0] == pytest.approx(expected.pvalue, rel=1e-6)
    labelled = SQL.replace("v.dose", "v.dose AS label")
    frame = tp_flower.table_one(labelled, sites(frames), min_cell=1)
    (found,) = cells(frame, "v.outcome")["mean"]
    assert found == pytest.approx(rows["v.dose"].mean())
    assert frame["p"].isna().all()


def test_small_cells_are_hidden_and_do_not_follow():
    frames = tables(visits=200)
    how = {"by": "c.kind", "encoders": DECLARED}
    whole = tp_flower.table_one(SQL, sites(frames), min_cell=1, **how)
    shown = tp_flower.table_one(SQL, sites(frames), min_cell=30, **how)
    assert (whole["count"] < 30).any()
    assert shown["count"].isna().any()
    assert not (shown["count"] < 30).any()
    hidden = shown["count"].isna()
    for name in ("mean", "deviation", "share"):
        assert shown.loc[hidden, name].isna().all()
    wards = shown[shown["variable"] == "v.ward"]
    assert wards["p"].isna().all()
    counts = wards.pivot_table("count", "category", "group", dropna=False)
    # a hidden cell is not the difference of the row's sum and the others
    alone = counts.notna().sum(axis=1) == counts.shape[1] - 1
    assert not alone.any()


def test_a_deviation_that_rounding_decides_is_said_to_be_so():
    frames = tables()
    frames["visits"]["dose"] = 1e5 + frames["visits"]["dose"]
    plain = tp_flower.table_one(SQL, sites(frames), min_cell=1)
    assert any("v.dose: its deviation" in note for note in plain.attrs["notes"])
    ranged = tp_flower.table_one(
        SQL, sites(frames), encoders="v.dose=range(100000, 100050)", min_cell=1
    )
    assert not any("v.dose" in note for note in ranged.attrs["notes"])
    (found,) = cells(ranged, "v.dose")["deviation"]
    assert found == pytest.approx(joined(frames)["v.dose"].std(), rel=1e-4)


@pytest.mark.parametrize(
    ("query", "how", "problem"),
    [
        (SQL, {"by": "c.sort"}, "sort"),
        (SQL, {"by": "dose"}, r"v.dose=categories\(<a>, <b>\)"),
        (SQL, {"encoders": "v.dose=bins(3)"}, "v.dose has the encoder"),
        (SQL.replace("v.ok", "v.day"), {}, "v.day is a time"),
        (SQL.replace("v.ok", "v.cid AS weight"), {}, "leave 'AS weight' out"),
        (SQL, {"by": "v.code"}, "v.code has 40 categories, and at most 32 groups"),
        (SQL, {"test_fraction": 0.3}, "set test-fraction = 0"),
        (SQL, {"sample": 0.5}, "not of a sample"),
        (SQL, {"privacy_features": "statistics"}, "has no noise"),
    ],
)
def test_refusals(query, how, problem):
    how = {"by": "c.kind", **how}
    with pytest.raises((QueryError, SettingsError), match=problem):
        tp_flower.table_one(query, sites(tables()), **how)


def at_owners(folder, frames: dict[str, pd.DataFrame], rules: str) -> dict[str, object]:
    return {
        name: write_site(folder / name, {name: frame}, {name: f"{rules}\n{ALLOWED}"})
        for name, frame in frames.items()
    }


def test_policies_refuse_what_they_refuse_of_moments(tmp_path):
    frames = tables()
    home = tmp_path / "home"
    how = {"by": "c.kind", "home": home, "test_fraction": 0.0}
    files = at_owners(
        tmp_path / "strict", frames, "min-count = 12\nexpressions = false"
    )
    refusal = r"\(min-count = 12\) refuses: a description of 10 rows; set min-cell = 12"
    with pytest.raises(SiteError, match=refusal):
        tp_flower.table_one(SQL, files, **how)
    # clinics have 8 rows
    match = (
        r"moments of column '\w+', which is the same in all but fewer rows; leave it"
    )
    with pytest.raises(SiteError, match=match):
        tp_flower.table_one(SQL, files, min_cell=12, **how)
    files["clinics"] = write_site(tmp_path / "clinics", {"clinics": frames["clinics"]})
    frame = tp_flower.table_one(SQL, files, min_cell=12, **how)
    assert (frame["count"].dropna() >= 12).all()
    releases = [line["release"] for line in ledger_lines(home / "state", "note")]
    told = [each["scope"] for each in releases if each["what"] == "second-moments"]
    assert len(told) >= 3
    assert all(text.startswith("not covered: sums over") for text in told)


def test_a_policy_demands_a_least_cell(tmp_path):
    files = at_owners(tmp_path, tables(), "min-count = 1\nmin-cell = 15")
    how = {"by": "c.kind", "home": tmp_path / "home"}
    refusal = r"\(min-cell = 15\) refuses: a description of 14 rows; set min-cell = 15"
    with pytest.raises(SiteError, match=refusal):
        tp_flower.table_one(SQL, files, min_cell=14, **how)
    frame = tp_flower.table_one(SQL, files, min_cell=15, **how)
    assert (frame["count"].dropna() >= 15).all()


def test_few_missing_values_are_not_told(tmp_path):
    frames = tables()
    patients = frames["patients"]
    patients["age"] = patients["age"].fillna(60.0)
    patients.loc[:2, "age"] = np.nan
    files = at_owners(tmp_path, frames, "min-count = 5")
    files["clinics"] = write_site(tmp_path / "c", {"clinics": frames["clinics"]})
    how = {"by": "p.sex", "home": tmp_path / "home"}
    with pytest.raises(SiteError, match=r"column 'age'.*let them count as the mean"):
        tp_flower.table_one(SQL, files, **how)
    frame = tp_flower.table_one(SQL, files, encoders="p.age=none missing=mean", **how)
    found = cells(frame, "p.age").loc["all"]
    assert found["missing"] == 0
    rows = joined(frames)
    assert found["mean"] == pytest.approx(rows["p.age"].mean(), rel=1e-6)


def test_a_description_is_no_model(described):
    assert "Joined rows by c.kind" in described.text()
    assert "FittedModel" in repr(described)
    assert described.report["model"] == ""
    with pytest.raises(ModelError, match="describes joined rows"):
        described.predict()


def test_a_command_prints_the_table_and_trains_no_model(tmp_path, monkeypatch):
    monkeypatch.setenv("TP_FLOWER_HOME", str(tmp_path / "home"))
    for name, frame in tables().items():
        write_site(tmp_path / name, {name: frame})
    files = "\n".join(
        f"[tables.{name}]\npath = '{name}/{name}.csv'\nsite = 'at {name}'"
        for name in tables()
    )
    (tmp_path / "tables.toml").write_text(files)
    config = f'sql = """{SQL}"""\ntables = "tables.toml"\ntest-fraction = 0.3\n'
    (tmp_path / "run.toml").write_text(config)
    text = printed_by("table-one", tmp_path / "run.toml", "--by", "c.kind")
    assert "No model is trained: every site's ledger" in text
    for part in ("Joined rows by c.kind", "v.ok = true", "p.age missing", "(missing)"):
        assert part in text
    assert not (tmp_path / "home" / "models").exists()
    reason = refused_by("kaplan-meier", tmp_path / "run.toml", status=2)
    assert "kaplan-meier' needs curve-times" in reason


@pytest.mark.cases("x", "-1", "odd4", "odd5", "odd6")
@pytest.mark.parametrize("odd", [None, "x", -1, [], {}, [None], [{"rows": 3}]])
def test_a_page_shows_what_is_left_of_a_damaged_report(described, odd):
    report = described.report
    for key, value in report["moments"].items():
        damaged = {**report["moments"], key: odd}
        assert "<html" in render({**report, "moments": damaged})
        records = value if key in ("groups", "variables") else [{}]
        for name in records[0]:
            damaged[key] = [{**value[0], name: odd}, *value[1:]]
            assert "<html" in render({**report, "moments": damaged})


TWICE = SQL.replace("p.sex", "p.sex AS first, p.sex AS second")
WEIGHED = SQL.replace("v.ok", "v.cid AS weight")


@pytest.mark.parametrize(
    ("query", "how", "mended_query", "mended"),
    [
        (SQL, {"by": "v.cid"}, SQL, {"encoders": "v.cid=categories(1, 2)"}),
        (SQL, {"encoders": "v.dose=bins(3)"}, SQL, {"encoders": "v.dose=none"}),
        (TWICE, {"by": "p.sex"}, TWICE, {"by": "p.first"}),
        (WEIGHED, {}, WEIGHED.replace("AS weight", "AS load"), {}),
    ],
)
def test_advice_about_descriptions_works(query, how, mended_query, mended):
    with pytest.raises((QueryError, SettingsError), match=r"write|use|leave"):
        tp_flower.table_one(query, sites(tables()), min_cell=1, **how)
    how |= mended
    assert len(tp_flower.table_one(mended_query, sites(tables()), min_cell=1, **how))


@pytest.mark.parametrize(
    ("how", "mended"),
    [
        ({"test_fraction": 0.2}, {"test_fraction": 0.0}),
        ({"row_weight": "entity"}, {"row_weight": "joined"}),
        (
            {"privacy": PrivacySettings(features="statistics", label_range="0, 5")},
            {"privacy": PrivacySettings()},
        ),
        ({"describe": "none", "group_by": "c.kind"}, {"describe": "table-one"}),
    ],
)
def test_advice_about_settings_works(how, mended):
    plain = {"strategy": "moments", "describe": "table-one", "test_fraction": 0.0}
    with pytest.raises(SettingsError, match=r"set|leave"):
        Settings(**{**plain, **how})
    assert Settings(**{**plain, **how, **mended}).strategy == "moments"
