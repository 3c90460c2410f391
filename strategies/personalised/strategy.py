"""Personalised: every site of one table gets a model, drawn to those of similar sites.

A round sends every site parameters and brings an update of them: a gradient of its own
rows. The server takes a proximal step (:mod:`strategies.personalised.descent`), in
which the sites' models meet along the edges of a similarity graph. Labels and rows
stay.

Reference: "Communication Efficient Training of Federated Model Over Unbalanced Labels"
(draft), Algorithms 1, 2, 4 and 5. Corrected here: the gradient maps back by the
transposes of M and N, the prox of an edge depends on its norm, and the Z-step stops on
residuals. Steps over all rows are accelerated, as rounds are what costs.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from strategies.personalised.descent import (
    Descent,
    Metrics,
    Track,
    UpdateSchedule,
    joined,
    mean_metrics,
    mean_objective,
    read_metrics,
    read_updates,
)
from strategies.personalised.graph import EdgePenalty, PersonalGraph, make_graph
from strategies.personalised.report import PersonalOutcome, personal_facts
from strategies.personalised.setup import (
    PersonalProblem,
    personal_mask,
    set_up_personal,
)
from strategies.run.exchange import Replies, Request, ask
from strategies.run.strategy import EpochResult
from strategies.setup.problem import TrainingProblem
from strategies.training.base import Outcome, RelationalStrategy, read_digests
from strategies.training.prepare import Plan
from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.learning.contributions import Contribution
from tp_flower.protocol import (
    Pace,
    PersonalRequest,
    TrackParameters,
    Update,
    UpdateCode,
)
from tp_flower.reports.records import RunReport

PERSONAL: Final = "personal"
GLOBAL: Final = "global"
_METRICS: Final = {PERSONAL: "metrics", GLOBAL: "common_metrics"}


class Personalised(RelationalStrategy):
    """Train a model for every site of one table.

    Args:
        query: over one table; its shards are the sites.
        settings: of the run; keyword arguments override single ones.

    Attributes:
        parameters: (N, p) by track, of the sites in the order of ``sites``.
        sites: names of the sites.
    """

    name = "personalised"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parameters: dict[str, FloatArray] = {}
        self._problem: PersonalProblem | None = None
        self._graph: PersonalGraph | None = None
        self._own_bytes = 0
        self._known: BoolArray = np.zeros(0, np.bool_)
        self._result: PersonalOutcome | None = None

    @property
    def problem(self) -> PersonalProblem:
        """What is trained, after the set-up.

        Raises:
            RuntimeError: before.
        """
        if self._problem is None:
            raise RuntimeError("there is no problem before the set-up is done")
        return self._problem

    @property
    def graph(self) -> PersonalGraph:
        """Which sites are similar, after the set-up.

        Raises:
            RuntimeError: before.
        """
        if self._graph is None:
            raise RuntimeError("there is no graph before the set-up is done")
        return self._graph

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites, after the set-up."""
        return self.problem.sites

    def plan(self) -> Plan:
        """Let every shard train a model of its own."""
        return Plan(lambda *_: Update.LOCAL, lambda *_: {})

    def set_up(self) -> Generator[Request, Replies, TrainingProblem]:
        """Run the set-up rounds, and that of the graph."""
        self._problem = yield from set_up_personal(
            self.query, self.settings, self.plan(), self.inventory
        )
        self._graph = yield from make_graph(self._problem, self.settings)
        return self._problem.training_problem

    def baseline(self, training_problem: TrainingProblem) -> float:  # noqa: ARG002
        """Return infinity: the server has no label to tell a constant's loss from."""
        return math.inf

    def epochs(
        self, training_problem: TrainingProblem
    ) -> Generator[Request, Replies, None]:
        """Descend, until a step changes less than the tolerance if one is set."""
        descents = self._tracks(training_problem)
        code = UpdateSchedule.of(self.settings)
        for epoch in range(1, self.settings.epochs + 1):
            pace = self._pace(epoch)
            points = {name: own.ahead for name, own in descents.items()}
            request = self._send(points, pace, code.of_epoch(epoch))
            replies = yield self.request(request)
            own_updates, common, own_bytes = read_updates(
                self.problem, replies, has_common=GLOBAL in descents
            )
            updates = {PERSONAL: own_updates, GLOBAL: common}
            self._own_bytes += own_bytes
            present = self._present(replies)
            self._known |= present
            descents = {
                name: self._stepped(own, updates[name], present, pace)
                for name, own in descents.items()
            }
            self.finish_epoch(self._reached(epoch, replies))
            change = max(own.change for own in descents.values())
            if change < self.settings.tolerance:
                break
        yield from self._assess(descents)

    def _tracks(self, training_problem: TrainingProblem) -> dict[str, Descent]:
        """Return the tracks at their start: the sites' models, and one for all."""
        count = len(self.problem.parts)
        self._known = np.zeros(count, np.bool_)
        self._penalty = EdgePenalty(self.graph.graph, self.settings, self.problem.rows)
        mask = personal_mask(self.settings, training_problem)
        start = np.tile(self.problem.start, (count, 1))
        tracks = [Track(PERSONAL, mask, self._penalty.step)]
        if self.settings.baselines:
            tracks.append(Track(GLOBAL, np.zeros_like(mask)))
        self.chosen |= {"learning-rate": self._rate, "personal": int(mask.sum())}
        return {track.name: Descent.start(track, start) for track in tracks}

    def _stepped(
        self,
        own: Descent,
        updates: FloatArray,
        present: BoolArray,
        pace: Pace,
    ) -> Descent:
        """Return a track after a round; sites that are not known yet stand by."""
        step = pace.rate * pace.steps
        after = own.stepped(updates, step, present, is_accelerated=self._is_full)
        if self._known.all():
            return after
        return joined(after, self.graph.graph, self._known)

    @property
    def _is_full(self) -> bool:
        """Whether an update is the gradient over all rows."""
        return not self.settings.batch_size and self.settings.local_epochs <= 1

    @property
    def _rate(self) -> float:
        largest = float(self.problem.curvature.max(initial=0.0))
        return self.settings.learning_rate or 1.0 / (largest or 1.0)

    def _pace(self, epoch: int) -> Pace:
        """Return how the sites go on from where they are sent, the same at all."""
        batch, passes = self.settings.batch_size, self.settings.local_epochs or 1
        most = max(self.problem.rows)
        batches = -(-most // batch) if batch else 1
        # gradients of some rows have noise, which only smaller steps take away
        slower = 1.0 + self.settings.decay * (epoch - 1) if batch else 1.0
        return Pace(
            steps=passes * max(batches, 1),
            rate=self._rate / slower,
            batch=batch,
            seed=self.settings.seed,
            epoch=epoch,
        )

    def _send(
        self,
        points: Mapping[str, FloatArray],
        pace: Pace | None = None,
        code: UpdateCode | None = None,
    ) -> Request:
        """Return the message with parameters (N, p) by track."""
        parts, common = self.problem.parts, points.get(GLOBAL)
        bodies = {
            part.number: TrackParameters(
                points[PERSONAL][k].astype(np.float32),
                None if common is None else common[k].astype(np.float32),
            )
            for k, part in enumerate(parts)
        }
        base = self.problem.training_problem.base_score.tolist()
        message = PersonalRequest(base=base, pace=pace, code=code, parts=bodies)
        return ask(message, parts)

    def _present(self, replies: Replies) -> BoolArray:
        return np.array([p.node not in replies.stale for p in self.problem.parts])

    def _reached(self, epoch: int, replies: Replies) -> EpochResult:
        """Return the sites' mean metrics, of where they were asked."""
        found = read_metrics(replies, self.problem.parts, _METRICS[PERSONAL])
        return EpochResult(
            epoch, mean_metrics(found, "train"), mean_metrics(found, "test")
        )

    def _assess(
        self, descents: Mapping[str, Descent]
    ) -> Generator[Request, Replies, None]:
        """Send the final parameters, and keep what they are worth."""
        self.parameters = {name: own.iterate.point for name, own in descents.items()}
        replies = yield self._send(self.parameters)
        parts, graph = self.problem.parts, self.graph
        metrics: dict[str, Sequence[Metrics | None]] = {
            name: read_metrics(replies, parts, _METRICS[name]) for name in descents
        }
        if graph.alone is not None:
            metrics["local"] = graph.alone
        mask = descents[PERSONAL].track.personal
        own = self.parameters[PERSONAL][:, mask]
        self._result = PersonalOutcome(
            metrics=metrics,
            objective=mean_objective(metrics[PERSONAL]) + self._penalty.value(own),
            changes={name: own.change for name, own in descents.items()},
            clusters=graph.clusters(own),
            own_bytes=self._own_bytes,
        )

    def outcome_of(
        self, replies: Replies, training_problem: TrainingProblem
    ) -> Outcome:
        """Return the digests; what one table adds to the scores is all of them."""
        (table,) = training_problem.tables
        outputs = training_problem.loss.outputs
        return Outcome(
            digests=read_digests(replies, training_problem.parts),
            contributions={table: Contribution(np.zeros(outputs), 1.0)},
        )

    @property
    def report(self) -> RunReport:
        """The record of the run so far, with what is of the sites' own models."""
        report = super().report
        result = self._result
        if result is None:
            return report
        facts = personal_facts(self.problem, self.graph, result, report)
        return replace(
            report,
            final_train=mean_metrics(result.metrics[PERSONAL], "train"),
            final_test=mean_metrics(result.metrics[PERSONAL], "test"),
            personal=facts,
        )
