"""The VFL twins take the same steps as the methods over the tables, for more bytes."""

import numpy as np
import pytest

from tests.support.datasets import SQL, each_data_set, few_rows, sites_of, tables_of
from tests.support.examples.store_runs import FRAMES, LEFT, query, reference_of
from tests.support.examples.store_runs import trained as on_store
from tests.support.federated import SOURCE, Run, run_query
from tests.support.federated import one_per_site as sites

SOURCES = {"inner": SOURCE, "left": LEFT}
SAME = 1e-4
EPOCHS = 3
ADMM = ("admm", {})
CONSENSUS = ("admm", {"lou": "consensus"})
SGD = ("sgd", {"batch_size": 30, "learning_rate": 0.05})
MLP = ("sgd", {**SGD[1], "model": "mlp", "hidden_sizes": (6,)})


def trained(strategy, layout, source="inner", loss="squared", **how) -> Run:
    how = {"num_epochs": EPOCHS, **how}
    return on_store(loss, layout, strategy, SOURCES[source], **how)


def check_same_steps(own: Run, twin: Run) -> None:
    """Assert that the parameters and the metrics are the same after every epoch."""
    assert len(own.parameters) == len(twin.parameters) > 2
    for before, after in zip(own.parameters, twin.parameters, strict=True):
        for table, theta in before.items():
            assert np.linalg.norm(after[table] - theta) <= SAME * np.linalg.norm(theta)
    ended = [[item for item in run.history if item.train] for run in (own, twin)]
    for mine, theirs in zip(*ended, strict=True):
        assert theirs.test == pytest.approx(mine.test, rel=SAME)
        assert theirs.train == pytest.approx(mine.train, rel=SAME)
    # and the steps are steps
    assert any(
        np.abs(own.theta[name] - own.parameters[1][name]).max() for name in own.theta
    )


@pytest.mark.parametrize(
    ("method", "layout", "source", "loss"),
    [
        (ADMM, "whole", "inner", "squared"),
        (ADMM, "sharded", "left", "squared"),
        (SGD, "sharded", "inner", "squared"),
        (SGD, "whole", "left", "logistic"),
        (ADMM, "sharded", "inner", "softmax"),
        (CONSENSUS, "sharded", "left", "logistic"),
        (MLP, "sharded", "left", "softmax"),
    ],
)
def test_twins_take_the_same_steps(method, layout, source, loss):
    strategy, how = method
    own = trained(strategy, layout, source, loss, **how)
    check_same_steps(own, trained(f"vfl-{strategy}", layout, source, loss, **how))


def test_shards_without_rows_and_runs_without_held_out_rows():
    frames = {
        name: [frame, frame.head(0)] if name == "orders" else [frame.head(0), frame]
        for name, frame in FRAMES.items()
    }
    how = {"num_epochs": 2, "test_fraction": 0.0}
    own, twin = (
        run_query(query(source=LEFT), sites(frames), name, **how)
        for name in ("admm", "vfl-admm")
    )
    check_same_steps(own, twin)


@pytest.mark.parametrize(
    ("layout", "source"), [("whole", "inner"), ("sharded", "left")]
)
def test_sites_train_on_the_vertical_partitions_of_the_join(layout, source):
    """The features that lie at the sites are DuckDB's join, column by column."""
    twin = trained("vfl-admm", layout, source)
    reference = reference_of(trained("admm", layout, source), SOURCES[source])
    for alias, rows in twin.strategy.training_problem.train.tables.items():
        assert rows.multiplicity.max() == 1
        features = np.vstack(
            [twin.features[alias], np.zeros_like(twin.features[alias][:1])]
        )
        expected = reference.inputs[alias][:, : features.shape[1]]
        np.testing.assert_allclose(features[rows.row_of], expected, atol=1e-5)
        assert rows.has_missing == (source == "left" and alias != "o")


def test_a_site_is_told_the_row_behind_each_of_its_joined_rows():
    twin = trained("vfl-sgd", "sharded", **SGD[1])
    federation = trained("sgd", "sharded", **SGD[1]).strategy.training_problem
    told = twin.arrays("train.prepare")
    assert not any(name in ("trained", "tested", "multiplicity") for _, name in told)
    for alias, table in federation.tables.items():
        rows = federation.train.tables[alias].row_of
        for part, own_rows in zip(table.parts, table.rows, strict=True):
            listed = told[part.number, "expanded-trained"]
            is_own = (rows >= own_rows.start) & (rows < own_rows.start + own_rows.total)
            assert listed.dtype == np.int32
            assert len(listed) == np.count_nonzero(is_own)
            # the rows of the shard, as often as they are joined
            counts = np.bincount(rows[is_own] - own_rows.start)
            assert sorted(np.unique(listed, return_counts=True)[1]) == sorted(
                counts[counts > 0]
            )


def test_the_report_tells_the_fan_out_of_the_tables_not_of_the_twin():
    own, twin = (
        trained(name, "whole").strategy.report for name in ("admm", "vfl-admm")
    )
    assert twin.tables == own.tables
    assert twin.tables[1].multiplicity["mean"] > 2


def twins_on(name, tables, is_sharded, strategy, **how):
    """Check the steps of both; return their bytes of an epoch."""
    sites, how = sites_of(tables, is_sharded=is_sharded), {"num_epochs": 3, **how}
    twins = (strategy, f"vfl-{strategy}")
    runs = [run_query(SQL[name], sites, twin, device="cpu", **how) for twin in twins]
    check_same_steps(*runs)
    moved = [
        sum(sum(item.bytes_up.values()) + sum(item.bytes_down.values()) for item in own)
        for own in ([item for item in run.history if item.epoch == 2] for run in runs)
    ]
    return moved, runs[0].strategy.training_problem


def allowed(federation) -> float:
    """The ratio of Table 6 for ADMM with every table in one shard.

    VFL sends 4 d_c (2 N + N') per table, and TablePuppet 4 d_c (n + m).
    """
    joined = vfl = 0
    for table in federation.tables.values():
        joined += 2 * federation.train.joined_rows + federation.test.joined_rows
        vfl += sum(rows.trained + rows.total for rows in table.rows)
    return joined / vfl


@each_data_set
def test_twins_on_the_data_sets(name):
    (own, vfl), federation = twins_on(name, few_rows(name, 1_000), False, "admm")
    assert vfl / own == pytest.approx(allowed(federation), rel=1e-12)
    if name == "store":
        # N over the mean n_i allows more than three, of so few rows too
        assert vfl >= 3 * own


@pytest.mark.slow
@each_data_set
def test_twins_on_the_whole_data_sets(name):
    tables = tables_of(name)
    (own, vfl), federation = twins_on(name, tables, False, "admm", num_epochs=2)
    assert vfl / own == pytest.approx(allowed(federation), rel=1e-12)
    assert vfl >= 3 * own
    size = federation.train.joined_rows // 5
    twins_on(name, tables, True, "sgd", batch_size=size, num_epochs=2)
