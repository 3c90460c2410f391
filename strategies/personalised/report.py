"""What a run's report says of models of the sites' own.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strategies.personalised.descent import Metrics, by_site, mean_metrics
from strategies.personalised.graph import PersonalGraph
from strategies.personalised.setup import PersonalProblem
from tp_flower.protocol import Action
from tp_flower.reports.records import RoundReport, RunReport


@dataclass(frozen=True)
class PersonalOutcome:
    """What a personalised training has come to.

    Attributes:
        metrics: by track (and "local"), of every site; None of one that was missing.
        objective: of the final parameters.
        changes: by track, by the last step.
        clusters: positions of the sites that have the same model, each once.
        own_bytes: of the updates of the sites' own models.
    """

    metrics: Mapping[str, Sequence[Metrics | None]]
    objective: float
    changes: Mapping[str, float]
    clusters: Sequence[Sequence[int]]
    own_bytes: int


def personal_facts(
    problem: PersonalProblem,
    graph: PersonalGraph,
    outcome: PersonalOutcome,
    report: RunReport,
) -> dict[str, object]:
    """Return the report's entry.

    Args:
        problem: that was trained.
        graph: of the sites.
        outcome: of the training.
        report: of the run, without the entry.
    """
    tracks = {
        name: by_site(problem.sites, found) for name, found in outcome.metrics.items()
    }
    cluster_of = {k: n for n, own in enumerate(outcome.clusters) for k in own}
    sites: list[dict[str, Any]] = [
        {
            "site": site,
            "rows": problem.rows[k],
            "cluster": cluster_of[k],
            **{name: found[site] for name, found in tracks.items() if site in found},
        }
        for k, site in enumerate(problem.sites)
    ]
    return {
        "sites": sites,
        "means": {
            name: {kind: mean_metrics(found, kind) for kind in ("train", "test")}
            for name, found in outcome.metrics.items()
        },
        "graph": graph.facts(report.settings),
        "clusters": [list(own) for own in outcome.clusters],
        "objective": outcome.objective,
        "change": dict(outcome.changes),
        "bytes": {
            "up": _bytes(report.history, "bytes_up"),
            "down": _bytes(report.history, "bytes_down"),
            "updates": outcome.own_bytes,
            "updates-float32": report.epochs
            * len(problem.parts)
            * len(problem.start)
            * 4,
        },
    }


def _bytes(history: Sequence[RoundReport], name: str) -> int:
    rounds = [item for item in history if item.phase == Action.PERSONAL.name.lower()]
    return sum(sum(getattr(item, name).values()) for item in rounds)
