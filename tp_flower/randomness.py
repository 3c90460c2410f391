"""Every stream of random numbers in a run, derived from the run's one seed.

The only place that makes generators: all other code takes one as an argument.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt


class Stream(IntEnum):
    """What a stream is for; streams of different purposes are independent."""

    SPLIT = 1
    BATCHES = 2
    ORDER = 3
    LOCAL_FIT = 4
    CURVATURE = 5
    CHECK = 6
    CORESET = 9
    SOLVE = 10
    SUMMARIES = 11


def generator(seed: int, stream: Stream, *position: int) -> np.random.Generator:
    """Return the generator of a purpose, for example of one epoch at one shard.

    >>> a, b = (generator(0, Stream.LOCAL_FIT, epoch) for epoch in (1, 2))
    >>> float(a.random()) == float(b.random())
    False
    """
    return np.random.default_rng([seed, int(stream), *position])


def seeded(words: npt.NDArray[np.uint64]) -> np.random.Generator:
    """Return a generator whose seed is in nobody's settings: a site's own."""
    return np.random.default_rng(words)
