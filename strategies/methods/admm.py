"""TablePuppetADMM: learning over joins by sharing ADMM, then over unions.

One epoch costs one round where every table is one shard and two where some table is
sharded: steps of the scores down and statistics or theta^q up, then parameters down and
scores up. Join-only training (the papers' TP-Join-ADMM) is the case of one shard per
table, not another class.
"""

import dataclasses
from collections.abc import Generator, Sequence
from statistics import mean

from msgspec.structs import replace

from strategies.run.exchange import Replies, Requests, ask
from strategies.run.strategy import EpochResult, tests_every_epoch
from strategies.setup.problem import (
    HeldOutMetrics,
    LocalScores,
    TrainedTable,
    TrainingProblem,
)
from strategies.training.join_method import JoinMethod
from strategies.training.strategy import TrainingStrategy
from strategies.training.traffic import (
    ShardSize,
    StepMessages,
    TableSize,
    Traffic,
    steps_epoch,
)
from strategies.training.trend import SETTLED, remaining_fall
from strategies.training.working_memory import solver_bytes
from tp_flower.arrays import FloatArray
from tp_flower.errors import SettingsError
from tp_flower.methods.admm import iterations as admm
from tp_flower.methods.admm.messages import (
    TRAIN_ADMM,
    AdmmRequest,
    AdmmStep,
    AdmmUpdate,
)
from tp_flower.methods.admm.settings import AdmmSettings
from tp_flower.protocol.fields import DP_SGD, NOISY_STATISTICS
from tp_flower.protocol.messages import Action
from tp_flower.protocol.training_messages import (
    CommonParameters,
    ConsensusRequest,
    LocalFit,
    Update,
)
from tp_flower.settings import Settings

RHO_SHARE = 0.5  # of the loss's mean curvature at the base score
CONSENSUS_SHARE = 0.1  # of the mean diagonal of the sub-problem's Hessian
BALANCED_EPOCHS = 30  # balancing must end (Boyd et al. 2011, 3.4.1)
OVER_RELAXATION = 1.5


class AdmmServer:
    """The server's side of ADMM between two exchanges with the sites.

    Attributes:
        rho: the penalty in use; it may change from epoch to epoch.
        corrections: c, the number of tables.
    """

    def __init__(self, problem: TrainingProblem, settings: Settings) -> None:
        self.problem = problem
        self.corrections = len(problem.tables)
        values = settings.of(AdmmSettings)
        self.rho = values.rho or RHO_SHARE * problem.objective.curvature(
            problem.base_score
        )
        # both would follow the noise
        self._balances = not values.rho and not settings.is_noisy
        default = 1.0 if settings.is_noisy else OVER_RELAXATION
        self.over_relaxation = values.over_relaxation or default
        admm.start(problem.rows, problem.base_score)
        problem.gather(problem.initial_scores)
        self._epoch = 0
        self._recent: list[admm.Residuals] = []

    @property
    def kappa(self) -> float:
        """The weight of the sites' fits, c * rho."""
        return self.corrections * self.rho

    def steps(self) -> dict[str, FloatArray]:
        """Start an epoch: z- and dual update; return steps (n_i, d_c) by table."""
        self._epoch += 1
        problem = self.problem
        over_relaxation = self.over_relaxation if self._epoch > 1 else 1.0
        sums = admm.admm_step(
            problem.rows, problem.objective, self.rho, over_relaxation
        )
        return problem.scatter_steps(sums, self.kappa)

    def take(self, local: LocalScores, held_out: HeldOutMetrics) -> EpochResult:
        """End an epoch with the tables' new scores, and metrics of held-out rows."""
        problem = self.problem
        gap, total = admm.advance(
            problem.rows,
            problem.objective,
            self.rho,
            problem.base_score,
            problem.read_scores,
            local,
        )
        result = EpochResult(
            self._epoch,
            problem.train_metrics(total),
            residuals=dataclasses.asdict(gap),
            **held_out._asdict(),
        )
        self._recent.append(gap)
        if self._balances and self._epoch <= BALANCED_EPOCHS:
            rho = admm.balanced_rho(self.rho, self._recent)
            if rho != self.rho:
                self.rho = rho
                # the next rho is chosen by the epochs from here on
                self._recent.clear()
        return result


class Admm(JoinMethod):
    """ADMM at the server, which alternates with the sites' fits."""

    steadied_by = "Raise rho or l2"
    messages = (Action.PREPARE, TRAIN_ADMM)
    messages_of_shards = (Action.CONSENSUS,)
    copies_lowest = True

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
        if is_linear and update != "consensus":
            return Update.GRAM
        return Update.CONSENSUS

    def epoch_traffic(self, tables: Sequence[TableSize], _: int) -> Traffic:
        """Return the traffic of an epoch."""
        messages = StepMessages(AdmmStep, AdmmUpdate, CommonParameters)
        return steps_epoch(tables, messages, is_tested=tests_every_epoch(self.settings))

    def working_bytes(self, table: TableSize, shard: ShardSize) -> float:
        """Return the memory of the solver of a shard."""
        return solver_bytes(table, shard, is_exact=True)

    def epochs(self, problem: TrainingProblem) -> Generator[Requests, Replies, None]:
        """Run epochs until the loss settles or the residuals are within tolerance."""
        server = AdmmServer(problem, self.settings)
        self.run.chosen |= {
            "rho": server.rho,
            "over-relaxation": server.over_relaxation,
            "lou": {t.name: str(t.update) for t in problem.tables.values()},
        }
        for _ in range(self.run.most_epochs):
            scores = yield from self._exchange(problem, server)
            if self._tests_epoch:
                held_out = problem.held_out_metrics(scores)
            else:
                held_out = HeldOutMetrics()
            result = server.take(scores, held_out)
            self.run.finish_epoch(result)
            remaining = remaining_fall(self.run.losses, problem.rounding)
            has_settled = self.run.ends_by_loss and remaining < SETTLED
            if (
                result.is_within(self.settings.tolerance)
                or has_settled
                or self.run.best.is_over
            ):
                return

    @property
    def _tests_epoch(self) -> bool:
        """Whether held-out rows are scored in the epoch in progress."""
        return (
            tests_every_epoch(self.settings) or self.run.epoch == self.run.most_epochs
        )

    def _exchange(
        self, problem: TrainingProblem, server: AdmmServer
    ) -> Generator[Requests, Replies, LocalScores]:
        """Send the steps; return the local scores of the updated models."""
        outline = self._request(problem, server)
        steps: dict[int, AdmmStep] = {}
        for name, step in server.steps().items():
            table = problem.tables[name]
            # shards factorise the table's Gram matrix once, in the first epoch
            gram = table.gram if self.run.epoch == 1 else None
            steps |= {
                number: AdmmStep(
                    block, gram, None if gram is None else table.gram_deviation
                )
                for number, block in table.scatter_rows(step).items()
            }
        replies = yield self.run.request(
            ask(replace(outline, parts=steps), problem.parts)
        )
        scores = {
            name: table.gather_scores(replies, is_tested=self._tests_epoch)
            for name, table in problem.tables.items()
            if table.update is Update.LOCAL
        }
        if problem.sharded:
            scores |= yield from self._agree(problem, replies, outline)
        return {name: scores[name] for name in problem.tables}

    def _request(self, problem: TrainingProblem, server: AdmmServer) -> AdmmRequest:
        """Return the request of an epoch, without its steps."""
        kappa = server.kappa
        return AdmmRequest(
            fit=LocalFit(
                kappa=kappa,
                rho_in={
                    table.name: _inner_penalty(table, kappa)
                    for table in problem.sharded
                },
                epoch=self.run.epoch,
                seed=self.settings.seed,
                local_epochs=self.settings.local_epochs,
                learning_rate=self.settings.learning_rate,
            ),
            evaluate=self._tests_epoch,
            scores_number=self.run.epoch,
            is_best=self.run.is_best,
            parts={},
        )

    def _agree(
        self, problem: TrainingProblem, replies: Replies, outline: AdmmRequest
    ) -> Generator[Requests, Replies, LocalScores]:
        """Bring the shards of each table to common parameters; return their scores."""
        common: dict[int, CommonParameters] = {}
        for table in problem.sharded:
            common |= table.for_all(CommonParameters(sum=table.sum_shares(replies)))
        request = ConsensusRequest(
            fit=outline.fit,
            evaluate=outline.evaluate,
            scores_number=outline.scores_number,
            parts=common,
        )
        parts = [part for part in problem.parts if part.number in common]
        replies = yield self.run.request(ask(request, parts))
        return {
            table.name: table.gather_scores(replies, is_tested=self._tests_epoch)
            for table in problem.sharded
        }


class TablePuppetADMM(TrainingStrategy):
    """Train over the result of a query by ADMM.

    >>> query = Query.from_sql("SELECT ...")  # doctest: +SKIP
    >>> grid = InProcessGrid(app, sites=[{"t": frame}])  # doctest: +SKIP
    >>> TablePuppetADMM(query, l2=0.0).start(grid)  # doctest: +SKIP
    """

    name = "admm"
    method_type = Admm


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
