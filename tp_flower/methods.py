"""The training methods that a run can name, and what they have in common.

The server's side of each is a class in ``strategies``; a site sees the family alone,
and whether a method goes by the rows of a table or by the joined rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tp_flower.privacy.settings import PrivacySettings

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


def method_problems(values: Mapping[str, object]) -> list[str]:
    """Return what of the settings, by key, does not go with their method.

    Args:
        values: that are fine alone; keys may be missing.
    """
    name = str(values.get("strategy", "admm"))
    method, problems = METHODS[name], []
    if method.is_full_batch and values.get("batch-size"):
        problems.append(
            f"batch-size: {values['batch-size']!r} does not go with strategy {name!r}, "
            "whose one batch has all joined rows: leave it 0, or use sgd"
        )
    if method.family == CORESET:
        problems += _solved_problems(name, values)
    privacy = values.get("privacy")
    if isinstance(privacy, PrivacySettings):
        problems += _uncounted_problems(name, privacy)
    return problems


def _solved_problems(name: str, values: Mapping[str, object]) -> list[str]:
    """Return what does not go with a method that the server solves by itself."""
    pairs = values.get("models", ())
    named = [model for _, model in pairs] if isinstance(pairs, tuple) else []
    others = [m for m in (values.get("model", "linear"), *named) if m != "linear"]
    found = [
        f"model: {model!r} does not go with strategy {name!r}, which has a model of "
        "its own: leave it 'linear'"
        for model in others[:1]
    ]
    if values.get("num-epochs", 0) not in (0, 1):
        found.append(
            f"num-epochs: strategy {name!r} solves once, not {values['num-epochs']} "
            "times: leave it 0"
        )
    if values.get("task") == "classification":
        found.append(
            f"task: 'classification' does not go with strategy {name!r}: use admm or "
            "sgd, with a coreset-size"
        )
    return found


def _uncounted_problems(name: str, privacy: PrivacySettings) -> list[str]:
    method = METHODS[name]
    why = "is for comparisons without it: a row of a table is in many rows of its "
    why += f"messages. Use {method.family}"
    if method.family == CORESET:
        why = "sends the rows that it draws as they are. Use admm or sgd"
    return [
        f"privacy.{key}: strategy {name!r} {why}"
        for key, is_covered in uncounted(method, privacy).items()
        if is_covered
    ]


def uncounted(method: Method, privacy: PrivacySettings) -> dict[str, bool]:
    """Return, by privacy setting, whether it asks for what a method cannot count.

    The accounts are of rows that are in a release once. Joined rows are not: what one
    row of a table changes in a release grows with its multiplicity. Rows that leave as
    they are have no noise to count.
    """
    is_uncounted = method.is_expanded or method.family == CORESET
    return {
        "features": is_uncounted and privacy.covers_features,
        "predictions": is_uncounted and privacy.covers_predictions,
    }
