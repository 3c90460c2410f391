"""The values that plain settings of a run may have: words, and ranges of numbers."""

from collections.abc import Mapping
from typing import Final

from tp_flower.coreset_settings import KINDS, MOST_CLUSTERS, MOST_ROWS, SOLVERS
from tp_flower.methods import METHODS
from tp_flower.personal_settings import EDGE_WEIGHTS, NORMS
from tp_flower.run_modes import (
    EVALUATE,
    EXPLAIN,
    LABEL_SITE,
    MEAN,
    PREDICT,
    SERVER,
    STALE,
    STOP,
    TRAIN,
)
from tp_flower.setting_checks import Range

CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "task": ("auto", "regression", "classification"),
    "strategy": tuple(METHODS),
    "mode": (TRAIN, EXPLAIN, PREDICT, EVALUATE),
    "on-missing": (STOP, STALE, MEAN),
    "predictions-at": (SERVER, LABEL_SITE),
    "loss": ("auto", "squared", "logistic", "softmax"),
    "admm-form": ("sharing", "jacobi"),
    "lou": ("auto", "gram", "consensus"),
    "device": ("auto", "cpu", "cuda"),
    "coreset-kind": KINDS,
    "coreset-solver": SOLVERS,
    "graph-norm": NORMS,
    "graph-weights": EDGE_WEIGHTS,
}

RANGES: Final[Mapping[str, Range]] = {
    "num-epochs": Range(0),
    "l2": Range(0),
    "rho": Range(0),
    "over-relaxation": Range(0, 2),
    "anderson-memory": Range(0),
    "inner-rounds": Range(1),
    "local-epochs": Range(0),
    "tolerance": Range(0),
    "batch-size": Range(0),
    "learning-rate": Range(0),
    "momentum": Range(0, 1),
    "decay": Range(0),
    "staleness": Range(0, 2),
    "test-fraction": Range(0, 1),
    "coreset-size": Range(0, MOST_ROWS + 1),
    "clusters": Range(1, MOST_CLUSTERS + 1),
    "l1": Range(0),
    "seed": Range(0, 2**63),
    "site-timeout": Range(0, includes_low=False),
    "max-stale": Range(1),
    "min-sites": Range(0),
    "wait-seconds": Range(0),
    "max-categories": Range(2),
    "max-joined-rows": Range(1),
    "graph-penalty": Range(0),
    "graph-neighbours": Range(1),
    "graph-epsilon": Range(0),
    "update-penalty": Range(0),
    "update-clusters": Range(0, 257),
}
