"""The server half of a training method, as the rest of the server sees it.

A method is a class of a room in ``strategies/methods`` (:mod:`strategies.registry`). It
trains for a run, :class:`~strategies.training.strategy.TrainingStrategy`, which counts
the epochs, judges and reports them. Where methods differ, the run asks the hooks of
:class:`ServerMethod`; :class:`~strategies.training.join_method.JoinMethod` has more of
them, for the set-up over joins.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from strategies.run.exchange import Replies, Requests
from strategies.score_readings import ScoreReading
from strategies.setup.problem import PreparedRun
from strategies.training.bins import FittedTrees
from strategies.training.outcome import Outcome
from tp_flower.protocol.inference_messages import FinishPart, FinishRequest
from tp_flower.query import BoundQuery, Query
from tp_flower.query.lateral_tables import check_no_cutoffs
from tp_flower.reports.records import RunReport
from tp_flower.settings import Settings

if TYPE_CHECKING:
    from strategies.training.strategy import TrainingStrategy

Problem = TypeVar("Problem", bound=PreparedRun)


class ServerMethod(ABC, Generic[Problem]):
    """The server half of a method, which trains for one run.

    Attributes:
        has_label: whether it trains by a label.
        steadied_by: advice about a training that diverges and has no learning rate.
        last_parts: what the message that ends the run brings parts, by number.
        joint: the trees that the model has beside its tables; None for none.
        copies_lowest: whether sites copy the model of lowest training loss, where no
            rows validate.
    """

    has_label: ClassVar[bool] = True
    steadied_by: ClassVar[str] = "Raise l2"
    copies_lowest: ClassVar[bool] = False
    last_parts: Mapping[int, FinishPart] = MappingProxyType({})
    joint: FittedTrees | None = None

    def __init__(self, run: "TrainingStrategy") -> None:
        self.run = run

    @classmethod
    def parse(cls, sql: str, _: Settings) -> Query:
        """Return the query of a run with these settings."""
        return Query.from_sql(sql, needs_label=cls.has_label)

    @property
    def saves_model(self) -> bool:
        """Whether the run ends with a model that predicts."""
        return True

    @property
    def name(self) -> str:
        """The name that the setting ``strategy`` has."""
        return self.run.name

    @property
    def settings(self) -> Settings:
        """The settings of the run."""
        return self.run.settings

    @abstractmethod
    def set_up(self) -> Generator[Requests, Replies, Problem]:
        """Run the set-up rounds and return the training problem."""

    @abstractmethod
    def epochs(self, problem: Problem) -> Generator[Requests, Replies, None]:
        """Train; call ``run.finish_epoch`` at the end of every epoch."""

    @abstractmethod
    def outcome_of(self, replies: Replies, problem: Problem) -> Outcome:
        """Return the outcome of the run, from the replies to its last message."""

    def bind(self, schemas: Mapping[str, Mapping[str, str]]) -> BoundQuery:
        """Return the query over the sites' columns."""
        bound = self.run.query.bind(schemas, split=self.settings.split.columns)
        if self.settings.is_noisy:
            check_no_cutoffs(bound.fragments)
        return bound

    def baseline(self, _: Problem) -> float:
        """Return the loss of a constant score; infinity if it is not known."""
        return math.inf

    def judge(self, _: Problem) -> str:
        """Return the method's verdict on the training; "" to judge it by its losses."""
        return ""

    def mark_best(self) -> None:
        """Keep what the method needs of the epoch that just ended, the best so far."""

    def collect(self, _: Problem) -> Generator[Requests, Replies, None]:
        """Ask the sites for what the model of the best epoch is refined with."""
        yield from ()

    def refine(self, _: Problem) -> None:
        """Refine the model of the best epoch, once training has ended."""

    def with_last_step(self, request: FinishRequest) -> FinishRequest:
        """Return the request that ends the run, with the last step of the models."""
        return request

    def readings(self, _: Problem) -> Sequence[ScoreReading]:
        """Return the score readings of sites and server; none without a join."""
        return ()

    def complete(self, report: RunReport) -> RunReport:
        """Return the report of a run with the method's additions."""
        return report


AnyMethod = ServerMethod[Any]
