"""Training on weighted joined rows: as on the materialised join with sample weights."""

import numpy as np
import pytest

from tests.support.examples.site_examples import noise_of_known_keys
from tests.support.examples.store_runs import (
    FRAMES,
    LEFT,
    assert_optimal,
    distance,
    loss_left,
    query,
    reference_of,
    sgd_of,
    trained,
)
from tests.support.federated import SOURCE, one_per_site, run_query, whole
from tests.support.files import case_table
from tests.support.reference.training import SgdSettings
from tp_flower.errors import QueryError, SettingsError, SiteError
from tp_flower.settings import PrivacySettings

# two of 60 private labels change: with random keys ten may, and the loss rises
__all__ = ["noise_of_known_keys"]

CASES = case_table(__file__)
HOW = SgdSettings(rate=0.02)
BY_SQL = CASES["by_sql"]
# masked scores are rounded, which bounds how near to the optimum a run comes
TO_THE_END = {
    "strategy": "cg",
    "tolerance": 1e-7,
    "one_site": True,
    "privacy": PrivacySettings(scores="clear"),
}


def slope(reference, finished):
    """The largest number of the gradient of joined rows at the parameters of a run."""
    return np.abs(reference.gradient(finished.flat)).max()


@pytest.mark.cases("squared-whole-entity(C)")
@pytest.mark.parametrize(
    ("loss", "layout", "weight"),
    [
        ("squared", "whole", "entity(C)"),
        ("softmax", "whole", "entity( i )"),
        pytest.param("squared", "sharded", "entity", marks=pytest.mark.slow),
    ],
)
def test_it_ends_at_the_weighted_optimum(loss, layout, weight):
    finished = trained(loss, layout, row_weight=weight, **TO_THE_END)
    reference = reference_of(finished, weight=BY_SQL[weight])
    assert slope(reference, finished) <= 3e-6
    # which is another than that of joined rows that count alike
    assert slope(reference, trained(loss, layout, num_epochs=12)) > 1e-3


@pytest.mark.parametrize(
    ("loss", "layout"), [("logistic", "whole"), ("softmax", "sharded")]
)
def test_sgd_is_centralised_sgd(loss, layout):
    finished = trained(
        loss,
        layout,
        "sgd",
        row_weight="entity(c)",
        num_epochs=2,
        batch_size=16,
        learning_rate=HOW.rate,
    )
    expected = sgd_of(finished, HOW, weight=BY_SQL["entity(C)"])
    assert distance(finished.flat, expected) < 1e-5


def test_automatic_sgd_comes_near_the_weighted_optimum():
    finished = trained(
        "squared",
        "whole",
        "sgd",
        one_site=True,
        row_weight="entity(c)",
        num_epochs=30,
        batch_size=16,
    )
    assert loss_left(finished, weight=BY_SQL["entity(C)"]) < 0.02


def test_an_entity_counts_once_in_training_and_once_in_testing():
    finished = trained("squared", row_weight="entity(c)", num_epochs=1)
    problem = finished.problem
    facts = finished.chosen["row-weight"]
    weighting = problem.weighting
    for rows, weights in (
        (problem.train.tables["c"], weighting.train_rows),
        (problem.test.tables["c"], weighting.test),
    ):
        sums = np.bincount(rows.row_of, weights)
        assert np.ptp(sums[sums > 0]) < 1e-12
    assert weighting.train_rows.mean() == pytest.approx(1.0)
    assert facts["entity"] == "c"
    assert facts["effective-rows"] < problem.train.joined_rows
    # the report's multiplicities stay counts
    most = finished.report.tables[1].multiplicity["max"]
    assert most > 1
    assert isinstance(most, int)


@pytest.mark.parametrize(
    ("loss", "layout", "weight", "source"),
    [
        ("squared", "sharded", "i.price", SOURCE),
        ("squared", "whole", "o.w", SOURCE),
        ("squared", "whole", "o.w", LEFT),
        pytest.param("squared", "sharded", "o.w", LEFT, marks=pytest.mark.slow),
        pytest.param("logistic", "whole", "i.price", SOURCE, marks=pytest.mark.slow),
        pytest.param("softmax", "whole", "o.w", LEFT, marks=pytest.mark.slow),
    ],
)
def test_the_optimum_for_the_querys_weight(loss, layout, weight, source):
    finished = trained(loss, layout, source=source, weight=weight, **TO_THE_END)
    assert slope(reference_of(finished, source, weight), finished) <= 3e-6


def test_rows_of_weight_0_take_no_part():
    finished = trained("squared", weight="o.w", num_epochs=1)
    plain = trained("squared", num_epochs=1)
    lost = finished.chosen["row-weight"]["left-out"]
    assert lost > 0
    assert sum(finished.problem.joined_rows) + lost == sum(plain.problem.joined_rows)
    zero = FRAMES["orders"]["w"].to_numpy() == 0
    assert not (finished.trained["o"] & zero).any()
    assert not (finished.tested["o"] & zero).any()


def test_weight_and_entity_multiply():
    finished = trained(
        "squared", weight="i.price", row_weight="entity(c)", **TO_THE_END
    )
    weight = f"i.price * {BY_SQL['entity(C)']}"
    assert slope(reference_of(finished, weight=weight), finished) <= 3e-6


@pytest.mark.parametrize("strategy", ["admm", "sgd"])
def test_equal_weights_are_a_run_without(strategy):
    how = {"num_epochs": 2} | ({"batch_size": 16} if strategy == "sgd" else {})
    one, two = (
        trained("squared", "whole", strategy, weight=weight, **how)
        for weight in ("o.w * 0 + 3", "")
    )
    np.testing.assert_array_equal(one.flat, two.flat)
    assert [r.test for r in one.history] == [r.test for r in two.history]
    sent = [
        [(r.bytes_up, r.bytes_down) for r in run.history if r.phase != "extract"]
        for run in (one, two)
    ]
    assert sent[0] == sent[1]


def test_the_unit_of_weights_does_not_matter():
    first, second, third = (
        trained("squared", weight=f"i.price * {unit}", num_epochs=4)
        for unit in (1, 8, 10)
    )
    np.testing.assert_array_equal(first.flat, second.flat)
    np.testing.assert_allclose(first.flat, third.flat, rtol=1e-5, atol=1e-7)


def test_whole_weights_repeat_rows_of_the_table():
    """Epoch by epoch, with balancing; encoders that read no row."""
    encoders = (("o", "day", "none"), ("o", "online", "none"))
    how = {"encoders": encoders, "test_fraction": 0.0, "num_epochs": 6}
    orders = FRAMES["orders"].assign(w=1 + FRAMES["orders"]["w"])
    repeated = orders.loc[orders.index.repeat(orders["w"])].reset_index(drop=True)

    def run(weight, orders):
        sites = one_per_site(whole({**FRAMES, "orders": orders}))
        return run_query(query(weight=weight), sites, **how)

    one = run("o.w", orders)
    two = run("", repeated)
    for own, other in zip(one.parameters, two.parameters, strict=True):
        for table in own:
            np.testing.assert_allclose(own[table], other[table], rtol=2e-4, atol=1e-6)
    np.testing.assert_allclose(one.losses, two.losses, rtol=1e-5)


@pytest.mark.parametrize("strategy", ["admm", "sgd"])
def test_mlps_fit_weighted_rows(strategy):
    more = {"batch_size": 16, "learning_rate": 0.01} if strategy == "sgd" else {}
    how = {"models": (("c", "mlp"),), "num_epochs": 2, **more}
    finished, plain = (
        trained("squared", "whole", strategy, weight=weight, **how)
        for weight in ("i.price", "")
    )
    assert finished.losses[-1] < finished.losses[0]
    assert distance(finished.theta["c"], plain.theta["c"]) > 1e-3


@pytest.mark.slow
def test_consensus_reaches_the_weighted_optimum():
    finished = trained(
        "logistic",
        "sharded",
        one_site=True,
        row_weight="entity(c)",
        lou="consensus",
        num_epochs=150,
    )
    assert_optimal(finished, excess=1e-3, weight=BY_SQL["entity(C)"])


@pytest.mark.parametrize(("weight", "is_left", "match"), CASES["refused"])
def test_weights_that_are_refused(weight, is_left, match):
    with pytest.raises(QueryError, match=match):
        trained("squared", source=LEFT if is_left else SOURCE, weight=weight)


@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ({"weight": "c.region"}, SiteError, "of type VARCHAR; it must be a number: CA"),
        (
            {"row_weight": "entity(x)"},
            SettingsError,
            "row-weight names table 'x'; the query has o, c, i",
        ),
        (
            {"row_weight": "entity(c)", "source": LEFT},
            SettingsError,
            r"row-weight is 'entity\(c\)', but c is LEFT JOINed",
        ),
        (
            {"weight": "o.w", "privacy": PrivacySettings(features="dp-sgd")},
            SettingsError,
            r"AS weight .* does not go with privacy.features, whose noise is for rows",
        ),
    ],
)
def test_settings_and_types_that_weights_do_not_go_with(how, error, match):
    with pytest.raises(error, match=match):
        trained("squared", **how)


def test_private_labels_are_weighted_but_not_told_by_the_weight():
    privacy = PrivacySettings(labels="randomised-response", label_epsilon=3.0)
    how = {"privacy": privacy, "num_epochs": 2}
    finished = trained("logistic", weight="i.price", **how)
    assert finished.losses[-1] < finished.losses[0]
    match = "privacy.labels is 'randomised-response', .* reads column 'qty' of 'orders'"
    with pytest.raises(QueryError, match=match):
        trained("logistic", weight="o.qty", **how)
