"""The similarity graph of a personalised training, its penalty, and sites' metrics."""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from strategies.methods.personalised.setup import PersonalisedProblem
from strategies.run.exchange import Part, Replies, Requests, ask
from strategies.run.replies import array_of, refuse
from tp_flower.arrays import FloatArray
from tp_flower.errors import SettingsError
from tp_flower.methods.personalised import graph as similarity
from tp_flower.methods.personalised.messages import (
    BY_DATA,
    BY_FEATURES,
    BY_MODELS,
    SiteMetrics,
    SummariseRequest,
)
from tp_flower.methods.personalised.settings import (
    NO_GRAPH,
    PersonalisedSettings,
    summaries_of,
)
from tp_flower.methods.personalised.sites import PAIRS, covariances, pairwise_distances
from tp_flower.methods.personalised.z_step import ZStep
from tp_flower.settings import Settings

PENALTY: Final = "penalty"
_NAMES: Final = frozenset(
    {"loss", "log_loss", "auc", "accuracy", "rmse", "mae", "r2", PENALTY}
)
Metrics = dict[str, dict[str, float]]  # by "train" and "test", values by metric


class EdgePenalty:
    """lambda sum over the edges of ||z_i - z_j||_2, and its proximal step."""

    def __init__(self, graph: similarity.SimilarityGraph, settings: Settings) -> None:
        self.graph = graph
        self.penalty = settings.of(PersonalisedSettings).graph_penalty
        self._step = ZStep(graph)
        self._pull: FloatArray | None = None

    def value(self, models: FloatArray) -> float:
        """Return the penalty of models (N, d)."""
        left, right = self.graph.edges.T
        norms = np.linalg.norm(models[left] - models[right], axis=1)
        return self.penalty * float(norms.sum())

    def step(self, targets: FloatArray, eta: float) -> FloatArray:
        """Return argmin eta * penalty(Z) + 1/2 ||Z - targets||_F^2, (N, d).

        The multipliers of the previous step are the starting point.
        """
        solution = self._step.solve(targets, eta * self.penalty, self._pull)
        self._pull = solution.pull
        return solution.models


@dataclass(frozen=True)
class SiteGraph:
    """The similarity graph; its ``kind`` names the summaries used, or is "given".

    ``alone`` are the metrics of the model that every site has trained alone; None
    without baselines.
    """

    kind: str
    graph: similarity.SimilarityGraph
    alone: Sequence[Metrics] | None

    def clusters(self, models: FloatArray) -> list[list[int]]:
        """Return the groups of connected sites whose models (N, d) are equal."""
        left, right = self.graph.edges.T
        groups = self.graph.groups((models[left] == models[right]).all(axis=1))
        return [
            np.flatnonzero(groups == group).tolist()
            for group in range(groups.max() + 1)
        ]


def make_graph(
    problem: PersonalisedProblem, settings: Settings
) -> Generator[Requests, Replies, SiteGraph]:
    """Request the sites' summaries and build the graph."""
    kind = summaries_of(settings)
    values = settings.of(PersonalisedSettings)
    graph = None
    local_metrics = None
    if kind == NO_GRAPH:
        graph = _read_graph(values.graph, problem.sites)
    if graph is None or values.baselines:
        request = SummariseRequest(
            summaries=kind != NO_GRAPH,
            alone=values.baselines,
            seed=settings.seed,
            label_scale=problem.label_scale,
            base=problem.base_score.tolist(),
        )
        replies = yield ask(request, problem.parts)
        if values.baselines:
            local_metrics = read_metrics(replies, problem.parts, "local")
        if graph is None:
            distances = read_distances(problem, kind, replies)
            neighbours = values.graph_neighbours
            graph = similarity.nearest_neighbours(problem.sites, distances, neighbours)
    return SiteGraph("given" if kind == NO_GRAPH else kind, graph, local_metrics)


def read_distances(
    problem: PersonalisedProblem, kind: str, replies: Replies
) -> FloatArray:
    """Return the distances between the sites' summaries, (N, N)."""
    width = problem.table.features + 1
    size = {
        BY_DATA: 2 * PAIRS,
        BY_FEATURES: width * (width + 1) // 2,
        BY_MODELS: len(problem.start),
    }[kind]
    summaries = np.array(
        [array_of(replies, part, "summary", (size,)) for part in problem.parts],
        np.float64,
    )
    return pairwise_distances(
        covariances(summaries) if kind == BY_FEATURES else summaries
    )


def _read_graph(text: str, sites: Sequence[str]) -> similarity.SimilarityGraph:
    """Return the graph of a setting: its edges, or a file of them."""
    path = Path(text).expanduser()
    if "\n" not in text and path.suffix and path.is_file():
        try:
            text = path.read_text(encoding="utf8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"graph: {text!r} cannot be read: {error}") from None
    return similarity.parse_edges(text, sites)


def read_metrics(replies: Replies, parts: Sequence[Part], field: str) -> list[Metrics]:
    """Return every site's metrics from a field."""
    by_site: list[Metrics] = []
    for part in parts:
        metrics = getattr(replies.parts.get(part.number), field, None)
        if not isinstance(metrics, SiteMetrics):
            raise refuse(part, "no metrics")
        if not {*metrics.train, *metrics.test} <= _NAMES:
            raise refuse(part, "metrics of unknown names")
        by_site.append({"train": metrics.train, "test": metrics.test})
    return by_site


def mean_metrics(sites: Iterable[Metrics], kind: str) -> dict[str, float]:
    """Return the mean of every metric over the sites, without the penalty.

    >>> sites = [{"train": {"loss": 1.0}}, {"train": {"loss": 2.0}}]
    >>> mean_metrics(sites, "train")
    {'loss': 1.5}
    """
    values: dict[str, list[float]] = {}
    for metrics in sites:
        for name, value in metrics.get(kind, {}).items():
            values.setdefault(name, []).append(value)
    values.pop(PENALTY, None)
    return {name: float(np.mean(numbers)) for name, numbers in values.items()}
