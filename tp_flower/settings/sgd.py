"""Settings of stochastic gradient descent, and of local updates by it."""

from dataclasses import dataclass
from typing import Final

from tp_flower.methods import ADMM, PERSONAL, SGD
from tp_flower.settings.allowed import Range
from tp_flower.settings.declare import Readers, of_families, setting

_SGD: Final = Readers(of_families(SGD))
_BATCHES: Final = Readers(("sgd", "vfl-sgd"))


@dataclass(frozen=True)
class SgdSettings:
    """Stochastic gradient descent, and local updates by it."""

    batch_size: int = setting(
        0,
        'SGD: joined rows per batch; 0 = a hundredth of them. "gd" takes 0 only: all '
        'of them. "personalised": rows of a site\'s step; 0 = all, accelerated.',
        Range(0),
        Readers(of_families(SGD, PERSONAL)),
    )
    learning_rate: float = setting(
        0.0,
        "Step size of SGD and of local updates; 0 = chosen.",
        Range(0),
        Readers(of_families(ADMM, SGD, PERSONAL)),
    )
    momentum: float = setting(
        0.9, 'SGD and "gd": momentum, in [0, 1).', Range(0, 1), _SGD
    )
    decay: float = setting(
        1.0,
        "SGD: the step size of epoch e = 0, 1, ... is learning-rate / (1 + decay * e); "
        'that of "gd" stays.',
        Range(0),
        _BATCHES,
    )
    staleness: int = setting(
        0,
        "SGD with sharded tables: 0 = two rounds per batch; 1 = one, and their models "
        "are one step late.",
        Range(0, 2),
        _BATCHES,
    )
