"""The training methods that a run can name, and what they have in common.

The server's side of each is a class in ``strategies``; a site only sees the family.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

ADMM: Final = "admm"
CG: Final = "cg"
SGD: Final = "sgd"
CORESET: Final = "coreset"
PERSONAL: Final = "personal"

CLUSTERING: Final = "coreset-kmeans"
"""The method without a label, which holds out no rows."""

ROWS_OF_CORESET: Final = 2000
"""Default number of joined rows that a method which solves on a coreset draws."""


@dataclass(frozen=True)
class Method:
    """One value of the setting ``strategy``; epochs and sizes are its defaults.

    Attributes:
        family: the messages it uses: ``"admm"``, ``"cg"``, ``"sgd"``, ``"coreset"``
            (the server solves on the rows of a coreset) or ``"personal"`` (a model per
            site).
        solves_tables: whether a table's linear model is solved for exactly, from its
            Gram matrix and moments.
        is_for_linear: whether it trains linear models alone, and plans no noise.
        sends_gradients: whether a site sends gradients of batches, not updates.
        sends_a_row_once: whether a row of a table is in a release at most once, as the
            accountants assume: in a message about joined rows (VFL) the influence of a
            row grows with its multiplicity; rows of a coreset leave in the clear,
            without any noise to count.
        is_full_batch: whether the only batch of an epoch has all joined rows.
        coreset_size: joined rows to draw; 0 trains on all of them.
        solvers: the server's solvers; empty if the sites train.
    """

    family: str
    epochs: int
    solves_tables: bool = False
    is_for_linear: bool = False
    sends_gradients: bool = False
    sends_a_row_once: bool = True
    is_full_batch: bool = False
    coreset_size: int = 0
    solvers: tuple[str, ...] = ()


_ADMM: Final = Method(ADMM, 12, solves_tables=True)
_SGD: Final = Method(SGD, 10, sends_gradients=True)
_CORESET: Final = Method(
    CORESET, 1, sends_a_row_once=False, coreset_size=ROWS_OF_CORESET
)

METHODS: Final[Mapping[str, Method]] = {
    "admm": _ADMM,
    "cg": Method(CG, 100, is_for_linear=True),
    "sgd": _SGD,
    "vfl-admm": replace(_ADMM, sends_a_row_once=False),
    "vfl-sgd": replace(_SGD, sends_a_row_once=False),
    "gd": replace(_SGD, epochs=100, is_full_batch=True),
    "coreset-ridge": replace(_CORESET, solvers=("exact", "saga")),
    CLUSTERING: replace(_CORESET, solvers=("kmeans++", "distdim")),
    "personalised": Method(PERSONAL, 60),
}


def of_families(*families: str) -> tuple[str, ...]:
    """Return the methods of some families.

    >>> of_families("admm")
    ('admm', 'vfl-admm')
    """
    return tuple(name for name, method in METHODS.items() if method.family in families)


JOINING: Final = of_families(ADMM, CG, SGD, CORESET)
"""The methods that train over joins."""

BY_DATA, BY_FEATURES, BY_MODELS = "data", "features", "models"
SUMMARIES: Final = (BY_DATA, BY_FEATURES, BY_MODELS)
"""Summaries of sites from which a graph of similar sites can be made."""

RDP: Final = "rdp"
PRV: Final = "prv"
ACCOUNTANTS: Final = (RDP, PRV)

CLEAR: Final = "clear"
MASKED: Final = "masked"
SEALED: Final = "sealed"
LAPLACE, RANDOMISED_RESPONSE = "laplace", "randomised-response"
DP_SGD, NOISY_STATISTICS = "dp-sgd", "statistics"
"""Names of mechanisms, for labels and for models."""
SERVER: Final = "server"
"""The adversary of every guarantee: who sees all messages."""
