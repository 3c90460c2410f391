"""Personalised: each site of a table gets a model, pulled towards similar sites'.

In each round the server sends every site parameters and gets an update of them: a
gradient over the site's rows. It then takes a proximal step
(:mod:`strategies.methods.personalised.tracks`), which ties the sites' models along
the edges of a similarity graph. Labels and rows stay.

Reference: "Communication Efficient Training of Federated Model Over Unbalanced Labels"
(draft), Algorithms 1, 2, 4 and 5. Corrections: the gradient maps back by the transposes
of M and N, and the Z-step stops on residuals; the norm p of an edge is 2.
Steps over all rows are accelerated, because the rounds are what costs.

Entry ``personal`` of `report.json`::

    sites     [{site, rows, cluster, personal: {train, test}, global: .., local: ..}]
    means     {personal: {train, test}, global: .., local: ..}   over the sites
    graph     {kind, penalty, edges: [[i, j]], components}
              positions in ``sites``; what is not connected shares nothing but x
    clusters  [[i, ..]]   connected sites whose own coordinates are equal
    objective of the final parameters; change  by the last step, {track: relative}
    bytes     {up, down}   of the rounds of training
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from strategies.methods.personalised.graph import (
    PENALTY,
    EdgePenalty,
    Metrics,
    SiteGraph,
    make_graph,
    mean_metrics,
    read_metrics,
)
from strategies.methods.personalised.setup import (
    PersonalisedProblem,
    personal_mask,
    set_up_personalised,
)
from strategies.methods.personalised.tracks import Track, read_updates
from strategies.run.exchange import Replies, Requests, ask
from strategies.run.strategy import EpochResult
from strategies.setup.labels import task_line
from strategies.training.outcome import Outcome, read_digests
from strategies.training.server_method import ServerMethod
from strategies.training.strategy import TrainingStrategy
from strategies.training.trend import falling_rate
from tp_flower.arrays import FloatArray
from tp_flower.heads import Contribution
from tp_flower.methods.personalised.messages import (
    OWN_MODELS,
    Pace,
    PersonalRequest,
    TrackParameters,
)
from tp_flower.methods.personalised.settings import PersonalisedSettings
from tp_flower.objectives import Target
from tp_flower.reports.records import RunReport
from tp_flower.settings import Settings
from tp_flower.settings.declare import AUTO
from tp_flower.settings.run import CLASSIFICATION
from tp_flower.terms.extraction import needs_numbers

PERSONAL: Final = "personal"
GLOBAL: Final = "global"
CLEARLY: Final = 1.01  # times an error: less is chance, or an end before the optimum
_METRICS: Final = {PERSONAL: "metrics", GLOBAL: "common_metrics"}


class Training:
    """A personalised training after its set-up.

    Tracks are the sites' own models and the common one; ``mask``, (p,), marks the
    coordinates that each site has for itself; ``metrics`` are all sites', by track.
    """

    def __init__(
        self, problem: PersonalisedProblem, graph: SiteGraph, settings: Settings
    ) -> None:
        self.problem = problem
        self.graph = graph
        self.settings = settings
        self._penalty = EdgePenalty(graph.graph, settings)
        self.mask = personal_mask(settings, problem)
        largest = float(problem.curvature.max(initial=0.0))
        self.rate = settings.learning_rate or 1.0 / (largest or 1.0)
        start = np.tile(problem.start, (len(problem.parts), 1))
        self.tracks = {PERSONAL: Track.start(self.mask, start, self._penalty.step)}
        if settings.of(PersonalisedSettings).baselines:
            self.tracks[GLOBAL] = Track.start(np.zeros_like(self.mask), start)
        self.metrics: dict[str, Sequence[Metrics]] = {}

    @property
    def parameters(self) -> dict[str, FloatArray]:
        """(N, p) by track."""
        return {track: state.iterate.point for track, state in self.tracks.items()}

    @property
    def change(self) -> float:
        """The relative change of the track that the last step moved most."""
        return max(state.change for state in self.tracks.values())

    def pace(self, epoch: int) -> Pace:
        """Return the local steps and step size of an epoch, equal at all sites."""
        batch = self.settings.batch_size
        passes = self.settings.local_epochs or 1
        batches = 1
        rate = self.rate
        if batch:
            batches = -(-max(self.problem.rows) // batch)
            # gradients over samples of rows have noise, which only smaller steps reduce
            rate = falling_rate(self.rate, epoch)
        return Pace(
            steps=passes * max(batches, 1),
            rate=rate,
            batch=batch,
            seed=self.settings.seed,
            epoch=epoch,
        )

    def request(self, epoch: int | None = None) -> Requests:
        """Return the message of an epoch's round, or that with the final parameters."""
        points = self.parameters
        pace = None
        if epoch is not None:
            # where the sites compute their gradients
            points = {
                track: state.iterate.ahead for track, state in self.tracks.items()
            }
            pace = self.pace(epoch)
        parts = self.problem.parts
        common = points.get(GLOBAL)
        bodies = {
            part.number: TrackParameters(
                points[PERSONAL][k].astype(np.float32),
                None if common is None else common[k].astype(np.float32),
            )
            for k, part in enumerate(parts)
        }
        base = self.problem.base_score.tolist()
        return ask(PersonalRequest(base=base, pace=pace, parts=bodies), parts)

    def step(self, epoch: int, replies: Replies) -> EpochResult:
        """Take a step; return the sites' mean metrics at the point where it began."""
        parts = self.problem.parts
        pace = self.pace(epoch)
        personal, common = read_updates(
            self.problem, replies, has_common=GLOBAL in self.tracks
        )
        updates = {PERSONAL: personal, GLOBAL: common}
        # then an update is the gradient over all rows
        is_full = not self.settings.batch_size and self.settings.local_epochs <= 1
        length = pace.rate * pace.steps
        self.tracks = {
            track: state.advance(updates[track], length, is_accelerated=is_full)
            for track, state in self.tracks.items()
        }
        metrics = read_metrics(replies, parts, _METRICS[PERSONAL])
        return EpochResult(
            epoch, mean_metrics(metrics, "train"), mean_metrics(metrics, "test")
        )

    def take_metrics(self, replies: Replies) -> None:
        """Record the metrics of the final parameters."""
        parts = self.problem.parts
        self.metrics = {
            t: read_metrics(replies, parts, _METRICS[t]) for t in self.tracks
        }
        if self.graph.alone is not None:
            self.metrics["local"] = self.graph.alone

    def advice(self) -> str:
        """Return how to change the graph's penalty if other models are clearly better.

        "" if they are not.
        """
        means = {
            track: mean_metrics(sites, "test") for track, sites in self.metrics.items()
        }
        name = "log_loss"
        if "rmse" in means[PERSONAL]:
            name = "rmse"
        errors = {
            track: metrics.get(name, math.inf) for track, metrics in means.items()
        }
        best = min(errors, key=errors.__getitem__)
        penalty = self.settings.of(PersonalisedSettings).graph_penalty
        way = "raise it"
        if best == "local":
            way = f"lower it, say to {penalty / 10:g}"
        # without personal coordinates no penalty counts
        if (
            not errors[PERSONAL] > CLEARLY * errors[best]
            or not self.mask.any()
            or not penalty
        ):
            return ""
        return (
            f"with graph-penalty = {penalty:g} the sites' own models are worse than "
            f"the {OWN_MODELS[best]} (mean test {name} {errors[PERSONAL]:.4g} against "
            f"{errors[best]:.4g}): {way}, or name the edges in graph"
        )

    def report_entry(self, report: RunReport) -> dict[str, object]:
        """Return the entry in a run's report, which is complete without it."""
        problem = self.problem
        graph = self.graph.graph
        models = self.parameters[PERSONAL][:, self.mask]
        clusters = self.graph.clusters(models)
        cluster_of = {k: n for n, sites in enumerate(clusters) for k in sites}
        sites = [
            {
                "site": site,
                "rows": problem.rows[k],
                "cluster": cluster_of[k],
                **{
                    track: _drop_penalty(all_sites[k])
                    for track, all_sites in self.metrics.items()
                },
            }
            for k, site in enumerate(problem.sites)
        ]
        rounds = [item for item in report.history if item.phase == PERSONAL]
        train = [metrics["train"] for metrics in self.metrics[PERSONAL]]
        objective = float(
            np.mean([m.get("loss", 0.0) + m.get(PENALTY, 0.0) for m in train])
        )
        return {
            "sites": sites,
            "means": {
                track: {kind: mean_metrics(metrics, kind) for kind in ("train", "test")}
                for track, metrics in self.metrics.items()
            },
            "graph": {
                "kind": self.graph.kind,
                "penalty": self.settings.of(PersonalisedSettings).graph_penalty,
                "edges": graph.edges.tolist(),
                "components": int(graph.components.max(initial=-1)) + 1,
            },
            "clusters": clusters,
            "objective": objective + self._penalty.value(models),
            "change": {track: state.change for track, state in self.tracks.items()},
            "bytes": {
                "up": sum(sum(item.bytes_up.values()) for item in rounds),
                "down": sum(sum(item.bytes_down.values()) for item in rounds),
            },
        }


def _drop_penalty(metrics: Metrics) -> Metrics:
    return {
        kind: {name: value for name, value in values.items() if name != PENALTY}
        for kind, values in metrics.items()
    }


def local_task_line(problem: PersonalisedProblem, settings: Settings) -> str:
    """Return the task that "auto" has become where labels stay, with the reason."""
    labels = Target.of(np.zeros(0), problem.classes, problem.response.kind)
    line = task_line(labels, settings)
    if labels.classes or needs_numbers(settings):
        return line
    return (
        f"{line}, and not all sites show that it has the same two values; to train on "
        "them as "
        f'classes set task = "{CLASSIFICATION}"'
    )


class PersonalMethod(ServerMethod[PersonalisedProblem]):
    """A model for every site of one table, at the server.

    ``parameters`` are (N, p) by track, in the order of the problem's sites.
    """

    parameters: dict[str, FloatArray]
    _graph: SiteGraph
    _training: Training | None = None

    def set_up(self) -> Generator[Requests, Replies, PersonalisedProblem]:
        """Run the set-up rounds, and that of the graph."""
        problem = yield from set_up_personalised(
            self.run.query, self.settings, self.run.inventory, self.run.warn
        )
        self.run.chosen["loss"] = problem.response.loss
        if self.settings.task == AUTO:
            self.run.chosen["task"] = local_task_line(problem, self.settings)
        self._graph = yield from make_graph(problem, self.settings)
        return problem

    def epochs(
        self, problem: PersonalisedProblem
    ) -> Generator[Requests, Replies, None]:
        """Descend, until a step changes less than the tolerance, if one is set."""
        training = Training(problem, self._graph, self.settings)
        self.run.chosen |= {
            "learning-rate": training.rate,
            "personal": int(training.mask.sum()),
        }
        for epoch in range(1, self.settings.epochs + 1):
            replies = yield self.run.request(training.request(epoch))
            self.run.finish_epoch(training.step(epoch, replies))
            if training.change < self.settings.tolerance:
                break
        self.parameters = training.parameters
        training.take_metrics((yield training.request()))
        if advice := training.advice():
            self.run.warn(advice)
        self._training = training

    def outcome_of(self, replies: Replies, problem: PersonalisedProblem) -> Outcome:
        """Return the digests; a single table contributes the whole score."""
        return Outcome(
            digests=read_digests(replies, problem.parts),
            contributions={
                problem.table.name: Contribution(np.zeros(problem.table.outputs), 1.0)
            },
        )

    def complete(self, report: RunReport) -> RunReport:
        """Return the report with an entry about the sites' own models."""
        if self._training is None:
            return report
        metrics = self._training.metrics[PERSONAL]
        return replace(
            report,
            final_train=mean_metrics(metrics, "train"),
            final_test=mean_metrics(metrics, "test"),
            sections={"personal": self._training.report_entry(report)},
        )


class Personalised(TrainingStrategy):
    """Train a model for every site of one table, whose shards are the sites."""

    name = "personalised"
    method_type = PersonalMethod
