"""The client operator's consensus state."""

import numpy as np

from client_apps.shard import Shard, ShardData
from tp_flower.learning.models import LinearModel


def shard() -> Shard:
    data = ShardData(
        features=np.array([[1.0, 0.0], [0.0, 2.0]], dtype=np.float32),
        multiplicity=np.array([1, 2]),
        tested=np.zeros(2, dtype=np.bool_),
        joined_rows=3,
        l2=0.1,
    )
    vectors = {
        "theta": np.array([3.0, 1.0]),
        "consensus": np.array([1.0, 1.0]),
        "consensus_duals": np.array([0.5, -2.0]),
    }
    return Shard(data, LinearModel(2, 1, intercept=False), vectors)


def test_scaled_duals_keep_their_unscaled_value_when_the_penalty_changes():
    own = shard()
    own.set_inner_penalty(0.2)
    unscaled = 0.2 * own.vectors["consensus_duals"]
    own.set_inner_penalty(0.05)
    np.testing.assert_allclose(0.05 * own.vectors["consensus_duals"], unscaled)
    np.testing.assert_allclose(own.centre, [1.0 - 2.0, 1.0 + 8.0])


def test_consensus_moves_the_duals_by_what_is_left_and_predicts_with_w():
    own = shard()
    np.testing.assert_array_equal(own.propose(np.array([2.0, 2.0])), [2.5, 0.0])
    own.accept_consensus(np.array([1.5, 3.0]))
    np.testing.assert_array_equal(own.vectors["consensus_duals"], [1.0, -3.0])
    np.testing.assert_array_equal(own.scores()[:, 0], [1.5, 6.0])
