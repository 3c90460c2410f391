"""Metrics of the sites' own models, and their entry in a run's report.

Entry ``personal`` of `report.json`::

    sites     [{site, rows, cluster, personal: {train, test}, global: .., local: ..}]
    means     {personal: {train, test}, global: .., local: ..}   over the sites
    graph     {kind, norm, penalty, weights, edges: [[i, j]], components}
              positions in ``sites``; what is not connected shares nothing but x
    clusters  [[i, ..]]   connected sites whose own coordinates are equal
    objective of the final parameters; change  by the last step, {track: relative}
    bytes     {up, down, updates, updates-float32}   of the rounds of training; updates
              of the sites' own models, as they were and as float32 would have been
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from strategies.personalised.setup import PersonalisedProblem
from strategies.run.exchange import Part, Replies
from strategies.run.replies import refuse
from tp_flower.protocol import Action
from tp_flower.protocol.personalised_messages import SiteMetrics
from tp_flower.reports.records import RoundReport, RunReport

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
    return [_read(replies, part, field) for part in parts]


def _read(replies: Replies, part: Part, field: str) -> Metrics | None:
    if part.node in replies.stale and part.number not in replies.parts:
        return None
    metrics = getattr(replies.parts.get(part.number), field, None)
    if not isinstance(metrics, SiteMetrics):
        raise refuse(part, "no metrics")
    if not {*metrics.train, *metrics.test} <= _NAMES:
        raise refuse(part, "metrics of unknown names")
    return {"train": metrics.train, "test": metrics.test}


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


def mean_objective(sites: Iterable[Metrics | None]) -> float:
    """Return (1/N) sum_n f_n, the sites' penalties included."""
    objectives = [
        metrics["train"].get("loss", 0.0) + metrics["train"].get(PENALTY, 0.0)
        for metrics in sites
        if metrics is not None
    ]
    return float(np.mean(objectives)) if objectives else math.nan


@dataclass(frozen=True)
class PersonalisedOutcome:
    """The result of a personalised training.

    Metrics are by track (and "local"), of every site, None of one that was missing;
    changes by track, by the last step; clusters are positions of the sites that have
    the same model, each once.
    """

    metrics: Mapping[str, Sequence[Metrics | None]]
    objective: float
    changes: Mapping[str, float]
    graph: Mapping[str, object]
    clusters: Sequence[Sequence[int]]
    update_bytes: int


def report_entry(
    problem: PersonalisedProblem, outcome: PersonalisedOutcome, report: RunReport
) -> dict[str, object]:
    """Return the entry of a run's report, which is complete without it."""
    cluster_of = {k: n for n, sites in enumerate(outcome.clusters) for k in sites}
    sites: list[dict[str, Any]] = [
        {
            "site": site,
            "rows": problem.rows[k],
            "cluster": cluster_of[k],
            **{
                track: _without_penalty(metrics)
                for track, all_sites in outcome.metrics.items()
                if (metrics := all_sites[k]) is not None
            },
        }
        for k, site in enumerate(problem.sites)
    ]
    values = len(problem.sites) * len(problem.start)
    return {
        "sites": sites,
        "means": {
            track: {kind: mean_metrics(metrics, kind) for kind in ("train", "test")}
            for track, metrics in outcome.metrics.items()
        },
        "graph": outcome.graph,
        "clusters": [list(sites) for sites in outcome.clusters],
        "objective": outcome.objective,
        "change": dict(outcome.changes),
        "bytes": {
            "up": _bytes(report.history, "bytes_up"),
            "down": _bytes(report.history, "bytes_down"),
            "updates": outcome.update_bytes,
            "updates-float32": report.epochs * values * 4,
        },
    }


def _without_penalty(metrics: Metrics) -> Metrics:
    return {
        kind: {name: value for name, value in values.items() if name != PENALTY}
        for kind, values in metrics.items()
    }


def _bytes(history: Sequence[RoundReport], name: str) -> int:
    rounds = [item for item in history if item.phase == Action.PERSONAL.name.lower()]
    return sum(sum(getattr(item, name).values()) for item in rounds)
