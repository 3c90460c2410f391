"""Second moments with noise: what it covers, what it costs, and what it leaves."""

from itertools import count
from pathlib import Path

import numpy as np
import pytest

from strategies.methods.moments.strategy import TablePuppetMoments
from tests.support.examples.orders import fit, sites, sql, tables
from tests.support.federated import (
    LocalGrid,
    WatchedGrid,
    on_requests,
    pieces,
    write_site,
)
from tests.support.ledgers import ledger_lines
from tp_flower import api
from tp_flower.errors import QueryError, ReplyError, SettingsError, SiteError
from tp_flower.query import Query
from tp_flower.randomness import NoiseSource
from tp_flower.reports.records import report_dict
from tp_flower.settings import PrivacySettings

ENCODERS = "o.day=range(-4,4);u.age=range(0,100);i.price=range(0,40);m.size=range(-4,4)"
RANGE = (-4.0, 8.0)
HARDLY = 1e-7
PRIVATE = 'epsilon = 2.0\nreleases = { moments = "private" }'


def privacy(**how: object) -> PrivacySettings:
    return PrivacySettings(features="statistics", label_range=RANGE, **how)


def trained(
    grid,
    private: str = "o",
    *,
    split: str = "random",
    task: str = "auto",
    **how: object,
):
    """A run with noise on the moments of some tables."""
    strategy = TablePuppetMoments(
        Query.from_sql(sql()),
        encoders=ENCODERS,
        private_tables=private,
        test_split=split,
        task=task,
        privacy=privacy(**how),
    )
    strategy.start(grid)
    return strategy


@pytest.fixture
def noise_of_known_keys(monkeypatch):
    """Every message has noise of its own, the same in each run of the tests."""
    keys = count()
    monkeypatch.setattr(
        "client_apps.rounds.site.NoiseSource",
        lambda _: NoiseSource(next(keys).to_bytes(32)),
    )


def frames_of(orders: int = 300) -> list[dict]:
    return [{name: frame} for name, frame in tables(orders).items()]


@pytest.mark.cases("-o.qty", "o-o.kind", "U, i-o.qty")
@pytest.mark.parametrize("label", ["o.qty", "o.kind"])
@pytest.mark.parametrize("private", ["", "o", "U, i"])
def test_hardly_any_noise_changes_hardly_anything(label, private):
    how = {"encoders": ENCODERS, "test_fraction": 0.25}
    exact = fit(label, **how)
    noisy = fit(
        label,
        **how,
        private_tables=private,
        privacy_features="statistics",
        privacy_noise_multiplier=HARDLY,
        privacy_label_range="-90, 99",
    )
    for part in ("train", "test"):
        expected = exact.report["final"][part]
        assert noisy.report["final"][part] == pytest.approx(expected, abs=1e-3)
    keys = ["table", "column", *(["output"] if label == "o.kind" else [])]
    found, expected = (
        model.coefficients.set_index(keys)["coefficient"] for model in (noisy, exact)
    )
    np.testing.assert_allclose(found, expected[found.index], atol=2e-3)
    statistics = ["standard_error", "low", "high"]
    if label == "o.qty":
        of_numbers = noisy.coefficients.set_index(keys)[statistics]
        ours = exact.coefficients.set_index(keys)[statistics].loc[of_numbers.index]
        # normal quantiles in place of those of t
        np.testing.assert_allclose(of_numbers, ours, rtol=1e-2, atol=2e-3)
        assert "count both the joined rows" in noisy.report["moments"]["errors"]
        assert "unshrunk" in noisy.text()
    else:
        assert "a discriminant is no" in noisy.report["moments"]["errors"]
        assert "noise alone gives it" in noisy.text()
    low, high = noisy.report["moments"]["noise"]["test"]["loss"]
    assert low <= noisy.report["final"]["test"]["loss"] <= high < low + 1e-3


# with noise of random keys, 176 draws exceed five standard errors once in 10^5 runs
@pytest.mark.usefixtures("noise_of_known_keys")
@pytest.mark.parametrize(("private", "cuts"), [("o", ()), ("", ()), ("o, i", (120,))])
def test_noise_on_moments_is_as_told(private, cuts):
    """Every entry is as far from the clipped rows' as its deviation says."""
    frames = tables()
    shards = [{"orders": shard} for shard in pieces(frames.pop("orders"), *cuts)]
    others = [{name: frame} for name, frame in frames.items()]
    scores = []
    with LocalGrid([*shards, *others]) as grid:
        exact = trained(grid, private, noise_multiplier=HARDLY).method
        for _ in range(8):
            noisy = trained(grid, private, epsilon=400.0).method
            for number, moments in noisy.moments.items():
                deviations = moments.deviations
                unit = moments.label_unit
                scale = np.ones(len(deviations))
                scale[moments.labels] = unit.half
                # the label's middle is not 0: compare what is left without it
                difference = moments.matrix - exact.moments[number].matrix
                ones = moments.intercept
                for axis in (0, 1):
                    difference = np.moveaxis(difference, axis, 0).copy()
                    difference[moments.labels] -= unit.middle * difference[ones]
                    difference = np.moveaxis(difference, 0, axis)
                difference /= np.outer(scale, scale)
                is_noisy = np.triu(deviations) > 0.0
                assert np.abs(difference[deviations == 0.0]).max() < 1e-2
                scores.append(difference[is_noisy] / deviations[is_noisy])
    scores = np.concatenate(scores)
    expected = 5.0 * np.sqrt(2.0 / len(scores))
    assert np.mean(scores**2) == pytest.approx(1.0, abs=expected)
    assert np.mean(scores) == pytest.approx(0.0, abs=5.0 / np.sqrt(len(scores)))


def test_an_epsilon_of_features_is_booked_once(tmp_path):
    with LocalGrid(frames_of(3000)) as grid:
        for node in grid.contexts:
            grid.keep_state(node, tmp_path / str(node))
        strategy = trained(grid, "o", epsilon=3.0)
        totals = {each["table"]: each for each in strategy.report.privacy["totals"]}
        assert totals["orders"]["features"] == pytest.approx(3.0, rel=1e-4)
        assert totals["orders"]["uncovered"] == ["counts", "keys"]
        assert totals["users"]["features"].startswith("none: no noise covers")
        node = next(iter(grid.contexts))
        notes = ledger_lines(tmp_path / str(node))
        spent = [line for line in notes if "second-moments" in str(line)]
        assert [line["event"] for line in spent].count("spend") == 1


def test_tables_of_one_site_are_each_booked(tmp_path):
    with LocalGrid([tables()]) as grid:
        (node,) = grid.contexts
        grid.keep_state(node, tmp_path)
        strategy = trained(grid, "o, i", epsilon=400.0)
        notes = ledger_lines(tmp_path)
    totals = {each["table"]: each for each in strategy.report.privacy["totals"]}
    for table in ("orders", "items"):
        assert totals[table]["features"] == pytest.approx(400.0, rel=1e-4)
    events = [line["event"] for line in notes if "second-moments" in str(line)]
    assert [events.count(event) for event in ("reserve", "spend")] == [2, 2]


def test_encoders_fitted_to_rows_leave_no_epsilon_of_features():
    with LocalGrid(frames_of()) as grid:
        strategy = TablePuppetMoments(
            Query.from_sql(sql()), private_tables="o", privacy=privacy(epsilon=50.0)
        )
        strategy.start(grid)
        totals = {each["table"]: each for each in strategy.report.privacy["totals"]}
        assert "encoder" in totals["orders"]["features"] or "statistics" in str(totals)
        assert str(totals["orders"]["features"]).startswith("none")


@pytest.mark.parametrize(
    ("label", "where", "reason"),
    [
        ("o.qty", "o.day < 9", "none: filters read what noise covers"),
        ("o.qty", "o.qty < 99", "none: filters read what noise covers"),
        ("o.uid", "", "none: keys tell features that are joined on"),
        ("o.qty", "u.age > 0", 200.0),
    ],
)
def test_no_epsilon_stands_beside_values_that_rows_or_keys_tell(label, where, reason):
    query = sql(label) + (f" WHERE {where}" if where else "")
    with LocalGrid(frames_of()) as grid:
        strategy = TablePuppetMoments(
            Query.from_sql(query),
            encoders=ENCODERS,
            private_tables="o",
            task="regression",
            privacy=privacy(epsilon=200.0),
        )
        strategy.start(grid)
    totals = {each["table"]: each for each in strategy.report.privacy["totals"]}
    if isinstance(reason, float):
        reason = pytest.approx(reason, rel=1e-3)
    assert totals["orders"]["features"] == reason


def test_nothing_else_of_private_rows_leaves():
    with WatchedGrid(frames_of(), None) as grid:
        trained(grid, "o", epsilon=200.0)
    finished = [
        part
        for seen in grid.sent("query.finish", replies=True)
        for part in seen.header["parts"]
    ]
    # the mean and the variance of the scores of the other tables alone
    shown = [name for _, name in grid.arrays("query.finish", replies=True)]
    assert shown.count("score-sums") == len(finished) - 1


def files_of(folder: Path, rules: str, orders: int = 300) -> list[Path]:
    return [
        write_site(
            folder / name, {name: frame}, {name: rules} if name == "orders" else None
        )
        for name, frame in tables(orders).items()
    ]


def test_a_policy_asks_for_noise_and_bounds_it(tmp_path):
    with LocalGrid(files_of(tmp_path, PRIVATE, 3000)) as grid:
        for private in ("u", "o"):
            if private == "u":
                with pytest.raises(SiteError, match=r"releases\.moments = private"):
                    trained(grid, private, noise_multiplier=HARDLY)
            else:
                assert trained(grid, private, epsilon=1.5).final.train
        with pytest.raises(SiteError, match="epsilon"):
            trained(grid, "o", epsilon=1.5)


@pytest.mark.parametrize(
    ("label", "value"),
    [("o.qty", "NULL"), ("o.qty", "1e300"), ("o.kind", "NULL"), ("o.day < 9", "true")],
)
def test_no_refusal_tells_of_a_label_that_noise_covers(label, value):
    """How many labels a condition makes NULL would be a count without noise."""
    chosen = f"CASE WHEN o.day > 1.5 THEN {value} ELSE {label} END"

    def fitted(private: str):
        return fit(
            chosen,
            encoders=ENCODERS,
            private_tables=private,
            privacy_features="statistics",
            privacy_noise_multiplier=HARDLY,
            privacy_label_range="-4, 8",
        )

    assert fitted("o").report["final"]["train"]
    refusal = "NULL in|beyond 1e|constant at all"
    with pytest.raises((QueryError, SiteError), match=refusal):
        fitted("u")


def test_a_table_that_needs_much_noise_is_refused_by_name():
    how = {
        "strategy": "moments",
        "encoders": ENCODERS,
        "privacy_features": "statistics",
        "privacy_label_range": "-4, 8",
        "privacy_epsilon": 1.0,
    }
    match = r"needs noise on table o: r = .*; allowed: r up to 0\.05\. Leave the table"
    with pytest.raises(SettingsError, match=match):
        api.fit(sql(), sites(), **how, private_tables="o")
    explained = api.explain(sql(), sites(), **how, private_tables="o").report
    assert any("training will be refused" in each for each in explained["warnings"])
    assert "o: r = " in explained["chosen"]["noise"]
    # as it says: another table, or more epsilon
    how["privacy_epsilon"] = 80.0
    assert api.fit(sql(), sites(), **how, private_tables="o").report["final"]


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"private_tables": "o"}, "private-tables: it is set, but privacy.features"),
        (
            {"privacy_features": "dp-sgd"},
            "has no gradients for 'dp-sgd': use 'statistics'",
        ),
        (
            {"privacy_predictions": 1.0},
            "with strategy 'moments' no label and no score leaves",
        ),
        (
            {"privacy_features": "statistics", "task": "regression"},
            "privacy.label-range: moments with noise need the range",
        ),
        (
            {"privacy_features": "statistics"},
            "privacy.label-range: moments with noise need the range",
        ),
        (
            {
                "privacy_features": "statistics",
                "privacy_label_range": "0, 9",
                "private_tables": "o, nobody",
            },
            "private-tables: 'nobody' is no table of the query, whose tables are o, u",
        ),
        (
            {
                "privacy_features": "statistics",
                "privacy_label_range": "0, 9",
                "l1": 0.1,
            },
            "chooses no columns by moments with noise",
        ),
    ],
)
def test_settings_are_refused(how, match):
    with pytest.raises(SettingsError, match=match):
        fit(**how)


@pytest.mark.parametrize(
    "refused",
    [
        {"privacy_features": "dp-sgd"},
        {"privacy_predictions": 1.0},
        {"privacy_features": "clear"},
        {"privacy_features": "statistics", "privacy_epsilon": 400.0},
    ],
)
def test_what_refused_settings_advise_is_taken(refused):
    """Statistics in place of another mechanism, and a range for the label."""
    how = {"encoders": ENCODERS, "private_tables": "o"}
    with pytest.raises(SettingsError):
        fit(**how, **refused)
    model = fit(
        **how,
        privacy_features="statistics",
        privacy_epsilon=400.0,
        privacy_label_range="-4, 8",
    )
    assert model.report["final"]["train"]


def test_bits_that_two_sites_are_told_differently_spoil_all_moments():
    @on_requests("train.moments")
    def tell_other_bits(seen):
        if "hashes/0" not in seen.header and seen.node == nodes[0]:
            seen.header["bits"]["u"] -= 3

    with WatchedGrid(frames_of(), tell_other_bits) as grid:
        nodes = sorted(grid.contexts)
        with pytest.raises(ReplyError, match="are not the moments of the joined rows"):
            trained(grid, "o", epsilon=200.0)


@pytest.mark.parametrize("classes", [[2.0, 3.0], [97.0, 98.0]])
def test_a_server_that_calls_numbers_classes_is_told_nothing(classes):
    """A refusal of classes that lack a label would tell which labels a shard has."""

    @on_requests("train.moments")
    def name_classes(seen):
        if "classes" in seen.header:
            seen.header["classes"] = classes

    frames = tables()
    frames["orders"]["qty"] = 2.0 + np.arange(300) % 2
    shards = [{"orders": shard} for shard in pieces(frames.pop("orders"), 120)]
    others = [{name: frame} for name, frame in frames.items()]
    with (
        WatchedGrid([*shards, *others], name_classes) as grid,
        pytest.raises(SiteError, match=r"'classes': the run was proposed with \[\]"),
    ):
        trained(grid, "o", epsilon=200.0, task="regression")


def test_a_part_that_is_left_out_is_missed():
    """What its fragment tells of the others' rows would be no condition of theirs."""

    @on_requests("train.moments")
    def leave_out(seen):
        parts = {number for number, _ in seen.arrays}
        if len(parts) == 2:
            for key in [key for key in seen.arrays if key[0] == max(parts)]:
                del seen.arrays[key]

    frames = tables()
    both = {name: frames.pop(name) for name in ("orders", "users")}
    sites_of = [both, *({name: frame} for name, frame in frames.items())]
    with (
        WatchedGrid(sites_of, leave_out) as grid,
        pytest.raises(SiteError, match="'parts': the run was proposed with"),
    ):
        trained(grid, "o", epsilon=200.0)


def test_bits_are_told_with_noise_alone():
    @on_requests("train.moments")
    def tell_no_bits(seen):
        seen.header["bits"] = {}

    with (
        WatchedGrid(frames_of(), tell_no_bits) as grid,
        pytest.raises(SiteError, match="'bits'"),
    ):
        trained(grid, "o", epsilon=200.0)


@pytest.mark.usefixtures("noise_of_known_keys")
def test_noise_that_drowns_the_metrics_is_said():
    with LocalGrid(frames_of(400)) as grid:
        strategy = trained(grid, "o", epsilon=8.0)
    little = "noise leaves little of the test metrics"
    assert any(little in warning for warning in strategy.warnings)
    report = report_dict(strategy.report)
    assert set(report["final"]["test"].values()) == {None}
    low, high = report["moments"]["noise"]["test"]["loss"]
    assert low * 2.0 <= high
    assert "noise hides how good the model is" in report["verdict"]
    for table in report["moments"]["tables"]:
        assert table["alone"]["test"] is table["without"]["test"] is None
