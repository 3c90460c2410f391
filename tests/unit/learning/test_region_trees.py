"""The tree whose leaves are the regions of a table's rows."""

import numpy as np
import pytest

from tp_flower.methods.boost.messages import Growth
from tp_flower.methods.boost.regions import grow_regions, regions_of

ROWS = 400
GROWTH = Growth(trees=1, leaves=16, rate=1.0, least_rows=4)


def sizes_of_regions(fewest_rows):
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(ROWS, 2)).astype(np.float32)
    # a few rows differ from all others, as an owner's floor must hide
    labels = 0.1 * draw.normal(size=ROWS) + 3.0 * rows[:, 0]
    labels[rows[:, 1] > 2.0] += 50.0
    counts = np.ones(ROWS)
    derivatives = -labels[:, None], counts[:, None]
    tree = grow_regions(rows, (), derivatives, counts, GROWTH, fewest_rows)
    return np.bincount(regions_of(tree, rows), minlength=tree.regions)


@pytest.mark.parametrize("fewest_rows", [25, 60, 150])
def test_every_region_has_the_rows_that_its_owner_asks_for(fewest_rows):
    # without a floor the leaves are smaller
    assert sizes_of_regions(1).min() < fewest_rows
    sizes = sizes_of_regions(fewest_rows)
    assert 2 <= len(sizes) <= GROWTH.leaves
    assert sizes.min() >= fewest_rows
    assert sizes.sum() == ROWS
