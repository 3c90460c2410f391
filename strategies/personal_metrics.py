"""Metrics that sites report of models of their own, checked and averaged.

The mean is over the sites, each counting alike as it does in the objective; a metric
that a site does not have (the AUC of rows of one class) is left out of it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from strategies.exchange import Part, Replies
from strategies.received import LARGEST, refuse

PENALTY: Final = "penalty"
_NAMES: Final = frozenset(
    {"loss", "log_loss", "auc", "accuracy", "rmse", "r2", PENALTY}
)
Metrics = dict[str, dict[str, float]]
"""By "train" and "test", values by name."""


def read_metrics(
    replies: Replies, parts: Sequence[Part], track: str
) -> list[Metrics | None]:
    """Return what every site reports of a track; None of one that reports nothing.

    Raises:
        ReplyError: a site reports something else than metrics.
    """
    facts = replies.facts()
    return [
        _checked(part, facts[part.number].get(track)) if part.number in facts else None
        for part in parts
    ]


def _checked(part: Part, told: Any) -> Metrics:
    if not isinstance(told, dict) or told.keys() != {"train", "test"}:
        raise refuse(part, "metrics that are none")
    for values in told.values():
        if not isinstance(values, dict) or not values.keys() <= _NAMES:
            raise refuse(part, "metrics of unknown names")
        if not all(_is_value(value) for value in values.values()):
            raise refuse(part, "metrics that are no usable numbers")
    return {kind: {n: float(v) for n, v in own.items()} for kind, own in told.items()}


def _is_value(value: Any) -> bool:
    # false for NaN and infinity, and for a whole number beyond any float
    return type(value) in (int, float) and -LARGEST <= value <= LARGEST


def mean_metrics(found: Iterable[Metrics | None], kind: str) -> dict[str, float]:
    """Return the mean over the sites of every metric, without the penalty.

    >>> found = [{"train": {"loss": 1.0}}, None, {"train": {"loss": 2.0}}]
    >>> mean_metrics(found, "train")
    {'loss': 1.5}
    """
    values: dict[str, list[float]] = {}
    for own in found:
        for name, value in (own or {}).get(kind, {}).items():
            values.setdefault(name, []).append(value)
    return {
        name: float(np.mean(own)) for name, own in values.items() if name != PENALTY
    }


def mean_objective(found: Sequence[Metrics | None]) -> float:
    """Return (1/N) sum_n f_n, the sites' penalties included."""
    objectives = [
        own["train"].get("loss", 0.0) + own["train"].get(PENALTY, 0.0)
        for own in found
        if own is not None
    ]
    return float(np.mean(objectives)) if objectives else math.nan


def by_site(
    sites: Sequence[str], found: Sequence[Metrics | None]
) -> Mapping[str, Metrics]:
    """Return the metrics by site, without the penalty."""
    return {
        site: {
            kind: {n: v for n, v in values.items() if n != PENALTY}
            for kind, values in own.items()
        }
        for site, own in zip(sites, found, strict=True)
        if own is not None
    }
