"""Effects of tables' keys, against the mixed model and the penalised optimum."""

import numpy as np
import pytest
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal

from tests.support.reference.families import Family
from tests.support.tables.mappings import table_rows
from tp_flower.joins.mapping import TableMapping
from tp_flower.joins.rows import JoinedRows
from tp_flower.learning.row_effects import RowEffects, choose_penalties

ROWS = 400
USERS, FILMS = 23, 17
# two rows of a table may have one key, and a row none
KEY_OF_ROW = {
    "users": np.append(np.arange(USERS) // 2, -1),
    "films": np.arange(FILMS),
}
PENALTIES = {"users": 2.5, "films": 7.0}


def joined(seed: int):
    """The rows behind 400 joined rows, and the key of each, -1 for none."""
    rng = default_rng(seed)
    rows = {
        "users": rng.integers(0, USERS + 1, ROWS),
        "films": rng.integers(-1, FILMS, ROWS),
    }
    keys = {
        name: np.where(row_of < 0, -1, KEY_OF_ROW[name][row_of])
        for name, row_of in rows.items()
    }
    return rng, rows, keys


def table_keys():
    return {
        name: table_rows(of_rows, int(of_rows.max()) + 1)
        for name, of_rows in KEY_OF_ROW.items()
    }


def rows_over(rows, objective, scores):
    sizes = {name: len(of_rows) for name, of_rows in KEY_OF_ROW.items()}
    mapping = TableMapping(
        {name: table_rows(row_of, sizes[name]) for name, row_of in rows.items()}
    )
    return JoinedRows(mapping, {**objective.vectors, "scores": scores.copy()})


def indicators(keys, name):
    """Z of a table's keys, (N, K)."""
    count = int(KEY_OF_ROW[name].max()) + 1
    return (keys[name][:, None] == np.arange(count)).astype(float)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_effects_of_numbers_are_the_predictions_of_a_mixed_model(is_weighted):
    rng, rows, keys = joined(0)
    weights = None
    if is_weighted:
        weights = rng.uniform(0.2, 3.0, ROWS)
        weights /= weights.mean()
    labels, scores = rng.normal(size=ROWS), rng.normal(size=(ROWS, 1))
    objective = Family("squared").on(labels, weights)
    effects = RowEffects([rows_over(rows, objective, scores)], objective, table_keys())
    effects.penalties |= PENALTIES
    effects.fit_all(1e-9, 500)
    # Henderson's equations of the residuals, variances sigma^2 / lambda
    z = np.hstack([indicators(keys, name) for name in KEY_OF_ROW])
    shrinkage = np.concatenate(
        [np.full(table_keys()[name].rows, PENALTIES[name]) for name in KEY_OF_ROW]
    )
    weight = np.ones(ROWS) if weights is None else weights
    matrix = z.T @ (weight[:, None] * z) + np.diag(shrinkage)
    expected = np.linalg.solve(matrix, z.T @ (weight * (labels - scores[:, 0])))
    found = np.concatenate([effects.effects[name][:, 0] for name in KEY_OF_ROW])
    assert_allclose(found, expected, atol=1e-7)


@pytest.mark.parametrize(
    "family", [Family("logistic", 2), Family("softmax", 3)], ids=str
)
def test_effects_of_classes_are_the_penalised_optimum(family):
    rng, rows, keys = joined(1)
    labels = family.labels(rng, ROWS)
    scores = 2.0 * rng.normal(size=(ROWS, family.outputs))
    objective = family.on(labels)
    effects = RowEffects([rows_over(rows, objective, scores)], objective, table_keys())
    effects.penalties |= PENALTIES
    effects.fit_all(1e-9, 500)
    added = sum(indicators(keys, name) @ effects.effects[name] for name in KEY_OF_ROW)
    gradient = objective.gradient(scores + added)
    for name, penalty in PENALTIES.items():
        found = effects.effects[name]
        slope = indicators(keys, name).T @ gradient + penalty * found
        # the loss is convex: without a slope it is at its least
        assert_allclose(slope, 0.0, atol=1e-5)
        assert np.abs(found).max() > 0.1


def test_rows_that_are_almost_certain_do_not_throw_an_effect_away():
    """Of such rows the curvature is nearly 0, and a Newton step nearly endless."""
    rows = {"users": np.zeros(ROWS, int), "films": np.full(ROWS, -1)}
    objective = Family("logistic", 2).on(np.ones(ROWS))
    scores = np.full((ROWS, 1), -9.0)
    effects = RowEffects([rows_over(rows, objective, scores)], objective, table_keys())
    effects.fit("users", 1.0, sweeps=60)
    b = effects.effects["users"][0, 0]
    assert ROWS / (1 + np.exp(-9.0 + b)) == pytest.approx(b, rel=1e-6)


def test_scores_follow_the_effects_of_all_rows_that_they_reach():
    rng, rows, keys = joined(2)
    labels = rng.normal(size=ROWS)
    objective = Family("squared").on(labels)
    over = rows_over(rows, objective, np.zeros((ROWS, 1)))
    few = over.select(np.arange(ROWS) < 30)
    effects = RowEffects([over, few], objective, table_keys())
    effects.penalties |= PENALTIES
    effects.fit_all(1e-9, 500)
    for held, size in ((over, ROWS), (few, 30)):
        expected = sum(
            indicators(keys, name)[:size] @ effects.effects[name] for name in keys
        )
        assert_allclose(held.whole("scores"), expected, atol=1e-12)
    spread = effects.of_rows("users")
    assert_array_equal(spread[-1], 0.0)
    assert_array_equal(spread[0], spread[1])
    count = np.bincount(keys["users"][keys["users"] >= 0])
    expected = count / (count + PENALTIES["users"])
    assert_allclose(effects.remaining("users")[:, 0], expected)


def chosen(has_levels: bool):
    """Choose penalties where users have levels of their own, or none."""
    rng = default_rng(5)
    rows = {
        "users": rng.integers(0, USERS + 1, 3_000),
        "films": rng.integers(-1, FILMS, 3_000),
    }
    level = 1.5 * rng.normal(size=USERS // 2 + 2) * has_levels
    labels = rng.normal(size=3_000) + level[KEY_OF_ROW["users"][rows["users"]]]
    trained = np.arange(3_000) < 2_000
    objectives = [Family("squared").on(labels[part]) for part in (trained, ~trained)]
    over, held_out = (
        rows_over(
            {n: r[part] for n, r in rows.items()}, objective, np.zeros((part.sum(), 1))
        )
        for part, objective in zip((trained, ~trained), objectives, strict=True)
    )
    effects = RowEffects([over, held_out], objectives[0], table_keys())
    falls = choose_penalties(
        effects,
        effects.by_first_gain(),
        lambda: objectives[1].row_values(held_out.whole("scores")),
    )
    return effects, falls, held_out, objectives[1]


def test_tables_have_effects_where_they_lower_the_validation_loss():
    effects, falls, held_out, objective = chosen(has_levels=True)
    assert set(falls) == set(effects.penalties) == {"users"}
    fall = falls["users"]
    assert fall.after < 0.6 * fall.before
    assert objective.value(held_out.whole("scores")) == pytest.approx(fall.after)


def test_what_noise_alone_suggests_is_dropped_and_leaves_no_trace():
    effects, falls, held_out, _ = chosen(has_levels=False)
    assert falls == effects.penalties == {}
    assert_allclose(held_out.whole("scores"), 0.0, atol=1e-12)
