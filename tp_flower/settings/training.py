"""Settings of the methods that train in epochs: ADMM and gradient descent."""

from dataclasses import dataclass
from typing import Final

from tp_flower.methods import ADMM, PERSONAL, SGD
from tp_flower.settings.allowed import OneOf, Range
from tp_flower.settings.declare import Readers, of_families, setting
from tp_flower.settings.run import AUTO

SHARING: Final = "sharing"
JACOBI: Final = "jacobi"
GRAM: Final = "gram"
CONSENSUS: Final = "consensus"

_ADMM: Final = Readers(of_families(ADMM))
_SGD: Final = Readers(of_families(SGD))
_BATCHES: Final = Readers(("sgd", "vfl-sgd"))


@dataclass(frozen=True)
class AdmmSettings:
    """ADMM, over the tables and over the shards of a table."""

    admm_form: str = setting(
        SHARING,
        'ADMM over the tables: "sharing" (converges for every rho) or "jacobi" (as in '
        "the paper).",
        OneOf((SHARING, JACOBI)),
        _ADMM,
    )
    rho: float = setting(
        0.0,
        "ADMM penalty; 0 = from the curvature of the loss, then residual balancing.",
        Range(0),
        _ADMM,
    )
    over_relaxation: float = setting(
        0.0,
        "ADMM over-relaxation, below 2; 1 = off, 0 = 1.5 where Anderson mixing is not "
        "used, else 1.",
        Range(0, 2),
        _ADMM,
    )
    anderson_memory: int = setting(
        5,
        "Epochs that Anderson acceleration looks back on; 0 = off.",
        Range(0),
        _ADMM,
    )
    lou: str = setting(
        AUTO,
        'ADMM over the shards of a table: "gram" (exact, linear models), "consensus" '
        '(any model), or "auto": gram where the table\'s model is linear.',
        OneOf((AUTO, GRAM, CONSENSUS)),
        _ADMM,
    )
    inner_rounds: int = setting(
        1, "Rounds of consensus between shards per epoch.", Range(1), _ADMM
    )
    local_epochs: int = setting(
        0,
        "Passes over a shard's rows in one local update of a non-linear model; 0 = 4 "
        '(at least 100 steps). "personalised": passes in a round; 0 = 1, which is one '
        "step if batch-size is 0.",
        Range(0),
        Readers(of_families(ADMM, PERSONAL)),
    )


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
