"""Ways around a policy: time, size, differences, labels, rows without a mask."""

from contextlib import suppress
from math import isclose

import duckdb
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.federated import (
    WatchedGrid,
    on_replies,
    on_requests,
    run_query,
    site_per_table,
    train,
    write_site,
)
from tests.support.files import case_table
from tests.support.ledgers import ledger_lines
from tests.support.peers.hostile import SHOP, US, header, shard_seal
from tests.support.peers.hostile_runs import answers_to, refused
from tp_flower.errors import DivergedError, QueryError, SiteError
from tp_flower.privacy.shard_seals import STATISTICS
from tp_flower.protocol.codec import decode
from tp_flower.protocol.packet import packet_of
from tp_flower.protocol.setup_messages import ShardStatistics
from tp_flower.query.expressions import _check_lengths, _length, parse_expression

CASES = case_table(__file__)
FRAGMENT = ("parts", 0, "fragment")
ALONE = "SELECT t.y AS label, t.x FROM t"
TWICE = "SELECT a.y AS label, b.x FROM t a JOIN t b ON a.k = b.k WHERE b.id <> 5"


def test_a_site_with_a_policy_tells_whole_seconds_and_a_simulation_its_time(tmp_path):
    tables = {"t": pd.DataFrame({"x": [1.0, 2.0, 3.0], "y": [0.0, 1.0, 1.0]})}
    seconds = {}
    sites = {"open": [write_site(tmp_path / "s", tables)], "simulated": [tables]}
    sites["strict"] = [
        write_site(tmp_path / "t", tables, {"t": "releases = { scores = 'clear' }"})
    ]
    for kind, places in sites.items():
        grid = WatchedGrid(places)
        train(grid, ALONE)
        seconds[kind] = [
            seen.header["seconds"]
            for seen in grid.seen
            # to seal keys the site reads no rows
            if seen.is_reply and seen.action != "query.seal"
        ]
    rest = {kind: np.remainder(own, 0.1) for kind, own in seconds.items()}
    # 0.1 is no number of base 2
    assert (np.minimum(rest["open"], 0.1 - rest["open"]) < 1e-9).all()
    assert min(seconds["open"]) >= 0.1
    assert rest["simulated"].max() > 1e-6
    assert set(seconds["strict"]) <= set(range(1, 1000))


def nested(times):
    """A text of 199 characters and less that grows with every REPLACE."""
    text = "'aaaaaaaa'"
    for _ in range(times):
        text = f"REPLACE({text}, 'a', 'aaaaaaaa')"
    return text


LARGE = [
    *CASES["large"],
    nested(6),
    "CONCAT_WS(x || x || x, " + ", ".join(["x"] * 120) + ")",
    " || ".join(["x"] * 300),
    f"JACCARD(x, '{'c' * 300}')",
    f"CASE WHEN x = 'a' THEN {nested(6)} END",
    f"LENGTH({nested(6)})",
]


@pytest.mark.parametrize("text", LARGE)
def test_expressions_that_build_large_texts_are_refused(text):
    text = text.replace("REPEATED", f"'{'b' * 20}'")
    with pytest.raises(QueryError, match="it may build a text of more than 256 times"):
        parse_expression(text, "filter")


@pytest.mark.parametrize("text", CASES["ordinary"])
def test_expressions_of_ordinary_length_are_not_refused(text):
    assert parse_expression(text, "feature")


def test_a_site_refuses_a_filter_that_builds_a_large_text(tmp_path):
    slow = f"CASE WHEN age > 30 THEN LENGTH({nested(8)}) ELSE 1 END > 0"
    change = header(*FRAGMENT, "filters", value=[slow])
    assert "it may build a text" in refused(tmp_path, "query.extract", US, change)


texts = st.recursive(
    st.sampled_from(["x", "y", "'ab'", "'a'", "''", "'%A-%a'", "'(.)'", "'\\1\\1'"]),
    lambda inner: st.one_of(
        st.builds("REPLACE({}, {}, {})".format, inner, inner, inner),
        st.builds("REGEXP_REPLACE({}, '[ab]*', {}, 'g')".format, inner, inner),
        st.builds("({} || {})".format, inner, inner),
        st.builds("CONCAT_WS({}, {}, {})".format, inner, inner, inner),
        st.builds("UPPER({})".format, inner),
        st.builds("CASE WHEN {} = 'ab' THEN {} ELSE {} END".format, *[inner] * 3),
        st.builds("STRFTIME(DATE '2020-09-30', {})".format, inner),
        st.builds("REVERSE(TRIM({}))".format, inner),
    ),
    max_leaves=12,
)


@given(texts, st.text("ab", max_size=8), st.text("ab", max_size=8))
def test_no_text_is_longer_than_its_bound(sql, x, y):
    try:
        tree = parse_expression(sql, "text")
    except QueryError:
        return
    lengths = {}
    for node in reversed(list(tree.walk(bfs=True))):
        parts = [lengths[id(child)] for child in node.iter_expressions()]
        lengths[id(node)] = _length(node, parts)
    columns, characters = lengths[id(tree)]
    _check_lengths(tree)
    try:
        query = f"SELECT length({tree.sql('duckdb')}) FROM (SELECT ? AS x, ? AS y)"
        ((found,),) = duckdb.execute(query, [x, y]).fetchall()
    except duckdb.Error:
        return
    assert (found or 0) <= columns * max(len(x), len(y)) + characters


GROUPED = {
    "columns": [
        *(["price", 'AVG("price")'], ["day", '"day"'], ["cust", '"cust"']),
        ["qty", 'MAX("qty")'],
    ],
    "filters": [],
    "groups": ['"day"', '"cust"'],
    "having": [],
}


@pytest.mark.parametrize(("having", "is_refused"), CASES["having"])
def test_groups_may_be_of_few_rows_unless_having_says_that_they_are_not(
    tmp_path, having, is_refused
):
    policies = {"orders": "min-rows = 3"}
    change = header(*FRAGMENT, "subquery", value={**GROUPED, "having": having})
    changes = {"it": change}
    (answer,) = answers_to(tmp_path, "query.extract", SHOP, changes, policies=policies)
    few = "a group of the sub-query, without HAVING COUNT(*) >= n, would be of too few"
    assert (few in answer.error) == is_refused


def many(rows=40):
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"id": np.arange(rows), "k": np.arange(rows) % 20})
    return frame.assign(x=rng.normal(size=rows).round(3), y=rng.normal(size=rows))


def test_one_run_does_not_select_the_rows_of_a_table_twice(tmp_path):
    """The two answers would differ in row 5 alone."""
    site = write_site(tmp_path, {"t": many()}, {"t": "min-rows = 10"})
    match = "min-rows.* the difference of two of the run's conditions .*at least 10"
    with pytest.raises(SiteError, match=match):
        train([site], TWICE)
    train([site], f"{TWICE} AND a.id <> 5", test_fraction=0.0)
    train([write_site(tmp_path / "open", {"t": many()})], TWICE)


def two_shards(folder, policy):
    return [
        write_site(folder / name, {"t": many()}, {"t": policy}) for name in ("a", "b")
    ]


def sums_of(folder, sql, policy):
    """The sum of a site's feature, as another shard of its table learns it."""
    sums = []

    @on_requests("query.fit")
    def listen(seen):
        other = shard_seal(grid, max(grid.contexts), 1)
        text = other.open(seen.arrays[0, "statistics/0"], STATISTICS, 0)
        (told,) = decode(ShardStatistics, packet_of(text)).parts[0].statistics
        sums.append(told.mean * told.count)

    grid = WatchedGrid(two_shards(folder, policy), listen)
    train(grid, sql, encoders="t.x=standard", num_epochs=1, test_fraction=0.0)
    return sums[0]


def test_two_runs_still_tell_a_row_by_their_difference(tmp_path):
    """The limit that PRIVACY.md states: only a budget, or no filters, ends it."""
    policy = "min-rows = 10\nreleases={scores='clear'}"
    filtered = f"{ALONE} WHERE t.id <> 5"
    whole = sums_of(tmp_path / "1", ALONE, policy)
    without = sums_of(tmp_path / "2", filtered, policy)
    assert isclose(whole - without, many()["x"][5], abs_tol=1e-9)
    with pytest.raises(SiteError, match="filters"):
        sums_of(tmp_path / "3", filtered, f"filters = []\n{policy}")


@pytest.mark.parametrize("level", ["never", "private"])
def test_personalised_models_read_no_labels_that_may_not_leave(tmp_path, level):
    policy = f"releases = {{ labels = '{level}' }}"
    if level == "private":
        policy = f"epsilon = 1.0\n{policy}"
    sites = two_shards(tmp_path, policy)
    with pytest.raises(SiteError, match=f"labels = {level}.*the run asks for labels"):
        train(sites, ALONE, "personalised", encoders="t.x=range(-4,4)")


def lied_to(folder, policy, rows):
    """Train with a server that says of the first rows of b that nobody has them."""

    @on_requests("train.prepare")
    def unmask(seen):
        for part in seen.header["parts"] if seen.node == 3 else ():
            total = seen.arrays[part["id"], "trained"].size * 8
            bits = np.packbits(np.arange(total) < rows)
            seen.arrays[part["id"], "unmatched/join-0"] = bits

    items = many(20)[["id", "x"]]
    tables = {"a": many()[["k", "y"]], "b": items}
    grid = WatchedGrid(site_per_table(folder, tables, {"b": policy}), unmask)
    grid.keep_state(3, folder / "state")
    # the masks that are left in the sums are no scores
    with suppress(DivergedError):
        train(grid, "SELECT b.x AS label, b.id, a.y FROM b LEFT JOIN a ON b.id = a.k")
    return ledger_lines(folder / "state")


@pytest.mark.parametrize(
    ("policy", "rows"), [("min-rows = 2", 1), ("most-unmatched = 0.25", 8)]
)
def test_a_policy_bounds_the_rows_that_a_lie_unmasks(tmp_path, policy, rows):
    match = r"\(most-unmatched = 0.*\) refuses: \d of 20 rows are said to have no partn"
    with pytest.raises(SiteError, match=match):
        lied_to(tmp_path, policy, rows)


def test_rows_that_leave_without_a_mask_are_in_the_ledger(tmp_path):
    lines = lied_to(tmp_path, "most-unmatched = 0.25", 3)
    scopes = [line["release"]["scope"] for line in lines if "release" in line]
    assert [scope for scope in scopes if "the scores of 3 of 20 rows leave" in scope]


def poisoned(function):
    """Train with a site whose words are others than its scores'."""

    @on_replies("train.admm")
    def poison(seen):
        for key, array in seen.arrays.items():
            if seen.node == 3 and array.dtype == np.uint32:
                seen.arrays[key] = function(array)

    sql = "SELECT a.y AS label, a.x, b.x FROM a JOIN b ON a.k = b.id"
    sites = [{"a": many()}, {"b": many(20)[["id", "x"]]}]
    return run_query(sql, sites, change=poison, num_epochs=3, seed=1)


def test_words_at_random_make_training_diverge_and_name_nobody():
    rng = np.random.default_rng(5)
    with pytest.raises(DivergedError, match="training diverged in epoch") as caught:
        poisoned(lambda words: rng.integers(0, 1 << 32, words.shape, np.uint32))
    assert "site" not in str(caught.value)


def test_scores_of_a_lying_site_within_the_range_are_not_noticed():
    """The limit that PRIVACY.md states: what a site adds within its share passes."""
    good = poisoned(lambda words: words)
    shifted = poisoned(lambda words: words + np.uint32(1 << 20))
    assert shifted.history
    assert shifted.losses[-1] > good.losses[-1]
