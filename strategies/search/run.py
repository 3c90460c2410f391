"""Search: a strategy that trains candidates on folds of one run's joined rows.

The rows are extracted and joined once, and the encoders are fitted once for each fold.
Every fit, of a candidate on a fold, is a training as any other: by the method of its
settings, from ``prepare`` on. The message ``next`` begins it at the sites, which count
the fits. The candidate of the lowest mean loss on the rows held out then trains the
model of the run, on the rows of all folds.
"""

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace

from strategies.registry import STRATEGIES
from strategies.run.exchange import Replies, Requests, ask
from strategies.run.strategy import RoundStrategy
from strategies.search.section import CandidateFit, SearchRecord
from strategies.setup.encoding import TableEncoding, fit_encoders
from strategies.setup.joined_rows import MappedRows
from strategies.training.join_method import JoinMethod
from strategies.training.strategy import TrainingStrategy
from tp_flower.errors import DivergedError
from tp_flower.features.choice import TableChoice
from tp_flower.protocol.training_messages import NextRequest
from tp_flower.query import Query
from tp_flower.reports.records import RunReport
from tp_flower.settings import Settings
from tp_flower.settings.search import candidates_of, fits_of, with_candidate

Announce = Callable[[str], None]


@dataclass
class _FoldEncoding:
    """The encoders of the last fit, and what they were fitted to."""

    fold: int | None = None
    choices: Mapping[str, TableChoice] = field(default_factory=dict)
    encoders: dict[str, TableEncoding] = field(default_factory=dict)

    def fits(self, fold: int | None, choices: Mapping[str, TableChoice]) -> bool:
        """Return whether rows of a fold are encoded as in the last fit."""
        return bool(self.encoders) and (self.fold, self.choices) == (fold, choices)


class Search(RoundStrategy):
    """Train the candidates of the settings on folds, and the best on all rows.

    Attributes:
        trainer: of the fit in progress; at the end that of the model.
        results: of the fits so far, in their order.
    """

    name = "search"

    def __init__(
        self,
        query: Query,
        settings: Settings | None = None,
        announce: Announce | None = None,
        **overrides: object,
    ) -> None:
        super().__init__(query, settings, None, **overrides)
        # sites are told the strategy that trains, and derive candidates from it
        name = self.settings.method_name
        settings = self.settings = self.settings.with_fields(strategy=name)
        self._announce = announce
        self.candidates = candidates_of(settings)
        self._trainers = [
            with_candidate(settings, candidate) for candidate in self.candidates
        ]
        self._written = query
        self.trainer: TrainingStrategy = self._trainer_of(settings)
        self.results: list[CandidateFit] = []
        self._encoding = _FoldEncoding()

    def _trainer_of(self, settings: Settings) -> TrainingStrategy:
        """Return the strategy of a fit, which takes part in this run."""
        trainer = STRATEGIES[settings.method_name](self._written, settings)
        trainer.fits = len(fits_of(self.settings))
        self.lend_run(trainer)
        return trainer

    @property
    def _method(self) -> JoinMethod:
        method = self.trainer.method
        if not isinstance(method, JoinMethod):
            raise TypeError(f"strategy {method.name!r} does not train over joins")
        return method

    def default_settings(self) -> Settings:
        """Return the defaults: those of no search."""
        return Settings()

    def rounds(self) -> Generator[Requests, Replies, None]:
        """Set up, train every candidate on every fold, and the best on all rows."""
        self.results = []
        self._encoding = _FoldEncoding()
        self.trainer = self._trainer_of(self.settings)
        rows = yield from self._method.map_rows(self.inventory)
        self.epoch = 1
        for number, fit in enumerate(fits_of(self.settings), 1):
            if fit.fold is None or fit.candidate is None:
                break
            yield from self._try(rows, number, fit.fold, fit.candidate)
        result = SearchRecord(self.candidates, self.results)
        if not math.isfinite(result.lowest):
            raise DivergedError(
                "no candidate has a finite mean loss on the folds: lower learning-rate "
                "or raise l2 in the candidates"
            )
        last = yield from self._fit(rows, len(self.results) + 1, None, result.best)
        self.epoch = 0
        self.trainer.end((yield last))

    def _try(
        self, rows: MappedRows, number: int, fold: int, candidate: int
    ) -> Generator[Requests, Replies, None]:
        """Train a candidate on a fold, and record how good it is on the rest."""
        warnings = list(self.warnings)
        failure = ""
        try:
            yield from self._fit(rows, number, fold, candidate)
        except DivergedError as error:
            failure = str(error)
        # what a candidate is warned of is not about the run's model
        self.warnings[:] = warnings
        trainer = self.trainer
        fit = CandidateFit(
            candidate=candidate,
            fold=fold,
            test={} if failure else trainer.final.test,
            train={} if failure else trainer.final.train,
            epochs=len(trainer.losses),
            verdict=failure or trainer.verdict,
        )
        self.results.append(fit)
        if self._announce is not None:
            settings = dict(self.candidates[candidate])
            self._announce(f"fit {number} of {trainer.fits}: {fit.line(settings)}")

    def _fit(
        self, rows: MappedRows, number: int, fold: int | None, candidate: int
    ) -> Generator[Requests, Replies, Requests]:
        """Train a candidate; return the request that would end the run."""
        yield ask(NextRequest(number, candidate), rows.extracted.all_parts)
        trainer = self.trainer = self._trainer_of(self._trainers[candidate])
        trainer.is_trial = fold is not None
        method = self._method
        joined = method.divide(rows, fold)
        if not self._encoding.fits(fold, joined.choices):
            encoders = yield from fit_encoders(
                joined, None if trainer.is_trial else trainer
            )
            self._encoding = _FoldEncoding(fold, joined.choices, encoders)
        set_up = method.begin(joined, self._encoding.encoders)
        return (yield from trainer.train(set_up))

    @property
    def report(self) -> RunReport:
        """The record of the training in progress, at the end that of the model."""
        report = self.trainer.report
        result = SearchRecord(self.candidates, self.results, self.history)
        section = result.section(self.settings.folds, self.settings.split_name)
        return replace(
            report,
            history=result.of_model,
            sections={**report.sections, "search": section},
        )
