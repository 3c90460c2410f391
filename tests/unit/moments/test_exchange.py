"""The second moments of a join from padded sums equal those of the built join."""

import numpy as np
import pytest

from tests.support.tables.random_joins import PASSES, Joined
from tp_flower.methods.moments.words import inner


@pytest.mark.cases("0")
@pytest.mark.parametrize("seed", range(40))
def test_the_blocks_are_those_of_the_built_join(seed):
    rng = np.random.default_rng(seed)
    for _ in range(25):
        joined = Joined.draw(rng)
        for number in range(len(PASSES)):
            expected = joined.expected(number)
            found = joined.exchanged(number)
            cut = joined.exchanged(number, shards=joined.cut(rng))
            assert found.keys() == expected.keys()
            for pair, block in expected.items():
                np.testing.assert_array_equal(found[pair], block, err_msg=str(pair))
                np.testing.assert_array_equal(cut[pair], block, err_msg=str(pair))


@pytest.mark.parametrize("bits", [1, 15, 16, 17, 31, 47, 48, 62, 64])
def test_words_multiply_as_integers_do(bits):
    rng = np.random.default_rng(0)
    low = -(1 << (bits - 1))
    left = rng.integers(low, -low - 1, size=(70_000, 3), endpoint=True).view(np.uint64)
    left[:3] = np.array([low, -low - 1, 0]).view(np.uint64)[:, None]
    right = rng.integers(0, 1 << 64, size=(70_000, 5), dtype=np.uint64)
    for other in (left, right):
        np.testing.assert_array_equal(inner(left, other), left.T @ other)
