"""Ridge regression and k-means on a coreset, solved at the server."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from strategies.methods.coreset.kmeans import _table_clusters
from strategies.run.exchange import Part, Replies
from strategies.setup.problem import PartRows, TrainedTable
from tests.support import federated
from tests.support.examples.coresets import kmeans_cost
from tests.support.federated import (
    ALIASES,
    SOURCE,
    LocalGrid,
    Run,
    WatchedGrid,
    one_per_site,
    run_query,
    sharded,
    store,
    store_sql,
    whole,
)
from tests.support.files import case_table
from tests.support.predicted import on, scored, train
from tests.support.reference.joins import joined_positions
from tp_flower import errors
from tp_flower.methods.admm.messages import TRAIN_ADMM
from tp_flower.methods.coreset.messages import TRAIN_ROWS, RowsReply, RowsRequest
from tp_flower.methods.coreset.solvers import distdim, nearest, weighted_kmeans
from tp_flower.protocol.codec import decode, encode
from tp_flower.protocol.packet import Packet, pack, unpack
from tp_flower.protocol.training_messages import Update
from tp_flower.randomness import Stream, generator
from tp_flower.settings import PrivacySettings, Settings

CASES = case_table(__file__)
SQL = store_sql("squared")
WEIGHTED = SQL.replace("SELECT", "SELECT o.day AS weight,")
ALL = {"coreset_kind": "uniform", "coreset_size": 10**6}
CLUSTERS = "SELECT o.day, o.online, c.age, c.region, i.price " + SOURCE


def solve(strategy: str, layout=whole, sql: str = SQL, **settings: object) -> Run:
    return run_query(sql, one_per_site(layout(store())), strategy, **settings)


def joined(finished: Run) -> np.ndarray:
    mapping = finished.problem.train
    blocks = [
        np.append(own, np.zeros((1, own.shape[1])), axis=0)[mapping.tables[name].row_of]
        for name, own in finished.features.items()
    ]
    return np.concatenate(blocks, axis=1).astype(np.float64)


def weights_of(finished: Run) -> np.ndarray:
    weights = finished.problem.weighting.train_rows
    if weights is None:
        return np.ones(finished.problem.train.joined_rows)
    return weights


def side_by_side(finished: Run, clusters: int) -> np.ndarray:
    """The centres of joined rows, from the tables' own coordinates."""
    own = [theta.reshape(clusters, -1) for theta in finished.theta.values()]
    return np.concatenate(own, axis=1)


def objective_gradient(finished: Run) -> tuple[np.ndarray, np.ndarray]:
    """The gradient of the weighted half mean squared error, and theta, by column.

    The label table is the first: its intercept comes after its own columns.
    """
    problem = finished.problem
    design = joined(finished)
    place = next(iter(finished.features.values())).shape[1]
    design = np.insert(design, place, 1.0, axis=1)
    weights = weights_of(finished)
    residual = design @ finished.flat + problem.base_score[0]
    residual -= problem.objective.target.numbers
    gradient = design.T @ (weights * residual) / weights.sum()
    return np.delete(gradient, place), np.delete(finished.flat, place)


def test_ridge_over_all_rows_is_what_admm_converges_to():
    privacy = PrivacySettings(scores="clear")
    own = {"l2": 0.05, "test_fraction": 0.25, "device": "cpu", "privacy": privacy}
    solved = solve("coreset-ridge", sharded, **ALL, **own)
    # one site has all shards: many epochs are of fewer messages
    own |= {"num_epochs": 300, "tolerance": 1e-9}
    admm = run_query(SQL, [sharded(store())], "admm", **own)
    np.testing.assert_allclose(solved.flat, admm.flat, atol=1e-6)
    found = solved.history[-2]
    expected = admm.history[-2]
    assert found.train == pytest.approx(expected.train, rel=1e-6)
    assert found.test == pytest.approx(expected.test, rel=1e-6)
    phases = [item.phase for item in solved.history]
    assert phases[-3:] == ["rows", "evaluate", "finish"]


@pytest.mark.parametrize("outer", [False, True])
def test_ridge_is_the_optimum_of_the_weighted_sample(outer):
    # a row without an item is in any sample of all rows, weighed by the query
    own = ALL if outer else {"coreset_size": 50}
    sql = WEIGHTED.replace("JOIN items", "LEFT JOIN items") if outer else WEIGHTED
    done = solve("coreset-ridge", sharded, sql, l2=0.1, **own)
    gradient, theta = objective_gradient(done)
    np.testing.assert_allclose(gradient, -0.1 * theta, atol=1e-5)
    rows = done.problem.train.tables["i"].row_of
    assert len(np.unique(weights_of(done))) > 2
    assert (rows < 0).any() == outer


def test_an_l1_penalty_leaves_what_its_optimality_asks_for():
    # of a uniform sample, which is the same in every run
    gradient, theta = objective_gradient(
        solve(
            "coreset-ridge",
            sql=WEIGHTED,
            coreset_kind="uniform",
            coreset_size=60,
            l2=0.02,
            l1=0.1,
        )
    )
    slope = gradient + 0.02 * theta
    used = theta != 0.0
    assert 0 < used.sum() < len(theta)
    np.testing.assert_allclose(slope[used], -0.1 * np.sign(theta[used]), atol=1e-4)
    assert (np.abs(slope[~used]) <= 0.1 + 1e-4).all()


def test_saga_comes_to_the_same_as_the_exact_solver():
    own = {"coreset_kind": "uniform", "coreset_size": 50, "l2": 0.1, "sql": WEIGHTED}
    exact = solve("coreset-ridge", coreset_solver="exact", **own)
    saga = solve("coreset-ridge", coreset_solver="saga", **own)
    assert saga.chosen["coreset-solver"] == "saga"
    np.testing.assert_allclose(saga.flat, exact.flat, atol=1e-3)


def test_ridge_is_not_for_classes():
    with pytest.raises(
        errors.QueryError, match=r"squared loss of numbers, .* 'logistic': use"
    ):
        solve("coreset-ridge", sql=store_sql("logistic"), **ALL)


def test_what_is_known_of_the_assumption_is_in_the_report():
    strategy = solve("coreset-ridge", **ALL).strategy
    # the one-hot columns of a region add up to the intercept
    assert strategy.chosen["coreset"]["gamma"] == 0.0
    (warning,) = strategy.warnings
    assert "gamma is 0: " in warning
    assert "only the robust guarantee holds" in warning
    strategy = solve("coreset-ridge", sql=SQL.replace("c.region, ", ""), **ALL).strategy
    assert 0.1 < strategy.chosen["coreset"]["gamma"] < 1.0
    assert strategy.warnings == []


@pytest.mark.parametrize(
    ("layout", "solver"), [(whole, "kmeans++"), (sharded, "distdim")]
)
def test_the_cost_over_all_joined_rows_is_that_of_the_built_join(
    layout, solver, tmp_path
):
    frames = store()
    sites = on(layout, frames)
    model = train(
        tmp_path,
        sites,
        CLUSTERS,
        "coreset-kmeans",
        num_epochs=0,
        clusters=3,
        coreset_size=40,
        coreset_solver=solver,
    )
    expected = model.reference(frames, SOURCE)
    distances = np.array(expected)[:, 1:]
    assert model.manifest.test["loss"] == pytest.approx(
        distances.min(axis=1).mean(), rel=1e-5
    )
    # and the model predicts: the nearest centre, and how far it is
    table = model.table(sites)
    np.testing.assert_allclose(scored(table), expected, atol=1e-4)
    scores = np.stack([table[f"score.{k}"].to_numpy() for k in range(3)], axis=1)
    assert table["prediction"].to_pylist() == [str(k) for k in scores.argmin(axis=1)]
    np.testing.assert_allclose(
        np.square(table["distance"].to_numpy()), scores.min(axis=1), atol=1e-5
    )
    # a label that is there is no obstacle to measuring the cost again
    labelled = CLUSTERS.replace("SELECT", "SELECT o.qty AS label,")
    assert model.evaluate(sites, labelled) == pytest.approx(
        model.manifest.test, rel=1e-6
    )


def test_clusters_of_its_rows_are_for_the_first_tables_site(tmp_path):
    sites = on(sharded, store())
    own = {"num_epochs": 0, "clusters": 2, **ALL}
    model = train(tmp_path, sites, CLUSTERS, "coreset-kmeans", **own)
    expected = model.table(sites)
    found = model.table(sites, row_key="day")
    for name in ("score.0", "score.1", "distance", "prediction"):
        assert found[name].to_pylist() == expected[name].to_pylist()
    (folder,) = tmp_path.glob("*/predictions/row-keys-*")
    assert folder.parts[-3] == "orders"
    day_of = pd.read_parquet(folder).drop_duplicates("row_key").set_index("row_key")
    days = pd.concat(sites["orders"]["orders"])["day"].to_numpy()
    named = day_of["day"].loc[found["row_key"].to_numpy()]
    assert named.tolist() == days[expected["row_key"].to_numpy()].tolist()


def test_centres_are_those_of_the_sample_of_the_joined_rows():
    done = solve("coreset-kmeans", sharded, clusters=3, coreset_size=40, seed=5)
    points = joined(done)
    weights = weights_of(done)
    centres = weighted_kmeans(points, weights, 3, generator(5, Stream.SOLVE))
    np.testing.assert_allclose(side_by_side(done, 3), centres, atol=1e-9)
    mean = kmeans_cost(points, centres, weights) / weights.sum()
    assert done.losses == [pytest.approx(mean, rel=1e-5)]


def test_with_distdim_only_local_clusters_leave():
    own = {"clusters": 3, "coreset_solver": "distdim", "seed": 5, **ALL}
    done = solve("coreset-kmeans", **own)
    sent = done.arrays("train.rows", replies=True)
    assert {name for _, name in sent} == {"centres", "nearest"}
    local = []
    labels = []
    mapping = done.problem.train
    for number, (name, rows) in enumerate(done.features.items()):
        rng = generator(5, Stream.LOCAL_FIT, 0, number)
        mass = mapping.tables[name].multiplicity
        local.append(weighted_kmeans(rows.astype(np.float64), mass, 3, rng))
        labels.append(nearest(rows, local[-1])[0][mapping.tables[name].row_of])
    centres = distdim(
        np.stack(labels, axis=1), local, weights_of(done), 3, generator(5, Stream.SOLVE)
    )
    np.testing.assert_allclose(side_by_side(done, 3), centres)


def test_fewer_distinct_rows_than_clusters_are_all_hit():
    frames = store()
    frames["orders"] = frames["orders"].iloc[[5, 5, 9]]
    done = run_query(
        CLUSTERS, one_per_site(whole(frames)), "coreset-kmeans", clusters=50, **ALL
    )
    assert done.chosen["clusters"] == len(np.unique(joined(done), axis=0)) < 50
    assert done.report.final_test["loss"] == pytest.approx(0.0, abs=1e-8)


def test_weights_of_joined_rows_count_and_the_label_is_left_out():
    frames = store()
    sites = one_per_site(sharded(frames))
    sql = CLUSTERS.replace("SELECT", "SELECT o.nothing AS label, o.day AS weight,")
    done = run_query(
        sql,
        sites,
        "coreset-kmeans",
        clusters=3,
        coreset_kind="uniform",
        coreset_size=30,
    )
    assert not any("label" in name for seen in done.seen for _, name in seen.arrays)
    problem = done.problem
    sent = {key: array for seen in done.seen for key, array in seen.arrays.items()}
    local = {
        name: np.concatenate([sent[part.number, "scores"] for part in table.parts])
        for name, table in problem.tables.items()
    }
    scores = problem.read_scores(problem.test.expand(local)).min(axis=1)
    rows = joined_positions(whole(frames), ALIASES, SOURCE)
    assert len(problem.weighting.test) == len(rows)
    loss = done.report.final_test["loss"]
    assert loss == pytest.approx(np.average(scores, weights=problem.weighting.test))
    assert loss != pytest.approx(scores.mean())


def test_rows_that_may_lack_a_part_are_not_clustered():
    with pytest.raises(
        errors.QueryError, match="clusters whole rows, but the query LEFT JO"
    ):
        solve("coreset-kmeans", sql=CLUSTERS.replace("JOIN items", "LEFT JOIN items"))


@pytest.mark.parametrize(("strategy", "own", "policy", "refused"), CASES["rows"])
def test_rows_leave_where_the_policy_says_so(strategy, own, policy, refused, tmp_path):
    tables = store()
    policies = dict.fromkeys(tables, f"releases = {{ {policy} }}")
    grid = WatchedGrid([federated.write_site(tmp_path, tables, policies)])
    sql = SQL if strategy == "coreset-ridge" else CLUSTERS
    with pytest.raises(errors.SiteError, match=refused) if refused else nullcontext():
        federated.train(
            grid, sql, strategy, num_epochs=0, coreset_kind="uniform", **own
        )
    assert bool(grid.sent(TRAIN_ROWS)) == (not refused)


def test_the_ledger_and_the_report_say_what_has_left():
    done = solve("coreset-ridge", **ALL).report.privacy
    told = [own for own in done["messages"] if own["message"] == "train.rows"]
    sent = [(own["to"], own["protection"]) for own in told]
    assert sent == [("sites", "nothing"), ("server", "nothing")]
    assert "encoded features of every row in the sample" in told[1]["carries"]
    lines = [line for account in done["ledger"].values() for line in account]
    noted = [line["release"] for line in lines if line["event"] == "note"]
    scopes = [
        (release["what"], "not covered" in release["scope"])
        for release in noted
        if release["action"] == "train.rows"
    ]
    assert scopes == [("rows", True)] * 3


class Asking(LocalGrid):
    """A server that asks for rows in a run that was planned without."""

    def _deliver(self, message):
        if message.metadata.message_type == TRAIN_ADMM:
            message.metadata.__dict__["_message_type"] = str(TRAIN_ROWS)
            header = unpack(message.content).header
            place = {name: header.get(name) for name in ("run", "round", "after")}
            asked = encode(RowsRequest(seed=0, clusters=10))
            message.content = pack(Packet({**asked.header, **place}))
        return super()._deliver(message)


def test_rows_do_not_leave_a_run_that_was_planned_without():
    with pytest.raises(
        errors.SiteError, match=r"'train\.rows' is no message of a run by 'admm'"
    ):
        federated.train(Asking(one_per_site(whole(store()))), SQL)


def clusters_of(centres, labels) -> tuple[TrainedTable, Replies]:
    """A table of one part with three sampled rows of two features."""
    part = Part(0, "t", "here", 2, 0)
    rows = PartRows(0, 3, 3, np.zeros(3, bool))
    table = TrainedTable(
        *("t", (part,), "centres", 2, 4, np.zeros(8, bool)),
        *((rows,), Update.GIVEN, False, 0.0, (0.0,)),
    )
    arrays = {(0, "centres"): centres, (0, "nearest"): np.array(labels, np.uint32)}
    return table, Replies({}, decode(RowsReply, Packet({}, arrays)).parts)


@pytest.mark.parametrize(
    ("centres", "labels", "message"),
    [
        (np.zeros((5, 2)), [0, 1, 2], "5 centres, but was asked for 4 at most"),
        (np.zeros((2, 2)), [0, 1, 2], "centre numbers beyond its 2 centres"),
        (np.zeros((0, 2)), [0, 0, 0], "centre numbers beyond its 0 centres"),
        (np.zeros((2, 3)), [0, 1, 1], "centres"),
        (np.full((2, 2), np.nan), [0, 1, 1], "finite|diverged"),
    ],
)
def test_clusters_that_are_none_are_refused(centres, labels, message):
    with pytest.raises((errors.MessageError, errors.ReplyError), match=message):
        _table_clusters(*clusters_of(centres, labels), 4)


def test_local_centres_of_several_shards_are_told_apart():
    table, replies = clusters_of(np.arange(4.0).reshape(2, 2), [1, 0, 1])
    other = replace(table.parts[0], number=1)
    rows = (*table.rows, replace(table.rows[0], start=3))
    table = replace(table, parts=(*table.parts, other), rows=rows)
    both = Replies({}, {0: replies.parts[0], 1: replies.parts[0]})
    labels, centres = _table_clusters(table, both, 4)
    assert labels.tolist() == [1, 0, 1, 3, 2, 3]
    assert centres.tolist() == [[0, 1], [2, 3]] * 2


@pytest.mark.parametrize(
    ("own", "message"),
    [
        *CASES["settings"],
        (
            {"privacy": PrivacySettings(predictions=1.0), "coreset_kind": "uniform"},
            "privacy.predictions: .* sends the rows that it draws in the clear",
        ),
    ],
)
def test_settings_that_do_not_go_with_a_solved_strategy(own, message):
    with pytest.raises(errors.SettingsError, match=message):
        Settings(strategy="coreset-ridge", **own)
