"""The metrics of the sites' own models."""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from strategies.run.exchange import Part, Replies
from strategies.run.replies import refuse
from tp_flower.protocol.personalised_messages import SiteMetrics

PENALTY: Final = "penalty"
_NAMES: Final = frozenset(
    {"loss", "log_loss", "auc", "accuracy", "rmse", "r2", PENALTY}
)
Metrics = dict[str, dict[str, float]]
"""By "train" and "test", values by name."""


def read_metrics(
    replies: Replies, parts: Sequence[Part], field: str
) -> list[Metrics | None]:
    """Return every site's metrics from a field; None of a site that is missing."""
    listed: list[Metrics | None] = []
    for part in parts:
        metrics = getattr(replies.parts.get(part.number), field, None)
        if part.node in replies.stale and part.number not in replies.parts:
            listed.append(None)
        elif not isinstance(metrics, SiteMetrics):
            raise refuse(part, "no metrics")
        elif not {*metrics.train, *metrics.test} <= _NAMES:
            raise refuse(part, "metrics of unknown names")
        else:
            listed.append({"train": metrics.train, "test": metrics.test})
    return listed


def mean_metrics(sites: Iterable[Metrics | None], kind: str) -> dict[str, float]:
    """Return the mean over the sites of every metric, without the penalty.

    >>> sites = [{"train": {"loss": 1.0}}, None, {"train": {"loss": 2.0}}]
    >>> mean_metrics(sites, "train")
    {'loss': 1.5}
    """
    values: dict[str, list[float]] = {}
    for metrics in sites:
        for name, value in (metrics or {}).get(kind, {}).items():
            values.setdefault(name, []).append(value)
    values.pop(PENALTY, None)
    return {name: float(np.mean(each)) for name, each in values.items()}
