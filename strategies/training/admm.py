"""TablePuppetADMM: learning over joins by sharing ADMM, then over unions.

One epoch costs one round where every table is one shard and two where some table is
sharded (``inner_rounds`` more with consensus): targets down and statistics or theta^q
up, then parameters down and scores up. Join-only training (the papers' TP-Join-ADMM) is
the case of one shard per table, not another class.
"""

from collections.abc import Generator, Mapping
from functools import partial
from statistics import mean
from typing import Any

import msgspec

from strategies.run.exchange import PartArrays, Replies, Request, ask
from strategies.run.strategy import EpochResult, tests_every_epoch
from strategies.setup.problem import Table, TrainingProblem
from strategies.training import operators
from strategies.training import operators as lou
from strategies.training.base import JoinStrategy
from strategies.training.prepare import Plan, UpdateChooser
from tp_flower.arrays import FloatArray
from tp_flower.errors import SettingsError
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
from tp_flower.methods import DP_SGD, NOISY_STATISTICS
from tp_flower.protocol import (
    AdmmRequest,
    AdmmTarget,
    CommonParameters,
    ConsensusRequest,
    LocalFit,
    Update,
)
from tp_flower.settings import Settings


class AdmmArrays:
    """z, duals, the scores of the joined rows, and those of the tables' rows.

    Args:
        problem: the training problem.
        corrections: c.
        memory: epochs that Anderson mixing looks back on; 0 without.
    """

    def __init__(self, problem: TrainingProblem, corrections: int, memory: int) -> None:
        self._federation = problem
        self._mixer = AndersonMixer(
            problem.train, memory, corrections, problem.weighting.train
        )
        self._stepped = initial_state(
            problem.base_score, problem.train.joined_rows, rho=1.0
        )
        local_scores = dict(problem.initial_scores)
        scores = operators.gather(problem, local_scores)
        self._reached = self._point = Point(scores, self._stepped.duals, local_scores)

    def targets(
        self, rho: float, kappa: float, over_relaxation: float
    ) -> dict[str, FloatArray]:
        """Take the z- and dual update; return every table's target (n_i, d_c)."""
        self._stepped, message = admm_step(
            AdmmState(self._stepped.z, self._point.duals, rho),
            self._point.scores,
            self._federation.train_labels,
            self._federation.loss,
            over_relaxation,
        )
        return operators.scatter_targets(
            self._federation, self._point.local_scores, message, kappa
        )

    def take(self, local_scores: LocalScores) -> Residuals:
        """Take the sites' new scores (n_i, d_c); return the residuals of the epoch."""
        before = self._reached.scores
        scores = operators.gather(self._federation, local_scores)
        self._reached = Point(scores, self._stepped.duals, local_scores)
        return residuals(
            self._stepped,
            scores,
            before,
            self._federation.base_score,
            self._federation.weighting.train_rows,
        )

    def train_metrics(self) -> dict[str, float]:
        """Return the metrics of the scores that were taken last."""
        return operators.train_metrics(self._federation, self._reached.scores)

    def test_metrics(self) -> dict[str, float]:
        """Return those on the held-out rows; nothing without any."""
        return operators.test_metrics(self._federation, self._reached.local_scores)

    def mix(self, rho: float) -> None:
        """Move the next epoch's start by Anderson mixing, once scores were taken."""
        self._point = self._mixer.mix(rho, self._point, self._reached)

    def restart_mixing(self) -> None:
        """Forget the epochs before."""
        self._mixer.restart()

    @property
    def duals(self) -> FloatArray:
        """The duals lambda after their last update, (N, d_c)."""
        return self._stepped.duals

    @property
    def z(self) -> FloatArray:
        """The auxiliary variable z after its last update, (N, d_c)."""
        return self._stepped.z


RHO_SHARE = 0.5
"""Automatic rho: this share of the loss's mean curvature at the base score."""

CONSENSUS_SHARE = 0.1
"""rho_in: this share of the mean diagonal of the sub-problem's Hessian."""

BALANCED_EPOCHS = 30
"""Residual balancing must end for ADMM to converge (Boyd et al. 2011, 3.4.1)."""

OVER_RELAXATION = 1.5
"""Used where Anderson mixing is not: each gains as much, together they do not."""


class AdmmServer:
    """The server's side of ADMM between two exchanges with the sites.

    Args:
        problem: the training problem.
        settings: form, rho, over-relaxation and memory.

    Attributes:
        rho: the penalty in use; it may change from epoch to epoch.
        corrections: c: the number of tables (sharing) or 1 (Jacobi).
    """

    def __init__(self, problem: TrainingProblem, settings: Settings) -> None:
        self.training_problem = problem
        self.corrections = len(problem.tables) if settings.admm_form == "sharing" else 1
        curvature = problem.loss.curvature(problem.base_score)
        self.rho = settings.rho or RHO_SHARE * curvature
        noisy = settings.privacy.covers_features or settings.privacy.covers_predictions
        # what balancing and mixing would look at is noise
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
        self._arrays = AdmmArrays(problem, self.corrections, self.memory)
        self._epoch = 0
        self._recent: list[Residuals] = []

    @property
    def kappa(self) -> float:
        """The weight of the sites' fits, c * rho."""
        return self.corrections * self.rho

    def targets(self) -> dict[str, FloatArray]:
        """Start an epoch: z- and dual update; return every table's target."""
        self._epoch += 1
        return self._arrays.targets(
            self.rho, self.kappa, self.over_relaxation if self._epoch > 1 else 1.0
        )

    def take(self, local_scores: LocalScores, *, is_tested: bool = True) -> EpochResult:
        """End an epoch with the sites' new local scores; return how far it got.

        Args:
            local_scores: (n_i, d_c) by table.
            is_tested: whether those of held-out rows are of this epoch.
        """
        gap = self._arrays.take(local_scores)
        result = EpochResult(
            epoch=self._epoch,
            train=self._arrays.train_metrics(),
            test=self._arrays.test_metrics() if is_tested else {},
            primal_residual=gap.primal,
            dual_residual=gap.dual,
        )
        self._arrays.mix(self.rho)
        self._recent.append(gap)
        if self._balances and self._epoch <= BALANCED_EPOCHS:
            self._set_rho(balanced_rho(self.rho, self._recent))
        return result

    @property
    def duals(self) -> FloatArray:
        """The duals lambda after their last update, (N, d_c)."""
        return self._arrays.duals

    @property
    def z(self) -> FloatArray:
        """The auxiliary variable z after its last update, (N, d_c)."""
        return self._arrays.z

    def forget_steps(self) -> None:
        """Choose rho and mix by the epochs from here on only."""
        self._recent.clear()
        self._arrays.restart_mixing()

    def _set_rho(self, rho: float) -> None:
        if rho != self.rho:
            self.rho = rho
            self.forget_steps()


class AdmmStrategy(JoinStrategy):
    """Base of the methods that alternate between the server and the sites' fits.

    Args:
        query: the training set.
        settings: of the run; keyword arguments override single ones.
    """

    def plan(self) -> Plan:
        """Let sharded linear tables send statistics, others seek consensus."""
        return Plan(choose_update_for(self.settings), _no_arrays, self._course)

    def _course(self) -> Mapping[str, Any]:
        return {"exchanges": self.settings.inner_rounds}

    def epochs(self, problem: TrainingProblem) -> Generator[Request, Replies, None]:
        """Run the epochs, until the residuals are below the tolerance if one is set."""
        server = AdmmServer(problem, self.settings)
        is_private = self.settings.privacy.features == NOISY_STATISTICS
        rows = problem.train.joined_rows
        solvers = {
            table.name: lou.GramSolver(table, rows, is_private=is_private)
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
            exchange = self._exchange(problem, server, solvers)
            self.local_scores = yield from exchange
            if self.talk.stale:
                # steps in which some tables stood still say nothing of the others
                server.forget_steps()
            result = server.take(self.local_scores, is_tested=self._tests_epoch)
            self.finish_epoch(result)
            if result.is_within(self.settings.tolerance):
                return

    @property
    def _tests_epoch(self) -> bool:
        """Whether held-out rows are scored in the epoch in progress."""
        return tests_every_epoch(self.settings) or self.epoch == self.settings.epochs

    def _gather(self, table: Table, replies: Replies) -> FloatArray:
        """Return a table's scores (n_i, d_c); of held-out rows those it had before."""
        if self._tests_epoch:
            return lou.gather_scores(table, replies)
        return lou.gather_trained(table, replies, self.local_scores[table.name])

    def _exchange(
        self,
        problem: TrainingProblem,
        server: AdmmServer,
        solvers: Mapping[str, lou.GramSolver],
    ) -> Generator[Request, Replies, LocalScores]:
        """Send the targets; return the local scores of the updated models."""
        order = self._order(problem, server)
        targets: dict[int, AdmmTarget] = {}
        for name, target in server.targets().items():
            blocks = lou.scatter_rows(problem.tables[name], target)
            targets |= {number: AdmmTarget(block) for number, block in blocks.items()}
        request = msgspec.structs.replace(order, parts=targets)
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
                moments = lou.sum_over_shards(table, replies, "moments")
                theta = solver.solve(moments, server.kappa, problem.l2)
                solved |= lou.scatter_parameters(table, theta)
            scores |= yield from self._agree(problem, replies, order, solved)
        return {name: scores[name] for name in problem.tables}

    def _order(self, problem: TrainingProblem, server: AdmmServer) -> AdmmRequest:
        """Return the request of an epoch, without its targets."""
        seeking = any(t.update is Update.CONSENSUS for t in problem.sharded)
        fit = LocalFit(
            kappa=server.kappa,
            rho_in={
                table.name: _inner_penalty(table, server.kappa)
                for table in problem.sharded
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
        order: AdmmRequest,
        solved: Mapping[int, CommonParameters],
    ) -> Generator[Request, Replies, LocalScores]:
        """Bring the shards of each table to common parameters; return their scores.

        Consensus takes ``inner_rounds`` rounds; solved parameters wait for the last
        one.
        """
        for more_rounds in range(order.more_rounds, -1, -1):
            common = {} if more_rounds else dict(solved)
            for table in problem.sharded:
                if table.update is Update.CONSENSUS:
                    rho_in = order.fit.rho_in[table.name]
                    parameters = lou.consensus_parameters(
                        table, replies, rho_in, problem.l2
                    )
                    common |= lou.scatter_parameters(table, parameters)
            request = ConsensusRequest(
                fit=order.fit,
                more_rounds=more_rounds,
                evaluate=order.evaluate,
                parts=common,
            )
            parts = [part for part in problem.parts if part.number in common]
            replies = yield self.request(ask(request, parts))
        return {table.name: self._gather(table, replies) for table in problem.sharded}


class TablePuppetADMM(AdmmStrategy):
    """Train over the result of a query by ADMM.

    Args:
        query: the training set.
        settings: of the run; keyword arguments override single ones.

    >>> query = Query.from_sql("SELECT ...")  # doctest: +SKIP
    >>> grid = InProcessGrid(app, sites=[{"t": frame}])  # doctest: +SKIP
    >>> TablePuppetADMM(query, l2=0.0).start(grid)  # doctest: +SKIP
    """

    name = "admm"


def choose_update_for(settings: Settings) -> UpdateChooser:
    """Return what chooses how the shards of a table train together.

    Raises:
        SettingsError: statistics of shards leave without noise where DP-SGD is to
            cover the models; parameters do where noisy statistics are.
    """
    wanted = {DP_SGD: "consensus", NOISY_STATISTICS: "gram"}.get(
        settings.privacy.features
    )
    if wanted and settings.lou not in ("auto", wanted):
        raise SettingsError(
            f"lou is {settings.lou!r}, but privacy.features = "
            f"{settings.privacy.features!r} needs {wanted!r} or 'auto'"
        )
    return partial(choose_update, wanted or settings.lou)


def choose_update(lou: str, table: str, shards: int, is_linear: bool) -> Update:
    """Return how the shards of a table train together.

    Raises:
        SettingsError: if ``lou`` is ``"gram"``, which only linear models can.
    """
    if shards == 1:
        return Update.LOCAL
    if lou == "gram" and not is_linear:
        raise SettingsError(
            f"lou is 'gram', but the model of table {table!r} is not linear; "
            "allowed for it: 'consensus' and 'auto'"
        )
    is_gram = is_linear and lou != "consensus"
    return Update.GRAM if is_gram else Update.CONSENSUS


def _inner_penalty(table: Table, kappa: float) -> float:
    # shards without trained rows have no curvature; without any, all penalties do
    own = [curvature for curvature in table.mean_curvature if curvature] or [1.0]
    return CONSENSUS_SHARE * kappa * mean(own)


def _no_arrays(*_: object) -> PartArrays:
    return {}
