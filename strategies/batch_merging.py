"""``batch-size = "auto"``: larger batches where rounds take long.

The plan has batches of the default size. From epoch to epoch a whole number of
consecutive ones is merged to one, as the rounds before took.
"""

import math
from collections.abc import Sequence
from statistics import median
from typing import Final

from tp_flower.report import RoundReport

CRITICAL_UPDATES: Final = 100
"""Updates per epoch beyond which more of them gain little (paper, section 8)."""

FEWEST_UPDATES: Final = 20
"""Per epoch: with fewer there is no learning rate that makes an epoch worth its
computation."""


def choose_merging(batches: int, wait_seconds: float, compute_seconds: float) -> int:
    """Return how many batches of a plan to merge to one, from 1 on.

    With k updates per epoch an epoch takes k * wait + C seconds, where C is what all
    its rows take to compute, in whatever batches. The epochs that a run needs are
    about proportional to 1 / K + 1 / k, K = ``CRITICAL_UPDATES``: few large batches
    make less of an epoch, many small ones cannot make more than their noise allows.
    The product is least at

        k = sqrt(K * C / wait),

    which is taken within ``FEWEST_UPDATES`` and the batches of the plan, and rounded to
    a whole number of merged batches.

    Args:
        batches: of the plan.
        wait_seconds: per update: for the network, and for Flower.
        compute_seconds: C, per epoch: at the server and at the slowest site.

    >>> choose_merging(100, wait_seconds=0.004, compute_seconds=0.5)
    1
    >>> choose_merging(100, wait_seconds=0.04, compute_seconds=0.5)
    3
    >>> choose_merging(100, wait_seconds=4.0, compute_seconds=0.5)
    5
    """
    most = max(batches // FEWEST_UPDATES, 1)
    if wait_seconds <= 0:
        return 1
    updates = math.sqrt(CRITICAL_UPDATES * compute_seconds / wait_seconds)
    return min(max(round(batches / max(updates, 1.0)), 1), most)


def seconds_per_round(rounds: Sequence[RoundReport]) -> tuple[float, float]:
    """Return what a round takes: seconds of waiting, and of computing.

    The median counts: one site that hung for once says nothing of the rest.

    Args:
        rounds: one at least.
    """
    wait = median(item.wait_seconds for item in rounds)
    return wait, median(item.client_seconds + item.server_seconds for item in rounds)
