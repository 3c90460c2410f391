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

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from strategies.personalised.descent import Descent, read_updates, update_code
from strategies.personalised.graph import EdgePenalty, SiteGraph, make_graph
from strategies.personalised.report import (
    Metrics,
    PersonalisedOutcome,
    mean_metrics,
    mean_objective,
    read_metrics,
    report_entry,
)
from strategies.personalised.setup import (
    PersonalisedProblem,
    personal_mask,
    set_up_personalised,
)
from strategies.run.exchange import Replies, Request, ask
from strategies.run.strategy import EpochResult
from strategies.training.base import Outcome, RelationalStrategy, read_digests
from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.learning.contributions import Contribution
from tp_flower.protocol.personalised_messages import (
    Pace,
    PersonalRequest,
    TrackParameters,
    UpdateCode,
)
from tp_flower.reports.records import RunReport
from tp_flower.settings import Settings

PERSONAL: Final = "personal"
GLOBAL: Final = "global"
_METRICS: Final = {PERSONAL: "metrics", GLOBAL: "common_metrics"}


class Training:
    """A personalised training after its set-up.

    ``descents`` are by track: the sites' own models, and one for all; ``mask`` (p,)
    tells the coordinates that each site has for itself.
    """

    def __init__(
        self, problem: PersonalisedProblem, graph: SiteGraph, settings: Settings
    ) -> None:
        self.problem, self.graph, self.settings = problem, graph, settings
        self._penalty = EdgePenalty(graph.graph, settings, problem.rows)
        self.mask = personal_mask(settings, problem)
        largest = float(problem.curvature.max(initial=0.0))
        self.rate = settings.learning_rate or 1.0 / (largest or 1.0)
        start = np.tile(problem.start, (len(problem.parts), 1))
        self.descents = {PERSONAL: Descent.start(self.mask, start, self._penalty.step)}
        if settings.baselines:
            self.descents[GLOBAL] = Descent.start(np.zeros_like(self.mask), start)
        self._has_answered: BoolArray = np.zeros(len(problem.parts), np.bool_)
        self._update_bytes = 0

    @property
    def parameters(self) -> dict[str, FloatArray]:
        """(N, p) by track."""
        return {track: each.iterate.point for track, each in self.descents.items()}

    @property
    def change(self) -> float:
        """Relative, of the track that the last step has moved most."""
        return max(each.change for each in self.descents.values())

    def pace(self, epoch: int) -> Pace:
        """Return how the sites go on from where they are sent, the same at all."""
        batch, passes = self.settings.batch_size, self.settings.local_epochs or 1
        batches = -(-max(self.problem.rows) // batch) if batch else 1
        # gradients of some rows have noise, which only smaller steps take away
        slower = 1.0 + self.settings.decay * (epoch - 1) if batch else 1.0
        return Pace(
            steps=passes * max(batches, 1),
            rate=self.rate / slower,
            batch=batch,
            seed=self.settings.seed,
            epoch=epoch,
        )

    def ask_updates(self, epoch: int) -> Request:
        """Return the message of an epoch's round."""
        points = {track: each.ahead for track, each in self.descents.items()}
        return self._message(
            points, self.pace(epoch), update_code(self.settings, epoch)
        )

    def ask_metrics(self) -> Request:
        """Return the message with the final parameters."""
        return self._message(self.parameters)

    def _message(
        self,
        points: Mapping[str, FloatArray],
        pace: Pace | None = None,
        code: UpdateCode | None = None,
    ) -> Request:
        parts, common = self.problem.parts, points.get(GLOBAL)
        bodies = {
            part.number: TrackParameters(
                points[PERSONAL][k].astype(np.float32),
                None if common is None else common[k].astype(np.float32),
            )
            for k, part in enumerate(parts)
        }
        base = self.problem.base_score.tolist()
        message = PersonalRequest(base=base, pace=pace, code=code, parts=bodies)
        return ask(message, parts)

    def step(self, epoch: int, replies: Replies) -> EpochResult:
        """Take a step; return the sites' mean metrics, of where it began."""
        parts, pace = self.problem.parts, self.pace(epoch)
        personal, common, update_bytes = read_updates(
            self.problem, replies, has_common=GLOBAL in self.descents
        )
        updates = {PERSONAL: personal, GLOBAL: common}
        self._update_bytes += update_bytes
        present = np.array([part.node not in replies.stale for part in parts])
        self._has_answered |= present
        # an update is the gradient over all rows
        is_full = not self.settings.batch_size and self.settings.local_epochs <= 1
        length = pace.rate * pace.steps
        for track, descent in self.descents.items():
            after = descent.stepped(
                updates[track], length, present, is_accelerated=is_full
            )
            self.descents[track] = after.with_newcomers(
                self.graph.graph, self._has_answered
            )
        metrics = read_metrics(replies, parts, _METRICS[PERSONAL])
        return EpochResult(
            epoch, mean_metrics(metrics, "train"), mean_metrics(metrics, "test")
        )

    def outcome(self, replies: Replies) -> PersonalisedOutcome:
        """Return the result, by the replies to the final parameters."""
        metrics: dict[str, Sequence[Metrics | None]] = {
            track: read_metrics(replies, self.problem.parts, _METRICS[track])
            for track in self.descents
        }
        if self.graph.alone is not None:
            metrics["local"] = self.graph.alone
        models = self.parameters[PERSONAL][:, self.mask]
        return PersonalisedOutcome(
            metrics=metrics,
            objective=mean_objective(metrics[PERSONAL]) + self._penalty.value(models),
            changes={track: each.change for track, each in self.descents.items()},
            graph=self.graph.entry(self.settings),
            clusters=self.graph.clusters(models),
            update_bytes=self._update_bytes,
        )


class Personalised(RelationalStrategy[PersonalisedProblem]):
    """Train a model for every site of one table, whose shards are the sites.

    ``parameters`` are (N, p) by track, in the order of ``sites``.
    """

    name = "personalised"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parameters: dict[str, FloatArray] = {}
        self._graph: SiteGraph | None = None
        self._result: PersonalisedOutcome | None = None

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites, after the set-up."""
        return () if self.training_problem is None else self.training_problem.sites

    def set_up(self) -> Generator[Request, Replies, PersonalisedProblem]:
        """Run the set-up rounds, and that of the graph."""
        problem = yield from set_up_personalised(
            self.query, self.settings, self.inventory
        )
        self._graph = yield from make_graph(problem, self.settings)
        return problem

    def epochs(self, problem: PersonalisedProblem) -> Generator[Request, Replies, None]:
        """Descend, until a step changes less than the tolerance if one is set."""
        if self._graph is None:
            raise RuntimeError("there is no graph before the set-up is done")
        training = Training(problem, self._graph, self.settings)
        personal = int(training.mask.sum())
        self.chosen |= {"learning-rate": training.rate, "personal": personal}
        for epoch in range(1, self.settings.epochs + 1):
            replies = yield self.request(training.ask_updates(epoch))
            self.finish_epoch(training.step(epoch, replies))
            if training.change < self.settings.tolerance:
                break
        self.parameters = training.parameters
        self._result = training.outcome((yield training.ask_metrics()))

    def outcome_of(self, replies: Replies, problem: PersonalisedProblem) -> Outcome:
        """Return the digests; the one table adds all of the scores."""
        outputs = problem.table.outputs
        return Outcome(
            digests=read_digests(replies, problem.parts),
            contributions={problem.table.name: Contribution(np.zeros(outputs), 1.0)},
        )

    @property
    def report(self) -> RunReport:
        """The record of the run so far, with the entry of the sites' own models."""
        report = super().report
        if self._result is None or self.training_problem is None:
            return report
        metrics = self._result.metrics[PERSONAL]
        return replace(
            report,
            final_train=mean_metrics(metrics, "train"),
            final_test=mean_metrics(metrics, "test"),
            personal=report_entry(self.training_problem, self._result, report),
        )
