"""The training methods that a run can name, and what they have in common.

The server's side of each is a class in ``strategies``; a site only sees the family.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from tp_flower.learning.models.local_model import LINEAR
from tp_flower.methods.admm import messages as admm_messages
from tp_flower.methods.boost import messages as boost_messages
from tp_flower.methods.boost.messages import TREES
from tp_flower.methods.cg import messages as cg_messages
from tp_flower.methods.coreset import messages as coreset_messages
from tp_flower.methods.personalised import messages as personalised_messages
from tp_flower.methods.sgd import messages as sgd_messages

ADMM: Final = "admm"
CG: Final = "cg"
SGD: Final = "sgd"
BOOST: Final = "boost"
CORESET: Final = "coreset"
PERSONAL: Final = "personal"

CLUSTERING: Final = "coreset-kmeans"
"""The method without a label, which holds out no rows."""

ROWS_OF_CORESET: Final = 2000  # default of a method that solves on a coreset


@dataclass(frozen=True)
class Method:
    """One value of the setting ``strategy``; epochs and sizes are its defaults.

    Attributes:
        epochs: at most; training ends where it has converged.
        few_epochs: those with noise, which each costs some budget, with a coreset, or
            of trees without validation rows.
        patience: the default where validation rows are automatic.
        family: the messages it uses: ``"admm"``, ``"cg"``, ``"sgd"``, ``"boost"``,
            ``"coreset"`` (the server solves on the rows of a coreset) or ``"personal"``
            (a model per site).
        solves_tables: whether a table's linear model is solved for exactly, from its
            Gram matrix and moments.
        only_model: the kind of models that it trains alone, without any noise; "" for
            all kinds.
        sends_gradients: whether a site sends gradients of batches, not updates.
        sends_a_row_once: whether a row of a table is in a release at most once, as the
            accountants assume: rows of a coreset leave in the clear, without any noise
            to count.
        is_full_batch: whether the only batch of an epoch has all joined rows.
        coreset_size: joined rows to draw; 0 trains on all of them.
        solvers: the server's solvers; empty if the sites train.
    """

    family: str
    epochs: int
    few_epochs: int = 0
    patience: int = 10
    solves_tables: bool = False
    only_model: str = ""
    sends_gradients: bool = False
    sends_a_row_once: bool = True
    is_full_batch: bool = False
    coreset_size: int = 0
    solvers: tuple[str, ...] = ()


_ADMM: Final = Method(ADMM, 100, few_epochs=12, solves_tables=True)
_SGD: Final = Method(SGD, 30, few_epochs=10, sends_gradients=True)
_CORESET: Final = Method(
    CORESET, 1, sends_a_row_once=False, coreset_size=ROWS_OF_CORESET
)

METHODS: Final[Mapping[str, Method]] = {
    "admm": _ADMM,
    "cg": Method(CG, 100, only_model=LINEAR),
    "sgd": _SGD,
    "gd": replace(_SGD, epochs=100, few_epochs=100, is_full_batch=True),
    "boost": Method(BOOST, 100, few_epochs=6, patience=2, only_model=TREES),
    "coreset-ridge": replace(_CORESET, solvers=("exact", "saga")),
    CLUSTERING: replace(_CORESET, solvers=("kmeans++", "distdim")),
    "personalised": Method(PERSONAL, 60),
}


def of_families(*families: str) -> tuple[str, ...]:
    """Return the methods of some families.

    >>> of_families("admm")
    ('admm',)
    """
    return tuple(name for name, method in METHODS.items() if method.family in families)


JOINING: Final = of_families(ADMM, CG, SGD, BOOST, CORESET)  # train over joins

MESSAGES: Final = (
    *(admm_messages, cg_messages, sgd_messages, boost_messages),
    *(coreset_messages, personalised_messages),
)
"""Modules that declare the actions of the methods."""
