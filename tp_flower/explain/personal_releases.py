"""Who will learn what where every site of one table gets a model of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tp_flower.explain.explanation import NOTHING, SERVER, SITES, Release
from tp_flower.protocol import Action


@dataclass(frozen=True)
class OwnModels:
    """What decides who learns what.

    Attributes:
        table: alias of the table.
        graph: what the similarity of sites is made of.
        epsilon: of the noise on that; 0 for none.
        delta: likewise.
    """

    table: str
    graph: str
    epsilon: float
    delta: float


def personal_set_up(joined: Sequence[Release], table: str) -> list[Release]:
    """Return what set-up tells, of what it tells where labels leave.

    Args:
        joined: of a run over joins.
        table: alias of the table.
    """
    before = [own for own in joined if own.message in {Action.DESCRIBE, Action.SEAL}]
    after = [own for own in joined if own.message == Action.STATISTICS]
    return [
        *before,
        _release(Action.EXTRACT, SITES, "the query's expressions", NOTHING),
        _release(
            Action.EXTRACT,
            SERVER,
            f"how many rows of {table} each site has, and the names of the label's "
            "classes; no label leaves",
            NOTHING,
        ),
        *after,
        _release(
            Action.PERSONALISE,
            SITES,
            "the merged statistics of all sites; which own rows are held out",
            NOTHING,
        ),
        _release(
            Action.PERSONALISE,
            SERVER,
            "per site: how many rows each class has (or the sums of labels and of "
            "their squares), and one number of curvature",
            NOTHING,
        ),
    ]


_SUMMARY: Final = {
    "data": "the mean of random features of each site's rows and labels",
    "features": "the covariance of each site's features",
    "models": "the parameters of a model that each site has trained alone",
}


def personal_rounds(models: OwnModels) -> list[Release]:
    """Return what the graph and the rounds of training tell."""
    found = []
    if models.graph in _SUMMARY:
        covered = NOTHING
        if models.epsilon and models.graph != "models":
            amount = f"epsilon {models.epsilon:g}"
            covered = f"Gaussian noise ({amount}, delta {models.delta:g})"
        carries = _SUMMARY[models.graph]
        found.append(_release(Action.SUMMARISE, SERVER, carries, covered))
    metrics = "metrics of each site's rows, trained on and held out"
    return [
        *found,
        _release(Action.SUMMARISE, SERVER, metrics, NOTHING),
        _release(
            Action.PERSONAL,
            SITES,
            "the site's own parameters, which its neighbours' have moved; those of the "
            "one model for all",
            NOTHING,
        ),
        _release(
            Action.PERSONAL,
            SERVER,
            "a gradient of each site's rows; in every round anew",
            NOTHING,
        ),
        _release(Action.PERSONAL, SERVER, metrics, NOTHING),
    ]


def _release(action: Action, to: str, carries: str, protection: str) -> Release:
    return Release(str(action), to, carries, protection)
