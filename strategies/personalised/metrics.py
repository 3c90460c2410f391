"""Metrics that sites report of models of their own, checked and averaged.

The mean is over the sites, each counting alike as it does in the objective; a metric
that a site does not have (the AUC of rows of one class) is left out of it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from strategies.run.exchange import Part, Replies
from strategies.run.reply_checks import refuse
from tp_flower.protocol import SiteMetrics

PENALTY: Final = "penalty"
_NAMES: Final = frozenset(
    {"loss", "log_loss", "auc", "accuracy", "rmse", "r2", PENALTY}
)
Metrics = dict[str, dict[str, float]]
"""By "train" and "test", values by name."""


def read_metrics(
    replies: Replies, parts: Sequence[Part], name: str
) -> list[Metrics | None]:
    """Return what every site reports under a name; None of one that reports nothing.

    Args:
        replies: of the round.
        parts: of the sites.
        name: of the field with the metrics.

    Raises:
        ReplyError: a site reports something else than metrics.
    """
    return [_read(replies, part, name) for part in parts]


def _read(replies: Replies, part: Part, name: str) -> Metrics | None:
    if part.node in replies.stale and part.number not in replies.parts:
        return None
    metrics = getattr(replies.parts.get(part.number), name, None)
    if not isinstance(metrics, SiteMetrics):
        raise refuse(part, "no metrics")
    if not {*metrics.train, *metrics.test} <= _NAMES:
        raise refuse(part, "metrics of unknown names")
    return {"train": metrics.train, "test": metrics.test}


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
