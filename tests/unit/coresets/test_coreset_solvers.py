"""The server's solvers on a sample, and what is measured of the paper's assumptions."""

import numpy as np
import pytest
from scipy.optimize import minimize

from tp_flower.coresets.assumptions import gamma, tau
from tp_flower.coresets.solvers import solve


def problem(rows=200, width=4):
    rng = np.random.default_rng(6)
    design = rng.normal(size=(rows, width)) * [1.0, 2.0, 0.5, 1.0]
    targets = design @ [1.0, -2.0, 0.0, 3.0] + 5.0 + rng.normal(size=rows)
    return design, targets, rng.gamma(1.0, size=rows) * 40


def objective(theta, design, targets, weights, l2, l1=0.0):
    residuals = design @ theta[:-1] + theta[-1] - targets
    slopes = theta[:-1]
    fit = 0.5 * weights @ residuals**2 / weights.sum()
    return fit + 0.5 * l2 * slopes @ slopes + l1 * np.abs(slopes).sum()


@pytest.mark.parametrize("l2", [0.0, 1e-3, 0.5])
def test_ridge_is_the_weighted_normal_equations(l2):
    design, targets, weights = problem()
    full = np.column_stack([design, np.ones(len(design))])
    shares = weights / weights.sum()
    penalty = l2 * np.diag([1.0] * 4 + [0.0])
    exact = np.linalg.solve(
        full.T * shares @ full + penalty, full.T @ (shares * targets)
    )
    actual = solve(design, targets, weights, l2=l2)
    np.testing.assert_allclose(actual, exact, rtol=1e-8)
    saga = solve(design, targets, weights, l2=l2, solver="saga")
    np.testing.assert_allclose(saga, exact, atol=2e-3)


def test_the_unit_of_the_weights_and_whole_weights():
    design, targets, _ = problem()
    copies = np.arange(len(design)) % 3
    again = np.repeat(np.arange(len(design)), copies)
    actual = solve(design, targets, 70.0 * copies, l2=0.1)
    repeated = solve(design[again], targets[again], np.ones(len(again)), l2=0.1)
    np.testing.assert_allclose(actual, repeated, rtol=1e-9)


@pytest.mark.parametrize("l2", [0.0, 0.3], ids=["lasso", "elastic net"])
def test_l1_reaches_the_minimum_of_the_house_objective(l2):
    design, targets, weights = problem()
    l1 = 0.4
    actual = solve(design, targets, weights, l2=l2, l1=l1)
    assert actual[2] == 0.0  # its coefficient is 0 in truth
    # theta = positive - negative part: smooth under bounds

    def split(z):
        theta = np.append(z[:4] - z[4:8], z[8])
        value = objective(theta, design, targets, weights, l2)
        return value + l1 * z[:8].sum()

    bounds = [(0, None)] * 8 + [(None, None)]
    exact = minimize(split, np.ones(9), bounds=bounds, tol=1e-12).fun
    reached = objective(actual, design, targets, weights, l2, l1)
    assert reached == pytest.approx(exact, rel=1e-5)


def test_units_and_copies_of_columns_do_not_matter_without_a_penalty():
    design, targets, weights = problem()
    units = np.array([1e-8, 1.0, 1e8, 1e4])
    plain = solve(design, targets, weights, l2=0.0)
    actual = solve(design * units, targets, weights, l2=0.0)
    np.testing.assert_allclose(actual[:4] * units, plain[:4], rtol=1e-8)
    constant = np.column_stack([design, np.full(len(design), 3.0)])
    actual = solve(constant, targets, weights, l2=0.0)
    np.testing.assert_allclose(actual[[0, 1, 2, 3, 5]], plain, rtol=1e-8)
    # copies: the solution of least norm
    twice = solve(np.column_stack([design, design]), targets, weights, l2=0.0)
    np.testing.assert_allclose(twice[:8], np.tile(plain[:4], 2) / 2, rtol=1e-8)


def test_saga_converges_where_some_rows_outweigh_the_others():
    design, targets, _ = problem(60)
    weights = np.where(np.arange(60) % 12 == 0, 20.0, 0.2)
    actual = solve(design, targets, weights, l2=0.01, solver="saga")
    exact = solve(design, targets, weights, l2=0.01)
    np.testing.assert_allclose(actual, exact, atol=1e-3)
    with pytest.raises(ValueError, match="l1 is 0 with it"):
        solve(*problem(), l2=0.1, l1=0.1, solver="saga")


def test_gamma_is_the_least_singular_value_of_the_bases():
    rng = np.random.default_rng(0)
    shared = rng.normal(size=(300, 1))
    tables = [
        np.column_stack([rng.normal(size=(300, 2)), shared]),
        shared + 0.3 * rng.normal(size=(300, 2)),
    ]
    weights = rng.gamma(1.0, size=300)
    bases = [np.linalg.qr(np.sqrt(weights)[:, None] * table)[0] for table in tables]
    exact = np.linalg.svd(np.hstack(bases), compute_uv=False)[-1]
    assert 0.05 < exact < 0.5
    assert gamma(tables, weights) == pytest.approx(exact, rel=1e-9)
    # of the space, whatever its columns
    mixed = [tables[0] @ rng.normal(size=(3, 3)), np.hstack([tables[1], tables[1]])]
    assert gamma(mixed, weights) == pytest.approx(exact, rel=1e-6)
    assert gamma([*tables, tables[0][:, :1]], weights) == 0.0


def test_tau_is_least_over_the_tables_of_the_largest_ratio_over_pairs():
    rng = np.random.default_rng(1)
    tables = [rng.normal(size=(40, 3)), rng.normal(size=(40, 2)) * 3]
    pairs = [(i, j) for i in range(40) for j in range(i)]

    def ratios(table):
        whole = np.hstack(tables)
        return [
            ((whole[i] - whole[j]) ** 2).sum() / ((table[i] - table[j]) ** 2).sum()
            for i, j in pairs
        ]

    actual = tau(tables, rng)
    assert actual.largest == pytest.approx(min(max(ratios(table)) for table in tables))
    medians = [sorted(ratios(table))[len(pairs) // 2] for table in tables]
    assert actual.median == pytest.approx(min(medians))


def test_tau_at_its_limits():
    """Infinite where rows share a row of every table; of many rows over some pairs."""
    rng = np.random.default_rng(0)
    first, second = np.array([[0.0], [0.0], [1.0]]), np.array([[0.0], [1.0], [0.0]])
    assert tau([first, second], rng).largest == np.inf
    # one table, or another one that adds nothing to any distance
    same, many = [np.ones((3, 1))], [rng.normal(size=(2000, 2)), np.zeros((2000, 1))]
    for tables in (same, many):
        actual = tau(tables, rng)
        assert (actual.largest, actual.median) == (1.0, 1.0)
