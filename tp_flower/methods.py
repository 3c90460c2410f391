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

AUTO: Final = "auto"
"""The batch size that follows how long rounds take."""


@dataclass(frozen=True)
class Method:
    """One value of the setting ``strategy``.

    Attributes:
        family: whose messages it uses, ``"admm"`` or ``"sgd"``.
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
    if method.family == SGD and values.get("server-device") == "cuda":
        problems.append(
            "server-device: 'cuda' is for strategies admm and vfl-admm; with "
            f"{name!r} the server's arrays are on the CPU: use 'cpu' or 'auto'"
        )
    privacy = values.get("privacy")
    if isinstance(privacy, PrivacySettings):
        problems += _batch_problems(values.get("batch-size"), privacy)
        problems += [
            f"privacy.{key}: strategy {name!r} is for comparisons without it: a row of "
            f"a table is in many rows of its messages. Use {method.family}"
            for key, is_covered in uncounted(method, privacy).items()
            if is_covered
        ]
    return problems


def batch_size_problem(word: str) -> str | None:
    """Return what is wrong with a batch size that is no number."""
    return None if word == AUTO else f"{word!r} is not a whole number or {AUTO!r}"


def _batch_problems(batch_size: object, privacy: PrivacySettings) -> list[str]:
    covered = {
        "features": privacy.covers_features,
        "predictions": privacy.covers_predictions,
    }
    return [
        f"batch-size: {AUTO!r} does not go with privacy.{name}: noise is planned for "
        "batches of one size; set a number, or 0"
        for name, is_covered in covered.items()
        if is_covered and batch_size == AUTO
    ]


def uncounted(method: Method, privacy: PrivacySettings) -> dict[str, bool]:
    """Return, by privacy setting, whether it asks for what a method cannot count.

    The accounts are of rows that are in a release once. Joined rows are not: what one
    row of a table changes in a release grows with its multiplicity.
    """
    return {
        "features": method.is_expanded and privacy.covers_features,
        "predictions": method.is_expanded and privacy.covers_predictions,
    }
