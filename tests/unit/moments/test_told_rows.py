"""How many rows follow from sums of products whose weights are known."""

import numpy as np
import pytest

from tp_flower.methods.moments.columns import most_told_rows

ROWS = 60


def open_numbers(
    weightings: int, widths: tuple[int, int], rows: int
) -> tuple[np.ndarray, int]:
    """Return directions in which numbers of two tables leave all sums as they are.

    Of a label's table of 60 rows with a column of ones, joined with another of some
    rows; to first order, by the derivative of the sums at random rows, (z, unknowns).
    And how many of the unknowns are the first table's.
    """
    rng = np.random.default_rng(weightings)
    first = rng.normal(size=(ROWS, widths[0]))
    second = rng.normal(size=(rows, widths[1]))
    behind = np.arange(ROWS) % rows
    weights = rng.random((weightings, ROWS))
    joined = np.hstack([first, second[behind], np.ones((ROWS, 1))])
    upper = np.triu_indices(joined.shape[1])
    places = [
        (row == np.arange(ROWS), k) for row in range(ROWS) for k in range(widths[0])
    ]
    places += [
        (behind == row, widths[0] + k) for row in range(rows) for k in range(widths[1])
    ]
    slopes = np.empty((len(places), weightings * len(upper[0])))
    for number, (has_it, column) in enumerate(places):
        change = (weights * has_it) @ joined
        of_sums = np.zeros((weightings, joined.shape[1], joined.shape[1]))
        of_sums[:, column] = change
        of_sums += of_sums.transpose(0, 2, 1)
        slopes[number] = of_sums[:, *upper].ravel()
    vectors, values, _ = np.linalg.svd(slopes)
    rank = int((values > 1e-9 * values[0]).sum())
    return vectors[:, rank:].T, ROWS * widths[0]


@pytest.mark.parametrize("weightings", [2, 3, 6])
def test_rows_above_the_bound_stay_open_and_fewer_follow(weightings):
    widths = (1, 2)
    bound = most_told_rows(weightings, columns=sum(widths) + 1)
    alone = weightings * (widths[1] + 3) // 2
    for rows, is_told in ((alone, True), (bound + 1, False)):
        directions, first = open_numbers(weightings, widths, rows)
        is_open = np.abs(directions[:, first:]).max(initial=0.0) > 1e-6
        assert is_open != is_told
