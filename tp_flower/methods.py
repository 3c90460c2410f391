"""The training methods that a run can name, and what they have in common.

The server's side of each is a class in ``strategies``; a site sees the family alone,
and whether a method goes by the rows of a table or by the joined rows.
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
    """One value of the setting ``strategy``.

    Attributes:
        family: whose messages it uses, ``"admm"``, ``"sgd"``, ``"coreset"`` (the server
            solves, over the rows of a coreset) or ``"personal"`` (a model per site).
        epochs: of a run that does not say how many.
        is_expanded: whether a site trains on a row for every joined row (VFL), not on
            every row of its table once.
        is_full_batch: whether the one batch of an epoch has all joined rows.
        coreset_size: joined rows that are drawn where the run does not say how many; 0
            trains on all of them.
        is_clustering: whether rows are drawn for k-means, not for a regression.
        solvers: what the server may solve with; empty where the sites train.
    """

    family: str
    epochs: int
    is_expanded: bool = False
    is_full_batch: bool = False
    coreset_size: int = 0
    is_clustering: bool = False
    solvers: tuple[str, ...] = ()

    @property
    def sends_a_row_once(self) -> bool:
        """Whether a row of a table is in a release once, which accounts rest on.

        What a row changes in a message about joined rows grows with its multiplicity;
        rows of a coreset leave in the clear, without any noise to count.
        """
        return not self.is_expanded and self.family != CORESET


METHODS: Final[Mapping[str, Method]] = {
    "admm": Method(ADMM, 12),
    "sgd": Method(SGD, 10),
    "vfl-admm": Method(ADMM, 12, is_expanded=True),
    "vfl-sgd": Method(SGD, 10, is_expanded=True),
    "gd": Method(SGD, 100, is_full_batch=True),
    "coreset-ridge": Method(
        CORESET, 1, coreset_size=ROWS_OF_CORESET, solvers=("exact", "saga")
    ),
    "coreset-kmeans": Method(
        CORESET,
        1,
        coreset_size=ROWS_OF_CORESET,
        is_clustering=True,
        solvers=("kmeans++", "distdim"),
    ),
    "personalised": Method(PERSONAL, 60),
}

BY_DATA, BY_FEATURES, BY_MODELS = "data", "features", "models"
SUMMARIES: Final = (BY_DATA, BY_FEATURES, BY_MODELS)
"""What sites sum up of themselves for a graph of similar ones."""

RDP: Final = "rdp"
PRV: Final = "prv"
ACCOUNTANTS: Final = (RDP, PRV)

CLEAR: Final = "clear"
LAPLACE, RANDOMISED_RESPONSE = "laplace", "randomised-response"
DP_SGD, NOISY_STATISTICS = "dp-sgd", "statistics"
"""Names of mechanisms, for labels and for models."""
SERVER, OUTSIDER = "server", "outsider"
"""Adversaries: who sees every message, and who sees the final model."""
