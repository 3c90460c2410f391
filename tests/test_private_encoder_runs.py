"""Runs whose encoders are fitted to noisy statistics: what leaves, at what cost."""

import json
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from flwr.app import Message

from client_apps.app import app
from strategies import STRATEGIES, RelationalStrategy
from tests.federated import (
    Run,
    one_per_site,
    pieces,
    run,
    run_query,
    sharded,
    store,
    store_sql,
    whole,
)
from tests.hostile import ORDERS, HostileGrid
from tests.hostile import train as train_hostile
from tp_flower.encoding import private_statistics
from tp_flower.encoding.encodings import NumberEncoding
from tp_flower.errors import LedgerError, SettingsError, SiteError
from tp_flower.extraction.extract import extract
from tp_flower.extraction.plan import feature_kinds
from tp_flower.grid import InProcessGrid
from tp_flower.privacy.accounting import epsilon
from tp_flower.privacy.ledger import Ledger
from tp_flower.privacy.mechanisms import Chance, Gaussian, mechanism_from_json
from tp_flower.protocol import unpack
from tp_flower.query import Query
from tp_flower.query.fragment import Feature, Fragment, SubQuery
from tp_flower.settings import PrivacySettings
from tp_flower.sources.frames import register_frames
from tp_flower.sources.shards import describe, hosted_shards

EPSILON, DELTA = 1.0, 1e-5
RANGES = (
    ("o", "day", "1..28"),
    ("C", "Age", "18..80"),
    ("i", "price", "0..20"),
    ("i", "weight", "0..10"),
)
STATISTICS = {"statistics": EPSILON, "delta": DELTA, "ranges": RANGES}
EVERYTHING = {
    **STATISTICS,
    "labels": "randomised-response",
    "label_epsilon": 2.0,
    "features": "statistics",
    "predictions": 4.0,
}
PRIVATE = PrivacySettings(**STATISTICS)


@pytest.fixture(scope="module")
def finished() -> Run:
    sites = one_per_site(sharded(store()))
    return run("logistic", sites, num_epochs=2, privacy=PrivacySettings(**EVERYTHING))


def accounts(strategy: RelationalStrategy) -> list[dict]:
    ledger = strategy.report.privacy["ledger"]
    return [account for own in ledger.values() for account in own]


def costs(strategy: RelationalStrategy, *names: str) -> dict[tuple, list]:
    """The mechanisms of releases by (source, part), each as often as it was used."""
    found: dict[tuple, list] = {}
    for account in accounts(strategy):
        release = account["release"]
        if release["what"] in names:
            assert (account["limit"], account["used"]) == (1, 1)
            key = release["source"], release["part"]
            found.setdefault(key, []).append(mechanism_from_json(release["mechanism"]))
    return found


def told(seen: Sequence, action: str = "query.statistics") -> list:
    return [own for own in seen if own.action == action and own.is_reply]


def check_only_keys_and_counts_are_uncovered(strategy: RelationalStrategy) -> None:
    totals = strategy.report.privacy["totals"]
    assert len(totals) == 7
    for total in totals:
        assert set(total["uncovered"]) == {"keys", "counts"}
        assert 0 < total["epsilon"] < np.inf


def test_with_every_mechanism_nothing_but_keys_and_counts_is_uncovered(
    finished: Run,
) -> None:
    check_only_keys_and_counts_are_uncovered(finished.strategy)


@pytest.mark.parametrize(
    ("strategy", "model"), [("sgd", "linear"), ("admm", "linear"), ("admm", "mlp")]
)
def test_also_with_dp_sgd(strategy: str, model: str) -> None:
    sites = one_per_site(sharded(store()))
    privacy = PrivacySettings(**{**EVERYTHING, "features": "dp-sgd"})
    settings = {"num_epochs": 1, "model": model, "privacy": privacy}
    done = run("logistic", sites, strategy, **settings)
    check_only_keys_and_counts_are_uncovered(done.strategy)


def test_statistics_cost_what_was_asked_for(finished: Run) -> None:
    found = costs(finished.strategy, "statistics", "rare categories")
    assert len(found) == 7
    for (_, part), mechanisms in found.items():
        assert epsilon(mechanisms, DELTA) <= EPSILON * (1 + 1e-9)
        assert epsilon(mechanisms, DELTA) == pytest.approx(EPSILON, rel=1e-3)
        chances = [own.delta for own in mechanisms if isinstance(own, Chance)]
        # customers have a region, of all tables alone
        assert chances == ([pytest.approx(0.01 * DELTA)] if part in (3, 4) else [])
    scopes = {
        account["release"]["scope"]
        for account in accounts(finished.strategy)
        if account["release"]["mechanism"] and account["release"]["what"] == "gram"
    }
    # with scores covered, too, nothing is left that the guarantee takes as given
    assert scopes == {""}


def test_no_statistic_leaves_as_it_is(finished: Run) -> None:
    clear = run("logistic", one_per_site(sharded(store())), num_epochs=1)
    for seen in told(clear.seen):
        assert all("mean" in own for own in seen.header["parts"][0]["statistics"][:1])
    for seen in told(finished.seen):
        (part,) = seen.header["parts"]
        assert part["deviation"] > 3
        for facts in part["statistics"]:
            assert facts.keys() == {"name", "kind", "width"}
        for (_, name), array in seen.arrays.items():
            assert name.endswith("-sums")
            assert (array != np.rint(array)).any()
    # of 12 customers no region is common enough to be listed
    assert "region" in finished.strategy.federation.encoders["c"].dropped


def test_sites_draw_other_noise_in_every_run(finished: Run) -> None:
    sites = one_per_site(sharded(store()))
    other = run("logistic", sites, num_epochs=1, privacy=PRIVATE)
    for one, two in zip(told(finished.seen), told(other.seen), strict=True):
        assert one.arrays.keys() == two.arrays.keys()
        assert all((one.arrays[key] != two.arrays[key]).any() for key in one.arrays)


def two_tables(orders: int, customers: int) -> dict[str, list[pd.DataFrame]]:
    """Orders and customers, in two shards each."""
    frames = store(orders=orders, customers=customers)
    return {
        name: pieces(frames[name], len(frames[name]) // 3)
        for name in ("orders", "customers")
    }


def test_of_many_rows_encoders_are_close_to_the_clear_ones() -> None:
    shards = one_per_site(two_tables(orders=8000, customers=2400))
    settings = {"num_epochs": 1}
    sql = "SELECT o.qty AS label, o.day, o.online, c.age, c.region "
    sql += "FROM orders o JOIN customers c ON o.customer = c.id"
    privacy = PrivacySettings(statistics=EPSILON, delta=DELTA, ranges=RANGES[:2])
    found, clear = (
        run_query(sql, shards, task="regression", privacy=own, **settings)
        for own in (privacy, PrivacySettings())
    )
    for alias, encoder in clear.strategy.federation.encoders.items():
        noisy = found.strategy.federation.encoders[alias]
        assert noisy.feature_names == encoder.feature_names
        for one, other in zip(noisy.encodings, encoder.encodings, strict=True):
            if isinstance(other, NumberEncoding):
                # the noise of a sum is about 8, of 2400 rows: 4 deviations are 0.013
                # of half the range, which is 2 to 4 scales wide
                assert one.centre == pytest.approx(other.centre, abs=0.05 * other.scale)
                assert one.scale == pytest.approx(other.scale, rel=0.1)
            else:
                assert one.hashes == other.hashes


def test_a_table_in_two_roles_costs_once_what_was_asked_for() -> None:
    shards = {name: own[:1] for name, own in two_tables(180, 36).items()}
    sql = (
        "SELECT o.qty AS label, c.age, d.age AS other FROM orders o "
        "JOIN customers c ON o.customer = c.id JOIN customers d ON o.item = d.id"
    )
    privacy = PrivacySettings(
        statistics=EPSILON,
        delta=DELTA,
        ranges=(("c", "age", "18..80"), ("d", "other", "18..80")),
    )
    settings = {"task": "regression", "num_epochs": 1, "privacy": privacy}
    finished = run_query(sql, one_per_site(shards), **settings)
    found = costs(finished.strategy, "statistics")
    by_source: dict[str, list] = {}
    for (source, _), mechanisms in found.items():
        by_source.setdefault(source, []).extend(mechanisms)
    # orders have no features, and so no statistics
    (mechanisms,) = by_source.values()
    assert len(mechanisms) == 2
    assert epsilon(mechanisms, DELTA) == pytest.approx(EPSILON, rel=1e-3)
    assert all(isinstance(own, Gaussian) for own in mechanisms)


def test_where_rows_are_grouped_a_row_pays_for_the_change_of_its_group() -> None:
    shards = {name: own[:1] for name, own in two_tables(180, 36).items()}
    sql = (
        "SELECT c.age AS label, p.mean FROM customers c JOIN (SELECT customer, "
        "AVG(day) AS mean FROM orders GROUP BY customer) p ON c.id = p.customer"
    )
    privacy = PrivacySettings(statistics=EPSILON, ranges=(("p", "mean", "1..28"),))
    settings = {"task": "regression", "num_epochs": 1, "privacy": privacy}
    finished = run_query(sql + " WHERE c.age > 0", one_per_site(shards), **settings)
    (release,) = (
        account["release"]
        for account in accounts(finished.strategy)
        if account["release"]["what"] == "statistics"
    )
    assert "rows of the run are groups of a sub-query" in release["scope"]
    # the noise is that for a group; a row moves twice what a group adds
    of_group = Gaussian(2.0 * release["mechanism"]["noise_multiplier"])
    assert epsilon([of_group], DELTA) == pytest.approx(EPSILON, rel=1e-3)


# --- refusals -----------------------------------------------------------------------


def test_features_without_a_range_are_told_before_anything_is_sent() -> None:
    seen: list[Message] = []
    grid = InProcessGrid(app, one_per_site(whole(store())), observe=seen.append)
    privacy = PrivacySettings(statistics=1.0, ranges=RANGES[:1])
    sql = store_sql("squared").replace("c.region", "length(c.region) AS size, c.region")
    method = STRATEGIES["admm"](
        Query.from_sql(sql), task="regression", encoders=(("c", "region", "length"),)
    )
    method.settings = method.settings.with_fields(privacy=privacy)
    with pytest.raises(SettingsError) as caught:
        method.start(grid)
    text = str(caught.value)
    for missing in ("c.age: it", "c.size: it", "c.region: the length", "i.price: it"):
        assert f"{missing} " in text
    assert "o.day" not in text
    assert "o.online" not in text
    assert {own.metadata.message_type for own in seen} <= {
        "query.describe",
        "query.finish",
    }


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"ranges": (("x", "day", "1..28"),)}, "names table 'x'; the query has o, c"),
        ({"ranges": (("o", "qty", "1..28"),)}, "names column 'qty' of table 'o', who"),
        (
            {"ranges": (*RANGES[1:], ("o", "day", "2013-01-01..2013-12-31"))},
            r"o\.day: it is a number: its range must be of numbers",
        ),
    ],
)
def test_ranges_that_do_not_fit_stop_the_run(change: dict, match: str) -> None:
    privacy = PrivacySettings(**{**STATISTICS, **change})
    with pytest.raises(SettingsError, match=match):
        run("squared", one_per_site(whole(store())), privacy=privacy)


def test_encoders_that_take_quantiles_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"c\.age: encoder robust .* quantiles"):
        run(
            "squared",
            one_per_site(whole(store())),
            privacy=PRIVATE,
            encoders=(("c", "age", "robust"),),
        )


HOSTILE = {
    "privacy": PrivacySettings(
        statistics=EPSILON,
        delta=DELTA,
        ranges=(("o", "price", "-3..3"), ("o", "day", "1..28"), ("c", "age", "0..200")),
    )
}
OTHERS = 'labels = "clear", models = "clear", scores = "clear"'
ONLY_PRIVATE = f'epsilon = 2\nreleases = {{ statistics = "private", {OTHERS} }}'


def twice(action, _, packet):
    """Ask for the statistics once more."""
    if action == "query.statistics":
        yield "the statistics", packet


def test_the_statistics_of_a_part_leave_once_in_a_run(tmp_path) -> None:
    grid = HostileGrid(tmp_path, twice)
    with pytest.raises(SiteError, match=r"statistics of part .* are reserved already"):
        train_hostile(grid, **HOSTILE)
    # the first, hostile one was answered, and with noise
    assert not any(answer.error for answer in grid.answers)
    assert all(answer.header["parts"][0]["deviation"] for answer in grid.answers)


def test_a_policy_that_demands_noise_is_met_by_it_alone(tmp_path) -> None:
    policies = {"orders": ONLY_PRIVATE, "customers": ONLY_PRIVATE}
    train_hostile(HostileGrid(tmp_path, policies=policies), **HOSTILE)
    # a declared range is no statistic of the rows
    ranged = HOSTILE | {"encoders": (("o", "price", "min-max"),)}
    train_hostile(HostileGrid(tmp_path, policies=policies), **ranged)
    with pytest.raises(SiteError, match=r"statistics = private.*feature 'price'"):
        train_hostile(HostileGrid(tmp_path, policies=policies))


def test_a_server_cannot_have_them_in_the_clear_where_noise_is_demanded(
    tmp_path,
) -> None:
    def clear(action, _, packet):
        if action == "query.statistics":
            told = {k: v for k, v in packet.header.items() if k != "privacy"}
            yield "in the clear", type(packet)(told, packet.arrays)

    policies = {"orders": ONLY_PRIVATE, "customers": ONLY_PRIVATE}
    grid = HostileGrid(tmp_path, clear, policies=policies)
    train_hostile(grid, **HOSTILE)
    assert len(grid.answers) == 3
    for answer in grid.answers:
        answer.check_nothing_left()
        assert "releases.statistics = private" in answer.error


def test_an_epsilon_without_a_noise_is_refused() -> None:
    privacy = PrivacySettings(**{**STATISTICS, "statistics": 1e300})
    with pytest.raises(SiteError, match=r"privacy\.statistics = 1e\+300 with .*delta"):
        run("squared", one_per_site(whole(store())), privacy=privacy)


def test_a_ledger_that_cannot_be_written_lets_nothing_leave(
    tmp_path, monkeypatch
) -> None:
    """What was reserved counts in full: noise may have been drawn."""
    seen = []
    grid = HostileGrid(tmp_path)
    grid._observe = lambda message: seen.append(unpack(message.content))

    def fail(*_: object) -> None:
        raise LedgerError("the disk is full")

    monkeypatch.setattr(Ledger, "spend", fail)
    with pytest.raises(SiteError, match="the disk is full"):
        train_hostile(grid, **HOSTILE)
    assert not any("-sums" in name for own in seen for _, name in own.arrays)


def test_statistics_are_reserved_before_a_row_is_read_for_them(
    tmp_path, monkeypatch
) -> None:
    class KilledError(BaseException):
        """As a signal would: nobody catches it."""

    def kill(*_: object) -> None:
        raise KilledError

    monkeypatch.setattr(private_statistics, "exact_feature", kill)
    with pytest.raises(KilledError):
        train_hostile(HostileGrid(tmp_path), **HOSTILE)
    path, source = next(
        (path, planned["release"]["source"])
        for path in tmp_path.glob("*/state/privacy/ledger.jsonl")
        for line in map(json.loads, path.read_text().splitlines())
        for planned in line.get("planned", ())
        if planned["release"]["what"] == "statistics"
    )
    # a new process finds it open, and counts it
    assert Ledger(path).total(source, DELTA) == pytest.approx(EPSILON, rel=1e-3)


def test_a_budget_that_does_not_suffice_lets_nothing_leave(tmp_path) -> None:
    seen = []
    policies = {"customers": "epsilon = 0.5"}
    grid = HostileGrid(tmp_path, policies=policies)
    grid._observe = lambda message: seen.append(unpack(message.content))
    with pytest.raises(SiteError, match=r"table customers .* asked for is 1, toge"):
        train_hostile(grid, **HOSTILE)
    parts = {part for own in seen for part, name in own.arrays if "-sums" in name}
    assert parts == {ORDERS}


# --- kinds ---------------------------------------------------------------------------


def test_kinds_that_types_tell_are_those_that_sites_find() -> None:
    frame = pd.DataFrame(
        {
            "n": [1.5, 2.0],
            "b": [True, False],
            "t": pd.to_datetime(["2013-01-01", "2014-01-01"]),
            "s": ["a", "b"],
            "v": [[1.0, 2.0], [3.0, 4.0]],
            "none": [None, None],
        }
    )
    token = register_frames({"f": frame}, "here")
    (source,) = hosted_shards({"tables": f"memory:{token}"}, {})
    columns = describe(source).columns
    pieces = {
        **{name: f'"{name}"' for name in frame},
        "sum": '"n" + 1',
        "long": 'length("s")',
        "late": "\"t\" > TIMESTAMP '2013-06-01'",
        "cast": 'CAST("none" AS VARCHAR)',
    }
    plain = Fragment("f", "f", tuple(Feature(k, sql) for k, sql in pieces.items()))
    mean = SubQuery((Feature("m", 'AVG("n")'), Feature("k", '"s"')), groups=('"s"',))
    grouped = Fragment(
        "f", "f", (Feature("m", '"m"'), Feature("k", '"k"')), subquery=mean
    )
    for fragment in (plain, grouped):
        found = {info.name: info.kind for info in extract(source, fragment).features}
        assert feature_kinds(fragment, columns) == found
    assert feature_kinds(plain, {}) == {}
    assert feature_kinds(plain, {"n": "INTEGER); DROP TABLE x; --"}) == {}
