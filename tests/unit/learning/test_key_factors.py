"""Factors of two tables' keys, against alternating least squares row by row."""

import numpy as np
import pytest
from numpy.random import default_rng
from numpy.testing import assert_allclose

from tests.support.reference.families import Family
from tests.support.tables.mappings import table_rows
from tp_flower.joins.mapping import TableMapping
from tp_flower.joins.rows import JoinedRows
from tp_flower.learning import key_factors
from tp_flower.learning.key_factors import (
    PENALTY_SHARE,
    KeyFactors,
    add_products,
    choose_factors,
    mean_of,
)

ROWS = 500
# two rows of a table may have one key, and a row none
KEY_OF_ROW = {"users": np.append(np.arange(22) // 2, -1), "films": np.arange(9)}
KEYS = {
    name: table_rows(keys, int(keys.max()) + 1) for name, keys in KEY_OF_ROW.items()
}
UNIT = 1.7
LEAST = 3.0


def joined(rng, rows=ROWS):
    """The rows behind joined rows, and their keys; -1 for none."""
    behind = {
        "users": rng.integers(0, 23, rows),
        "films": rng.integers(-1, 9, rows),
    }
    keys = {
        name: np.where(row_of < 0, -1, KEY_OF_ROW[name][row_of])
        for name, row_of in behind.items()
    }
    return behind, keys


def rows_over(behind, objective, scores):
    mapping = TableMapping(
        {name: table_rows(rows, len(KEY_OF_ROW[name])) for name, rows in behind.items()}
    )
    return JoinedRows(mapping, {**objective.vectors, "scores": scores.copy()})


def derivatives(loss, score, label):
    """The first two derivatives of the loss of one row."""
    if loss == "squared":
        return score - label, 1.0
    chance = 1.0 / (1.0 + np.exp(-score))
    return chance - label, chance * (1.0 - chance)


def fitted_row_by_row(loss, keys, labels, weights, scores, factors, sweeps):
    """Alternating least squares on the built join, one key after the other."""
    factors = {name: values.copy() for name, values in factors.items()}
    for _ in range(sweeps):
        for table, other in (("users", "films"), ("films", "users")):
            new = factors[table].copy()
            for key in range(len(new)):
                width = new.shape[1]
                gram, right, mass = np.zeros((width, width)), np.zeros(width), 0.0
                for j in range(len(labels)):
                    if keys[table][j] != key or keys[other][j] < 0:
                        continue
                    p, q = factors[table][key], factors[other][keys[other][j]]
                    gradient, hessian = derivatives(
                        loss, scores[j, 0] + p @ q, labels[j]
                    )
                    weight = weights[j] * hessian
                    response = p @ q - gradient / hessian
                    gram += weight * np.outer(q, q)
                    right += weight * response * q
                    mass += weight
                penalty = UNIT * (PENALTY_SHARE * mass + LEAST)
                new[key] = np.linalg.solve(gram + penalty * np.eye(width), right)
            factors[table] = new
    return factors


@pytest.mark.parametrize("family", [Family("squared"), Family("logistic", 2)], ids=str)
@pytest.mark.parametrize("numbers", [1 << 22, 20], ids=["whole", "blocks"])
def test_factors_are_those_of_alternating_least_squares_on_the_join(
    monkeypatch, family, numbers
):
    monkeypatch.setattr(key_factors, "SYSTEM_NUMBERS", numbers)
    rng = default_rng(3)
    behind, keys = joined(rng)
    labels = rng.normal(size=ROWS)
    if family.name != "squared":
        labels = family.labels(rng, ROWS)
    weights = rng.uniform(0.2, 3.0, ROWS)
    weights /= weights.mean()
    scores = rng.normal(size=(ROWS, 1))
    objective = family.on(labels, weights)
    rows = rows_over(behind, objective, scores)
    pair = KeyFactors(rows, objective, KEYS, UNIT)
    assert pair.sizes == (11, 9)
    start = pair.begin(3, default_rng(0))
    # small ones would hide the errors of products
    start["films"] *= 10.0
    found = start
    for _ in range(4):
        found = pair.sweep(found, LEAST)
    expected = fitted_row_by_row(
        family.name, keys, np.asarray(labels), weights, scores, start, 4
    )
    for table, values in expected.items():
        assert_allclose(found[table], values, atol=1e-8)
        assert np.abs(values).max() > 0.05
    # and what they add to the scores: nothing where a key is missing
    add_products(rows, {name: KEYS[name].expand(found[name]) for name in KEYS})
    both = (keys["users"] >= 0) & (keys["films"] >= 0)
    products = (found["users"][keys["users"]] * found["films"][keys["films"]]).sum(1)
    added = (rows.whole("scores") - scores)[:, 0]
    assert_allclose(added, np.where(both, products, 0.0), atol=1e-12)


def test_side_by_side_factors_have_the_mean_of_several_products():
    rng = default_rng(4)
    fits = [
        {name: rng.normal(size=(6, width)) for name in ("a", "b")} for width in (3, 2)
    ]
    mean = mean_of(fits)
    products = [fit["a"] @ fit["b"].T for fit in fits]
    assert_allclose(mean["a"] @ mean["b"].T, np.mean(products, axis=0))


def chosen(taste, are_wanted=False):
    """Choose factors where users have a taste, or films and users levels alone."""
    rng = default_rng(5)
    behind, keys = joined(rng, 4_000)
    p, q = taste * rng.normal(size=(12, 2)), rng.normal(size=(10, 2))
    level = rng.normal(size=12)
    labels = rng.normal(size=4_000) + (p[keys["users"]] * q[keys["films"]]).sum(1)
    scores = level[keys["users"]][:, None]
    labels += scores[:, 0]
    trained = np.arange(4_000) < 3_000
    objectives = [Family("squared").on(labels[part]) for part in (trained, ~trained)]
    fitted, judged = (
        rows_over({n: r[part] for n, r in behind.items()}, objective, scores[part])
        for part, objective in zip((trained, ~trained), objectives, strict=True)
    )

    def losses(factors):
        name = "scores"
        if factors:
            name = "with"
            of_rows = {table: KEYS[table].expand(p) for table, p in factors.items()}
            add_products(judged, of_rows, name)
        return objectives[1].row_values(judged.whole(name))

    found = choose_factors(
        [KeyFactors(fitted, objectives[0], KEYS)],
        (2, 12),
        losses,
        default_rng,
        are_wanted=are_wanted,
    )
    return found, losses


def test_factors_are_kept_where_they_lower_the_validation_loss():
    found, losses = chosen(taste=0.7)
    assert found.fall.after < 0.8 * found.fall.before
    assert losses(found.factors).mean() == pytest.approx(found.fall.after)
    assert losses({}).mean() == pytest.approx(found.fall.before)
    assert found.width in (2, 12)


@pytest.mark.parametrize("are_wanted", [False, True])
def test_where_levels_add_up_there_are_no_factors(are_wanted):
    found, _ = chosen(taste=0.0, are_wanted=are_wanted)
    # asked for by name, any fall will do, and there may be one by chance
    assert found is None or are_wanted
