"""TablePuppetADMM: learning over joins by sharing ADMM, then over unions.

One epoch costs one round if every table is one shard and two if some table is sharded
(``inner_rounds`` more with consensus): targets down and statistics or theta^q up, then
parameters down and scores up. Training over joins alone (the paper's TP-Join-ADMM) is
the case of one shard per table, not a separate class.
"""

from collections.abc import Generator, Mapping, Sequence
from statistics import mean

import numpy as np
from msgspec.structs import replace

from strategies.run.exchange import Replies, Requests, ask
from strategies.run.strategy import EpochResult, tests_every_epoch
from strategies.setup.problem import TrainedTable, TrainingProblem
from strategies.training.base import JoinStrategy
from strategies.training.traffic import TableSize, Traffic, admm_epoch
from tp_flower.arrays import FloatArray
from tp_flower.errors import ReplyError, SettingsError
from tp_flower.learning.admm import (
    AdmmState,
    AndersonMixer,
    LocalScores,
    Point,
    Residuals,
    admm_step,
    balanced_rho,
    initial_state,
    residuals,
)
from tp_flower.learning.solvers import RidgeSolver
from tp_flower.methods import DP_SGD, NOISY_STATISTICS
from tp_flower.privacy.statistics_update import private_update, usable_gram
from tp_flower.protocol.messages import Action
from tp_flower.protocol.training_messages import (
    AdmmRequest,
    AdmmTarget,
    CommonParameters,
    ConsensusRequest,
    LocalFit,
    Outline,
    Update,
)
from tp_flower.settings import Settings

RHO_SHARE = 0.5
"""Automatic rho: this share of the loss's mean curvature at the base score."""

CONSENSUS_SHARE = 0.1
"""rho_in: this share of the mean diagonal of the sub-problem's Hessian."""

BALANCED_EPOCHS = 30
"""Residual balancing must end for ADMM to converge (Boyd et al. 2011, 3.4.1)."""

OVER_RELAXATION = 1.5
"""Over-relaxation without Anderson mixing: each helps as much, together they do not."""


class AdmmServer:
    """The server's side of ADMM between two exchanges with the sites.

    Attributes:
        rho: the penalty in use; it may change from epoch to epoch.
        corrections: c: the number of tables (sharing) or 1 (Jacobi).
        memory: number of epochs that Anderson mixing uses; 0 without mixing.
    """

    def __init__(self, problem: TrainingProblem, settings: Settings) -> None:
        self.problem = problem
        self.corrections = len(problem.tables) if settings.admm_form == "sharing" else 1
        curvature = problem.loss.curvature(problem.base_score)
        self.rho = settings.rho or RHO_SHARE * curvature
        noisy = settings.privacy.covers_features or settings.privacy.covers_predictions
        # balancing and mixing would follow the noise
        self._balances = not settings.rho and not noisy
        # mixing needs theta-updates that depend on nothing but the target
        exact = not noisy and all(
            table.is_linear and table.update is not Update.CONSENSUS
            for table in problem.tables.values()
        )
        self.memory = settings.anderson_memory if exact else 0
        self.over_relaxation = settings.over_relaxation or (
            1.0 if self.memory or noisy else OVER_RELAXATION
        )
        weights = problem.weighting.train
        self._mixer = AndersonMixer(
            problem.train, self.memory, self.corrections, weights
        )
        self._stepped = initial_state(
            problem.base_score, problem.train.joined_rows, rho=1.0
        )
        local_scores = dict(problem.initial_scores)
        scores = problem.gather(local_scores)
        self._reached = self._point = Point(scores, self._stepped.duals, local_scores)
        self._epoch = 0
        self._recent: list[Residuals] = []

    @property
    def kappa(self) -> float:
        """The weight of the sites' fits, c * rho."""
        return self.corrections * self.rho

    def targets(self) -> dict[str, FloatArray]:
        """Start an epoch: z- and dual update; return targets (n_i, d_c) by table."""
        self._epoch += 1
        self._stepped, message = admm_step(
            AdmmState(self._stepped.z, self._point.duals, self.rho),
            self._point.scores,
            self.problem.train_labels,
            self.problem.loss,
            self.over_relaxation if self._epoch > 1 else 1.0,
        )
        return self.problem.scatter_targets(
            self._point.local_scores, message, self.kappa
        )

    def take(self, local_scores: LocalScores, *, is_tested: bool = True) -> EpochResult:
        """End an epoch with the new local scores, also of held-out rows if tested."""
        problem, old_scores = self.problem, self._reached.scores
        scores = problem.gather(local_scores)
        self._reached = Point(scores, self._stepped.duals, local_scores)
        gap = residuals(
            self._stepped,
            scores,
            old_scores,
            problem.base_score,
            problem.weighting.train_rows,
        )
        result = EpochResult(
            epoch=self._epoch,
            train=problem.train_metrics(scores),
            test=problem.test_metrics(local_scores) if is_tested else {},
            primal_residual=gap.primal,
            dual_residual=gap.dual,
        )
        self._point = self._mixer.mix(self.rho, self._point, self._reached)
        self._recent.append(gap)
        if self._balances and self._epoch <= BALANCED_EPOCHS:
            rho = balanced_rho(self.rho, self._recent)
            if rho != self.rho:
                self.rho = rho
                self.forget_steps()
        return result

    def forget_steps(self) -> None:
        """Choose rho, and let mixing use only the epochs from here on."""
        self._recent.clear()
        self._mixer.restart()


class GramSolver:
    """The theta-update of one sharded table from summed statistics (linear, exact).

    Noisy statistics are those of the residual, so that the solver keeps theta.
    """

    def __init__(
        self, table: TrainedTable, joined_rows: int, *, is_private: bool
    ) -> None:
        if table.gram is None:
            raise ReplyError(f"table {table.name}: its shards sent no Gram matrix")
        self._solver = RidgeSolver.from_gram(
            usable_gram(table.gram, table.gram_deviation),
            joined_rows,
            intercept=table.has_intercept,
        )
        self._theta = np.zeros((len(table.gram), table.outputs))
        self._is_private = is_private

    def solve(self, moments: FloatArray, kappa: float, l2: float) -> FloatArray:
        """Return the flat parameters of the table's model, (p,)."""
        if not self._is_private:
            return self._solver.solve(moments, kappa, l2).ravel()
        self._theta = private_update(self._solver, self._theta, moments, kappa, l2)
        return self._theta.ravel()


def consensus_parameters(
    table: TrainedTable, replies: Replies, rho_in: float, l2: float
) -> FloatArray:
    """Return w from the shards' theta^q + u^q (Eq. 20), (p,).

    w = Q rho_in / (Q rho_in + beta) * mean(theta + u); the paper's Eq. 20 has M where
    consensus ADMM has Q_i. Biases are not penalised, only averaged. A shard without
    rows to train on does not enter the mean: it only takes w.
    """
    every = range(len(table.parts))
    trained = [index for index in every if table.rows[index].trained] or list(every)
    shape, shards = table.penalised.shape, len(trained)
    proposals = [table.array(replies, k, "proposal", shape) for k in trained]
    average = np.sum(proposals, axis=0) / shards
    shrink = shards * rho_in / (shards * rho_in + l2)
    shrunk: FloatArray = np.where(table.penalised, shrink * average, average)
    return shrunk


class AdmmStrategy(JoinStrategy):
    """Base of the methods that alternate between the server and the sites' fits."""

    messages = (Action.PREPARE, Action.ADMM)
    messages_of_shards = (Action.CONSENSUS,)

    def set_up(self) -> Generator[Requests, Replies, TrainingProblem]:
        """Refuse settings that contradict each other before any round."""
        wanted_update(self.settings)
        return (yield from super().set_up())

    def choose_update(self, table: str, shards: int, *, is_linear: bool) -> Update:
        """Let sharded linear tables send statistics, and the others seek consensus."""
        if shards == 1:
            return Update.LOCAL
        update = wanted_update(self.settings)
        if update == "gram" and not is_linear:
            raise SettingsError(
                f"lou is 'gram', but the model of table {table!r} is not linear; "
                "allowed for it: 'consensus' and 'auto'"
            )
        is_gram = is_linear and update != "consensus"
        return Update.GRAM if is_gram else Update.CONSENSUS

    def outline(self) -> Outline:
        """Return the schedule, with how often consensus is updated in an epoch."""
        return replace(super().outline(), exchanges=self.settings.inner_rounds)

    def epoch_traffic(
        self, tables: Sequence[TableSize], _: int, *, is_last: bool
    ) -> Traffic:
        """Return the traffic of an epoch."""
        is_tested = is_last or tests_every_epoch(self.settings)
        return admm_epoch(tables, self.settings.inner_rounds, is_tested=is_tested)

    def epochs(self, problem: TrainingProblem) -> Generator[Requests, Replies, None]:
        """Run the epochs, until the residuals are below the tolerance if one is set."""
        server = AdmmServer(problem, self.settings)
        is_private = self.settings.privacy.features == NOISY_STATISTICS
        rows = problem.train.joined_rows
        solvers = {
            table.name: GramSolver(table, rows, is_private=is_private)
            for table in problem.tables.values()
            if table.update is Update.GRAM
        }
        self.chosen |= {
            "rho": server.rho,
            "over-relaxation": server.over_relaxation,
            "anderson-memory": server.memory,
            "lou": {t.name: str(t.update) for t in problem.tables.values()},
        }
        self.local_scores = dict(problem.initial_scores)
        for _ in range(self.settings.epochs):
            self.local_scores = yield from self._exchange(problem, server, solvers)
            if self.session.stale:
                # with stale tables, steps say nothing about the others' convergence
                server.forget_steps()
            result = server.take(self.local_scores, is_tested=self._tests_epoch)
            self.finish_epoch(result)
            if result.is_within(self.settings.tolerance):
                return

    @property
    def _tests_epoch(self) -> bool:
        """Whether held-out rows are scored in the epoch in progress."""
        return tests_every_epoch(self.settings) or self.epoch == self.settings.epochs

    def _gather(self, table: TrainedTable, replies: Replies) -> FloatArray:
        """Return a table's scores (n_i, d_c); held-out rows may keep old ones."""
        if self._tests_epoch:
            return table.gather_scores(replies)
        return table.gather_trained(replies, self.local_scores[table.name])

    def _exchange(
        self,
        problem: TrainingProblem,
        server: AdmmServer,
        solvers: Mapping[str, GramSolver],
    ) -> Generator[Requests, Replies, LocalScores]:
        """Send the targets; return the local scores of the updated models."""
        outline = self._request(problem, server.kappa)
        targets: dict[int, AdmmTarget] = {}
        for name, target in server.targets().items():
            blocks = problem.tables[name].scatter_rows(target)
            targets |= {number: AdmmTarget(block) for number, block in blocks.items()}
        request = replace(outline, parts=targets)
        replies = yield self.request(ask(request, problem.parts))
        scores = {
            name: self._gather(table, replies)
            for name, table in problem.tables.items()
            if table.update is Update.LOCAL
        }
        if problem.sharded:
            solved: dict[int, CommonParameters] = {}
            for name, solver in solvers.items():
                table = problem.tables[name]
                shape = (table.width, table.outputs)
                moments = table.sum_over_shards(replies, "moments", shape)
                theta = solver.solve(moments, server.kappa, problem.l2)
                solved |= table.scatter_parameters(theta)
            scores |= yield from self._agree(problem, replies, outline, solved)
        return {name: scores[name] for name in problem.tables}

    def _request(self, problem: TrainingProblem, kappa: float) -> AdmmRequest:
        """Return the request of an epoch, without its targets."""
        seeking = any(t.update is Update.CONSENSUS for t in problem.sharded)
        fit = LocalFit(
            kappa=kappa,
            rho_in={
                table.name: _inner_penalty(table, kappa) for table in problem.sharded
            },
            epoch=self.epoch,
            seed=problem.seed,
            local_epochs=self.settings.local_epochs,
            learning_rate=self.settings.learning_rate,
        )
        return AdmmRequest(
            fit=fit,
            more_rounds=self.settings.inner_rounds - 1 if seeking else 0,
            evaluate=self._tests_epoch,
            parts={},
        )

    def _agree(
        self,
        problem: TrainingProblem,
        replies: Replies,
        outline: AdmmRequest,
        solved: Mapping[int, CommonParameters],
    ) -> Generator[Requests, Replies, LocalScores]:
        """Bring the shards of each table to common parameters; return their scores.

        If the server solves, the parameters wait for the last round of consensus.
        """
        for more_rounds in range(outline.more_rounds, -1, -1):
            common = {} if more_rounds else dict(solved)
            for table in problem.sharded:
                if table.update is Update.CONSENSUS:
                    rho_in = outline.fit.rho_in[table.name]
                    consensus = consensus_parameters(table, replies, rho_in, problem.l2)
                    common |= table.scatter_parameters(consensus)
            request = ConsensusRequest(
                fit=outline.fit,
                more_rounds=more_rounds,
                evaluate=outline.evaluate,
                parts=common,
            )
            parts = [part for part in problem.parts if part.number in common]
            replies = yield self.request(ask(request, parts))
        return {table.name: self._gather(table, replies) for table in problem.sharded}


class TablePuppetADMM(AdmmStrategy):
    """Train over the result of a query by ADMM.

    >>> query = Query.from_sql("SELECT ...")  # doctest: +SKIP
    >>> grid = InProcessGrid(app, sites=[{"t": frame}])  # doctest: +SKIP
    >>> TablePuppetADMM(query, l2=0.0).start(grid)  # doctest: +SKIP
    """

    name = "admm"


def wanted_update(settings: Settings) -> str:
    """Return how sharded tables train together: "auto", "gram" or "consensus"."""
    required = {DP_SGD: "consensus", NOISY_STATISTICS: "gram"}.get(
        settings.privacy.features
    )
    if required and settings.lou not in ("auto", required):
        raise SettingsError(
            f"lou is {settings.lou!r}, but privacy.features = "
            f"{settings.privacy.features!r} needs {required!r} or 'auto'"
        )
    return required or settings.lou


def _inner_penalty(table: TrainedTable, kappa: float) -> float:
    # shards without trained rows have no curvature; without any, all penalties do
    curvatures = [curvature for curvature in table.mean_curvature if curvature] or [1.0]
    return CONSENSUS_SHARE * kappa * mean(curvatures)
