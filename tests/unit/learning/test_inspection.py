"""Permutations are of the joined rows, exactly; small groups are pooled."""

from itertools import permutations

import numpy as np
import pytest

from tp_flower.features.sparse import SparseRows
from tp_flower.joins.mapping import TableRows
from tp_flower.learning import inspection
from tp_flower.learning.groups import shown_groups
from tp_flower.learning.inspection import InspectedTable, mean_shares, permuted_metrics
from tp_flower.learning.models.local_model import LinearModel

ROW_OF = np.array([0, 1, 1, 2, -1])  # the second row is joined twice, one has none
COLUMNS = (np.array([0]), np.array([1, 2]), np.array([], np.int64))


class Opaque(LinearModel):
    """A linear model of which nobody knows that it is a sum of its columns."""

    def part(self, *_):
        return None


def table_of(kind, *, is_sparse=False) -> InspectedTable:
    rows = np.array([[1, 2, 0], [0, -1, 3], [4, 0, 5]], np.float32)
    model = kind(features=3, outputs=1, intercept=True)
    model.parameters[:] = [1.0, 10.0, -2.0, 0.5]
    features = rows
    if is_sparse:
        columns = np.tile(np.arange(3, dtype=np.int32), (3, 1))
        features = SparseRows(rows, columns, 3)
    # with the effects of its keys
    added = model.scores(rows) + np.array([[0.0], [7.0], [0.0]])
    return InspectedTable(model, features, COLUMNS, TableRows(ROW_OF, 3), added)


class Given:
    """A generator whose permutation is given."""

    def __init__(self, order) -> None:
        self.order = list(order)

    def permutation(self, values):
        assert len(values) == len(self.order)
        return values[self.order]


VALUES = {0: np.array([1.0, 0.0, 4.0]), 1: np.array([20.0, -16.0, -10.0])}
"""What the features add, by row."""


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("kind", [LinearModel, Opaque])
@pytest.mark.parametrize("feature", VALUES)
def test_every_joined_row_has_its_own_donor(kind, feature, is_sparse, monkeypatch):
    monkeypatch.setattr(inspection, "SWAPPED_VALUES", 6)  # blocks of two rows
    table = table_of(kind, is_sparse=is_sparse)
    joined = VALUES[feature][ROW_OF[:4]]
    for order in permutations(range(4)):
        changes = table.permute_feature(feature, Given(order))[:, 0]
        # a joined row without a row of the table keeps its score
        np.testing.assert_allclose(changes, [*(joined[[*order]] - joined), 0.0])


def test_a_dropped_feature_changes_nothing():
    for kind in (LinearModel, Opaque):
        changes = table_of(kind).permute_feature(2, Given(range(4)))
        np.testing.assert_array_equal(changes, 0.0)


def test_a_table_s_rows_change_places_with_none_too():
    table = table_of(LinearModel)
    added = np.append(table.added[:, 0], 0.0)[ROW_OF]
    for order in permutations(range(5)):
        changes = table.permute_table(Given(order))[:, 0]
        np.testing.assert_allclose(changes, added[[*order]] - added)


def test_the_mean_over_all_permutations_is_that_over_pairs_of_joined_rows():
    table = table_of(LinearModel)
    errors = np.array([0.3, -1.0, 2.0, 0.5, -0.7])
    added = np.append(table.added[:, 0], 0.0)[ROW_OF]
    orders = [Given(order) for order in permutations(range(5))]
    values = [
        np.mean((errors + table.permute_table(each)[:, 0]) ** 2) for each in orders
    ]
    pairs = errors[:, None] + added[None, :] - added[:, None]
    assert np.mean(values) == pytest.approx(np.mean(pairs**2))


def test_metrics_are_a_mean_and_a_deviation_and_none_that_is_infinite():
    table = table_of(LinearModel)
    scores = np.zeros((5, 1))
    drawn = []

    def measure(moved):
        drawn.append(float(np.square(moved).mean()))
        return {"error": drawn[-1], "infinite": np.inf}

    metrics = permuted_metrics(table, scores, measure, 6, np.random.default_rng(0))
    by_item = np.array(drawn).reshape(4, 6)
    expected = np.column_stack([by_item.mean(axis=1), by_item.std(axis=1)])
    np.testing.assert_allclose(metrics["error"], expected)
    assert np.isnan(metrics["infinite"]).all()


def test_shares_are_over_all_joined_rows():
    shares = mean_shares(table_of(LinearModel))
    table = np.append(table_of(LinearModel).added[:, 0], 0.0)
    for share, values in zip(
        shares, (table, *(np.append(v, 0.0) for v in VALUES.values())), strict=False
    ):
        joined = values[ROW_OF]
        assert share == pytest.approx(np.abs(joined - joined.mean()).mean())
    assert shares[3] == 0.0
    of_opaque = mean_shares(table_of(Opaque))
    assert of_opaque[0] == shares[0]
    assert np.isnan(of_opaque[1:]).all()


@pytest.mark.parametrize("feature", VALUES)
def test_a_value_for_all_rows_changes_the_mean_score(feature):
    encoded = np.array([[2, 1, 1], [3, 0, 4]], np.float32)
    joined = VALUES[feature][ROW_OF[:4]]
    weights = np.array([1.0, 10.0, -2.0])
    values = encoded[:, COLUMNS[feature]] @ weights[COLUMNS[feature]]
    expected = [(value - joined).sum() / 5 for value in values]
    for kind in (LinearModel, Opaque):
        changes = table_of(kind).change_to(feature, encoded)
        np.testing.assert_allclose(changes[:, 0], expected)


def test_no_more_groups_are_shown_than_may_be():
    cells = np.array([[3, 3], [9, 1], [5, 5], [4, 4]])
    positions, names = shown_groups(cells, "abcd", fewest=2, most=1)
    assert names == ["c", "(other)"]
    # b has too few rows of its own; a and d are beyond the most
    assert positions.tolist() == [1, 1, 0, 1]
    positions, names = shown_groups(cells[:1], "a", fewest=4, most=1)
    assert (positions.tolist(), names) == ([-1], [])
