"""The training methods that a run can name, and what they have in common.

The server's side of each is a class in ``strategies``; a site sees the family alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

ADMM: Final = "admm"
SGD: Final = "sgd"
CORESET: Final = "coreset"
PERSONAL: Final = "personal"

ROWS_OF_CORESET: Final = 2000
"""Joined rows that a method which solves on a coreset draws if nobody says how many."""


@dataclass(frozen=True)
class Method:
    """One value of the setting ``strategy``; epochs and sizes are its defaults.

    Attributes:
        family: whose messages it uses, ``"admm"``, ``"sgd"``, ``"coreset"`` (the server
            solves, over the rows of a coreset) or ``"personal"`` (a model per site).
        sends_a_row_once: whether a row of a table is in a release once, which accounts
            rest on: in a message about joined rows (VFL) the influence of a row grows
            with its multiplicity; rows of a coreset leave in the clear, without any
            noise to count.
        is_full_batch: whether the one batch of an epoch has all joined rows.
        coreset_size: joined rows that are drawn; 0 trains on all of them.
        solvers: of the server; empty where the sites train.
    """

    family: str
    epochs: int
    sends_a_row_once: bool = True
    is_full_batch: bool = False
    coreset_size: int = 0
    solvers: tuple[str, ...] = ()


METHODS: Final[Mapping[str, Method]] = {
    "admm": Method(ADMM, 12),
    "sgd": Method(SGD, 10),
    "vfl-admm": Method(ADMM, 12, sends_a_row_once=False),
    "vfl-sgd": Method(SGD, 10, sends_a_row_once=False),
    "gd": Method(SGD, 100, is_full_batch=True),
    "coreset-ridge": Method(
        CORESET,
        1,
        sends_a_row_once=False,
        coreset_size=ROWS_OF_CORESET,
        solvers=("exact", "saga"),
    ),
    "coreset-kmeans": Method(
        CORESET,
        1,
        sends_a_row_once=False,
        coreset_size=ROWS_OF_CORESET,
        solvers=("kmeans++", "distdim"),
    ),
    "personalised": Method(PERSONAL, 60),
}

BY_DATA, BY_FEATURES, BY_MODELS = "data", "features", "models"
SUMMARIES: Final = (BY_DATA, BY_FEATURES, BY_MODELS)
"""Summaries of sites that a graph of similar ones may be made of."""
JOINING: Final = tuple(
    name for name, each in METHODS.items() if each.family != PERSONAL
)
"""The methods that train over joins."""

RDP: Final = "rdp"
PRV: Final = "prv"
ACCOUNTANTS: Final = (RDP, PRV)

CLEAR: Final = "clear"
LAPLACE, RANDOMISED_RESPONSE = "laplace", "randomised-response"
DP_SGD, NOISY_STATISTICS = "dp-sgd", "statistics"
"""Names of mechanisms, for labels and for models."""
SERVER, OUTSIDER = "server", "outsider"
"""Adversaries: who sees every message, and who sees the final model."""
