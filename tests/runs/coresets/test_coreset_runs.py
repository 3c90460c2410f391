"""Coresets in whole runs: what is drawn, what the server sees, what sites may say."""

from functools import cache

import numpy as np
import pandas as pd
import pytest
from scipy.stats import chisquare

from tests.support import federated
from tests.support.federated import (
    ALIASES,
    LAYOUTS,
    Run,
    WatchedGrid,
    on_replies,
    one_per_site,
    run,
    run_query,
    sharded,
    store,
    store_sql,
    whole,
)
from tests.support.peers.faulty_runs import same_noise
from tests.support.peers.hostile import (
    ORDERS,
    SHOP,
    US,
    US_PART,
    HostileGrid,
    array,
    change_of,
    train,
)
from tests.support.reference.joins import joined_positions
from tp_flower.errors import ReplyError, SettingsError, SiteError
from tp_flower.methods.coreset.messages import TRAIN_DRAW, TRAIN_MEASURE, TRAIN_WEIGH
from tp_flower.privacy.key_agreement import from_fixed, to_fixed
from tp_flower.protocol.messages import Action

__all__ = ["same_noise"]
DRAWS = 40_000
LEFT = store_sql("squared").replace("JOIN items", "LEFT JOIN items")
WEIGHED = store_sql("squared").replace(" FROM", ", i.price AS weight FROM")


def frames():
    """The store, whose rows know their numbers."""
    return {
        name: frame.assign(number=np.arange(len(frame)))
        for name, frame in store().items()
    }


def as_number(label):
    return label[:, None]


def one_hot(labels):
    return (labels[:, None] == np.unique(labels)).astype(float)


def joined_numbers(sql: str) -> np.ndarray:
    """Rows of the tables behind each joined row, by DuckDB; -1 where none is."""
    return np.array(
        joined_positions(whole(frames()), ALIASES, sql[sql.index("FROM") :])
    )


def leverages(columns, weights, penalty) -> np.ndarray:
    """Squared lengths of the rows of an orthonormal basis of a joined table's columns.

    Algorithm 2 of the paper, on rows that are there; of a weighted row, per weight. The
    penalty (p,) is a further row per column.
    """
    rows = np.sqrt(weights)[:, None] * columns
    rows = np.concatenate([rows, np.diag(np.sqrt(penalty))])
    lengths = np.linalg.norm(rows, axis=0)
    rows = rows / np.where(lengths > 0, lengths, 1.0)
    left, values, _ = np.linalg.svd(rows, full_matrices=False)
    basis = left[:, values > 1e-6 * values[0]]
    return (basis**2).sum(axis=1)[: len(columns)] / weights


@cache
def on_all_rows(sql: str) -> Run:
    """A run without a coreset, for its encoded rows."""
    return run_query(
        sql, one_per_site(whole(frames())), test_fraction=0.0, num_epochs=1
    )


def materialised(sql: str, labels, weights, l2) -> dict[tuple, tuple[float, float]]:
    """Sensitivity and weight of each joined row, by the numbers of its rows.

    The tables are encoded by a run without a coreset; what is joined is DuckDB's.
    """
    plain = on_all_rows(sql)
    joined = joined_numbers(sql)
    label = frames()["orders"]["qty"].to_numpy()[joined[:, 0]]
    own = np.ones(len(joined)) if weights is None else weights(joined)
    own = own / own.mean()
    total = np.full(len(joined), len(ALIASES) / len(joined))
    for place, alias in enumerate(ALIASES):
        rows = np.flatnonzero(plain.trained[alias])
        shape = len(plain.trained[alias]) + 1, plain.features[alias].shape[1]
        features = np.zeros(shape)  # the last one is no row
        features[rows] = plain.features[alias]
        columns = features[joined[:, place]]
        if alias == "o":
            ones = np.ones((len(joined), 1))
            columns = np.concatenate([columns, ones, labels(label)], axis=1)
        penalty = l2 * len(joined) * (np.arange(columns.shape[1]) < features.shape[1])
        total += leverages(columns, own, penalty) * (joined[:, place] >= 0)
    return {
        tuple(numbers): (score, weight)
        for numbers, score, weight in zip(joined.tolist(), total, own, strict=True)
    }


def drawn(sql: str, split, **settings) -> Run:
    how = {"num_epochs": 1, "test_fraction": 0.0, "coreset_size": DRAWS, **settings}
    return run_query(sql, one_per_site(split(frames())), **how)


def numbers_of(finished: Run, split) -> list[tuple]:
    """The rows of the tables behind each joined row that was drawn."""
    behind = []
    for alias, name in ALIASES.items():
        numbers = pd.concat(split(frames())[name])["number"]
        trained = np.append(numbers[finished.trained[alias]], -1)
        behind.append(trained[finished.problem.train.tables[alias].row_of].tolist())
    return list(zip(*behind, strict=True))


def price_of(joined):
    return frames()["items"]["price"].to_numpy()[joined[:, 2]]


LAWS = {
    "regression": (store_sql("squared"), as_number, None, 0.0),
    "penalised": (store_sql("squared"), as_number, None, 0.1),
    "classes": (store_sql("logistic"), lambda y: one_hot(y > 3), None, 0.0),
    "texts": (
        store_sql("softmax"),
        lambda y: one_hot(np.searchsorted([2, 4], y, side="left")),
        None,
        0.0,
    ),
    "left join": (LEFT, as_number, None, 0.0),
    "weights": (WEIGHED, as_number, price_of, 1e-3),
}


@pytest.mark.cases(
    "penalised-sharded", "regression-whole", "left join-sharded", "weights-sharded"
)
@pytest.mark.parametrize(
    ("law", "split"), [*((law, "sharded") for law in LAWS), ("regression", "whole")]
)
def test_joined_rows_are_drawn_as_on_the_materialised_join(law, split):
    sql, labels, weights, l2 = LAWS[law]
    expected = materialised(sql, labels, weights, l2)
    finished = drawn(sql, LAYOUTS[split], l2=l2)
    sample = finished.strategy.method.sample.sample
    scores, own = np.array([*expected.values()]).T
    total = own @ scores
    # all rows of a join this small are drawn
    rows = list(expected)
    found = [rows.index(numbers) for numbers in numbers_of(finished, LAYOUTS[split])]
    counts = np.zeros(len(expected))
    counts[found] = sample.counts
    assert chisquare(counts, DRAWS * own * scores / total).pvalue > 0.001
    # what a draw weighs makes sums over the sample those of all rows, on the average
    np.testing.assert_allclose(
        sample.weights, sample.counts * total / (DRAWS * scores[found]), rtol=1e-5
    )
    facts = finished.chosen["coreset"]
    totals = np.array([*facts["totals"].values()])
    if not l2:  # ranks
        np.testing.assert_allclose(totals, totals.round(), atol=1e-6)
    assert totals.sum() + len(ALIASES) == pytest.approx(total, rel=1e-6)
    assert facts["uniform-share"] == pytest.approx(len(ALIASES) / total, rel=1e-6)


def test_a_shards_rows_and_a_tables_are_scored_alike():
    """Up to the numbers that are sent: sums over the tables, as whole numbers."""
    scores = []
    for split in (whole, sharded):
        finished = drawn(store_sql("squared"), split)
        sample = finished.strategy.method.sample.sample
        weights = sample.counts / sample.weights
        scores.append(dict(zip(numbers_of(finished, split), weights, strict=True)))
    assert scores[0].keys() == scores[1].keys()
    for numbers, score in scores[0].items():
        assert scores[1][numbers] == pytest.approx(score, rel=1e-6)


def test_the_weights_that_are_told_are_those_of_all_rows():
    own = {"row_weight": "entity(c)", "num_epochs": 1}
    sites = one_per_site(whole(store()))
    plain = run("squared", sites, **own).chosen["row-weight"]
    sample = run("squared", sites, **own, coreset_size=20)
    assert sample.chosen["row-weight"] == plain
    assert plain["effective-rows"] > 20


def test_clusters_of_shards_are_those_of_their_table():
    """Algorithm 3: 2 alpha of the cost, and 2 alpha for each cluster of a shard."""
    sql = store_sql("squared")
    sites = one_per_site(sharded(frames()))
    drawn = run_query(
        sql, sites, "coreset-kmeans", coreset_size=20_000, clusters=3
    ).strategy.method.sample
    # of at most as many clusters as a shard has rows, o in three shards
    totals = {name: total / 4 for name, total in drawn.totals.items()}
    assert totals == pytest.approx({"o": 1 + 9, "c": 1 + 6, "i": 1 + 6}, abs=1e-6)
    assert drawn.sample.weights.sum() == pytest.approx(drawn.joined_rows, rel=0.03)


def test_the_server_sees_sums_of_scores_alone():
    finished = drawn(store_sql("squared"), sharded, coreset_size=40)
    coreset = finished.strategy.method.sample
    masked = finished.arrays(TRAIN_WEIGH, replies=True)
    sample = coreset.sample
    rows = coreset.joined_rows
    assert len(masked) == 7  # shards
    total = sum(masked.values())
    scores = from_fixed(total, rows) + len(ALIASES) / rows
    # weights times scores per draw are total / m, for all rows
    per_draw = sample.weights * scores / sample.counts
    np.testing.assert_allclose(per_draw, per_draw[0], rtol=1e-9)
    # a part's own numbers are nothing like scores: of a score the high bits are 0
    largest = int(to_fixed(np.array([1.0]), rows)[0])
    for own in masked.values():
        assert (own > 100 * largest).mean() > 0.9
    assert (total <= largest * len(ALIASES)).all()


def test_a_sample_of_all_rows_is_the_run_without_one():
    sites = one_per_site(sharded(store()))
    how = {"num_epochs": 3, "tolerance": 1e-12}
    plain = run("squared", sites, **how)
    every = run("squared", sites, coreset_size=10_000, coreset_kind="uniform", **how)
    assert every.losses == plain.losses
    # it takes no message, and reads no row
    for one, other in zip(plain.history, every.history, strict=True):
        assert (one.test, one.phase) == (other.test, other.phase)
        assert one.bytes_down == other.bytes_down


@pytest.mark.parametrize("strategy", ["admm", "sgd"])
def test_held_out_rows_are_scored_in_the_last_epoch(strategy):
    own = {"coreset_size": 30, "coreset_kind": "uniform", "num_epochs": 3}
    layout = sharded if strategy == "admm" else whole
    sites = one_per_site(layout(store()))
    last = run("squared", sites, strategy, **own)
    every = run("squared", sites, strategy, tolerance=1e-12, **own)
    tested = [bool(item.test) for item in last.history if item.train]
    assert tested == [False, False, True]
    assert all(item.test for item in every.history if item.train)
    assert last.report.final_test == pytest.approx(every.report.final_test, rel=1e-6)
    assert last.losses[-1] == pytest.approx(every.losses[-1], rel=1e-6)
    if strategy == "admm":
        tables = last.problem.tables.values()
        trained = sum(rows.trained * own.outputs for own in tables for rows in own.rows)
        sent = last.sent(Action.CONSENSUS, replies=True)
        scores = [array.nbytes for seen in sent for array in seen.arrays.values()]
        per_epoch = np.array(scores).reshape(3, -1).sum(axis=1)
        assert per_epoch[0] == per_epoch[1] == 4 * trained < per_epoch[2]


def claim(split, claims, **settings):
    """Train on sites of which some say other things than they found, by action."""

    @on_replies(*claims)
    def change(seen):
        if "error" not in seen.header:
            claims[seen.action](seen)

    grid = WatchedGrid(one_per_site(split(store())), change)
    settings = {"num_epochs": 1, "coreset_size": 60, **settings}
    return federated.train(grid, store_sql("squared"), **settings).chosen["coreset"]


def with_facts(table: str, **facts):
    """Change what a site says of its part, of the table's one."""
    place = list(ALIASES).index(table)

    def change(seen):
        for part in seen.header["parts"]:
            if part["id"] == place:
                part.update(facts)

    return change


def with_arrays(change):
    def changed(seen):
        seen.arrays = {key: change(key[0], own) for key, own in seen.arrays.items()}

    return changed


def test_a_total_that_no_columns_have_is_capped_and_told():
    plain = claim(whole, {})
    assert plain["capped"] == []
    found = claim(whole, {TRAIN_MEASURE: with_facts("c", total=1e9)})
    # of its age and its regions, missing ones included: it has five columns
    (words,) = found["capped"]
    assert words.startswith("c at ")
    assert words.endswith("1e+09 of at most 5")
    most = 5 / (5 + 3 + sum(plain["totals"][name] for name in ("o", "i")))
    assert found["shares"]["c"] == pytest.approx(most)
    assert sum(found["shares"].values()) + found["uniform-share"] == pytest.approx(1)


ODD = {
    "a negative total": ({TRAIN_MEASURE: with_facts("c", total=-1)}, "'total'"),
    "no total": (
        {TRAIN_MEASURE: with_facts("c", total=None)},
        "sent no sum of its sensitivities",
    ),
    "rows beyond its own": (
        {TRAIN_DRAW: with_arrays(lambda p, a: a + np.uint32(99 * (p == 1)))},
        r"sent drawn row numbers beyond its \d+ rows",
    ),
    "fewer rows": (
        {TRAIN_DRAW: with_arrays(lambda p, a: a[: len(a) - (p == 1)])},
        "sent 'drawn' of shape",
    ),
    "scores beyond all": (
        {TRAIN_WEIGH: with_arrays(lambda p, a: a + np.uint64((p == 1) << 50))},
        r"the sensitivities of \d+ of \d+ drawn rows sum to more than is possible",
    ),
    "scores below 0": (
        {TRAIN_WEIGH: with_arrays(lambda p, a: a - np.uint64((p == 1) << 40))},
        "sum to more than is possible",
    ),
}


@pytest.mark.parametrize("odd", ODD)
def test_what_no_rows_can_have_is_refused(odd):
    claims, message = ODD[odd]
    with pytest.raises(ReplyError, match=message) as caught:
        claim(whole, claims)
    if "Use coreset-kind = 'uniform'" in str(caught.value):
        assert claim(whole, claims, coreset_kind="uniform")["size"] == 60


@pytest.mark.parametrize(
    "change",
    [lambda a: -a, lambda a: a + np.triu(np.ones_like(a), 1)],
    ids=["negative", "asymmetric"],
)
def test_a_shard_cannot_send_moments_of_no_columns(change):
    with pytest.raises(ReplyError, match="an impossible matrix of second moments"):
        claim(sharded, {TRAIN_MEASURE: with_arrays(lambda p, a: a if p else change(a))})


def test_a_shard_has_at_most_the_share_of_its_tables_columns():
    claims = {TRAIN_MEASURE: with_arrays(lambda p, a: a if p else a * 1e15)}
    # its rows are all of every direction, of which there are as many as without it
    assert claim(sharded, claims)["totals"]["o"] == pytest.approx(4, abs=0.01)


@pytest.mark.parametrize("size", [1, 500])
def test_a_sample_may_be_a_row_or_more_than_all(size):
    facts = claim(whole, {}, coreset_size=size)
    assert facts["size"] == size
    assert facts["distinct-rows"] <= min(size, facts["joined-rows"])


def test_more_shards_than_can_be_summed_are_refused(monkeypatch):
    monkeypatch.setattr("strategies.methods.coreset.drawing.MOST_PARTS", 2)
    message = "of at most 2 shards; the query has 3: use 'uniform'"
    with pytest.raises(SettingsError, match=message):
        claim(whole, {})
    assert claim(whole, {}, coreset_kind="uniform")["size"] == 60


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_policy_that_keeps_scores_keeps_sensitivities(
    tmp_path, monkeypatch, is_forgotten
):
    if is_forgotten:
        # what a handler has not checked is refused when it is written down
        monkeypatch.setattr(
            "client_apps.methods.coreset.drawing.check_plan", lambda *_, **__: None
        )
    grid = HostileGrid(tmp_path, policies={"orders": 'releases = { scores = "never" }'})
    with pytest.raises(SiteError, match=r"releases\.scores = never"):
        train(grid, coreset_size=5)
    assert (TRAIN_MEASURE, ORDERS, "gram") not in grid.left
    assert not any(action == Action.PREPARE for action, *_ in grid.left)


ASKED = {
    "moments of other rows": (
        *(TRAIN_DRAW, US, array(US_PART, "gram", lambda a: a * 1e-3)),
        "array 'gram' is not a sum that includes this shard",
    ),
    "moments of none": (
        *(TRAIN_DRAW, US, array(US_PART, "gram", lambda a: -a)),
        "array 'gram' is not a Gram matrix",
    ),
    "more than may be drawn": (
        *(TRAIN_DRAW, US, change_of("part.count = 33554432")),
        "'count' is 33554432; allowed: `int` <= 16777216",
    ),
    "rows that it has not": (
        *(TRAIN_WEIGH, SHOP, array(ORDERS, "rows", lambda a: a + 1000)),
        "array 'rows' must hold at most 16777216 numbers from -1 to",
    ),
    "a place beyond all": (
        *(TRAIN_WEIGH, SHOP, change_of("part.place = 3")),
        "'place': the run was proposed with 0, and the request says 3",
    ),
    "classes of another label": (
        *(TRAIN_MEASURE, SHOP, change_of("part.label.classes = [1]")),
        "'classes' lacks classes of the label",
    ),
    "classes that are texts": (
        *(TRAIN_MEASURE, SHOP, change_of('part.label.classes = ["x"]')),
        "'classes' lacks classes of the label",
    ),
    "the label of another table": (
        *(TRAIN_MEASURE, US, change_of('part.label = {"classes": null}')),
        "the part has no label",
    ),
}


def test_a_site_refuses_what_its_rows_cannot_be_asked(tmp_path):
    def changes(action, node, packet):
        for what, (wanted, at, change, _) in ASKED.items():
            if (action, node) == (wanted, at):
                yield what, change(packet)

    grid = HostileGrid(tmp_path, changes)
    strategy = train(grid, coreset_size=8, num_epochs=1)
    told = {answer.what: answer for answer in grid.answers}
    assert told.keys() == ASKED.keys()
    for what, answer in told.items():
        assert ASKED[what][3] in answer.error, answer.error
        answer.check_nothing_left()
    # drawing has its lines in the ledger
    drawing = {"sensitivities", "drawn-rows", "masked-sensitivities"}
    for site, lines in strategy.ledgers.items():
        noted = {own["release"]["what"]: own["release"] for own in lines}
        assert drawing <= noted.keys(), site
        assert all(noted[what]["mechanism"] is None for what in drawing)
