"""Settings of coresets: runs that train on a weighted sample of the joined rows."""

from collections.abc import Mapping
from typing import Final

from tp_flower.methods import METHODS, Method
from tp_flower.privacy.settings import PrivacySettings

IMPORTANCE: Final = "importance"
UNIFORM: Final = "uniform"
KINDS: Final = (IMPORTANCE, UNIFORM)
"""How rows are drawn: by their sensitivities, or all alike."""

REGRESSION: Final = "regression"
CLUSTERS: Final = "clusters"
SENSITIVITIES: Final = (REGRESSION, CLUSTERS)
"""What rows are sensitive for: leverages for a regression, or those of k-means."""

MOST_ROWS: Final = 1 << 24
"""Rows that may be drawn: a site answers with a number for each."""

MOST_CLUSTERS: Final = 10_000

AUTO: Final = "auto"
DISTDIM: Final = "distdim"
SAGA: Final = "saga"
SOLVERS: Final = (AUTO, "exact", SAGA, "kmeans++", DISTDIM)


def coreset_problems(values: Mapping[str, object]) -> list[str]:
    """Return what of the settings, by key, does not go with a coreset.

    Args:
        values: that are fine alone; keys may be missing.
    """
    name = str(values.get("strategy", "admm"))
    method, problems = METHODS[name], []
    solver = values.get("coreset-solver", AUTO)
    if solver not in (AUTO, *method.solvers):
        allowed = ", ".join((AUTO, *method.solvers))
        problems.append(
            f"coreset-solver: {solver!r} does not go with strategy {name!r}: use "
            f"{allowed}"
        )
    if values.get("l1") and "exact" not in method.solvers:
        problems.append(f"l1: strategy {name!r} has no such penalty: leave it 0")
    elif values.get("l1") and solver == SAGA:
        problems.append(f"l1: solver {SAGA!r} takes none: use 'exact', or leave it 0")
    return problems + _unprotected(values, method)


def _unprotected(values: Mapping[str, object], method: Method) -> list[str]:
    """Return which mechanisms a sample by importance would make void.

    Which rows are drawn, and what they weigh, is computed from the rows as they are.
    """
    is_drawn = bool(values.get("coreset-size") or method.coreset_size)
    own = values.get("privacy")
    if (
        not is_drawn
        or values.get("coreset-kind", IMPORTANCE) != IMPORTANCE
        or not isinstance(own, PrivacySettings)
    ):
        return []
    covered = {
        "features": own.covers_features,
        "predictions": own.covers_predictions,
        "labels": own.covers_labels,
    }
    return [
        f"coreset-kind: {IMPORTANCE!r} does not go with privacy.{key}: which rows are "
        "drawn, and what they weigh, is computed from rows without noise; use "
        f"{UNIFORM!r}, which reads none"
        for key, is_covered in covered.items()
        if is_covered
    ]
