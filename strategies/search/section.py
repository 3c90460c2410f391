"""The section of a report about a search: its fits, its candidates and the best.

`search` of `report.json`::

    folds, split       how many, and by which rule
    candidates  [{settings: {key: value}, loss, deviation, metrics: {metric: value},
                epochs}]   means over the folds, and the deviation of the loss among
                them; null where a fit has diverged
    best        position of the candidate of the lowest mean loss
    fits        [{candidate, fold, loss, metrics: {metric: value}, train-loss, epochs,
                rounds, bytes, seconds, verdict}]   in their order; folds from 0
    set-up      {rounds, bytes, seconds}   of what all fits share

Losses and metrics are of the rows of the fold that is held out. Bytes are those of the
tables' arrays, both ways; encoders are fitted in the first fit of a fold.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

from tp_flower.protocol.fields import Document
from tp_flower.protocol.messages import Action
from tp_flower.reports.records import RoundReport, merge_rounds
from tp_flower.settings.search import Candidate

LOSS = "loss"


@dataclass(frozen=True)
class CandidateFit:
    """A candidate that was trained on all folds but one.

    Attributes:
        test: metrics of the rows held out; empty if training has diverged.
        train: those of the rows trained on.
    """

    candidate: int
    fold: int
    test: Mapping[str, float]
    train: Mapping[str, float]
    epochs: int
    verdict: str

    @property
    def loss(self) -> float:
        """The loss of the rows held out; infinity if training has diverged."""
        return self.test.get(LOSS, math.inf)

    def line(self, settings: Mapping[str, object]) -> str:
        """Return a line of progress.

        >>> fit = CandidateFit(0, 1, {"loss": 0.5}, {}, 3, "converged")
        >>> fit.line({"l2": 0.1})
        'fold 2, l2 = 0.1: loss 0.5 after 3 epochs'
        """
        named = ", ".join(f"{key} = {value}" for key, value in settings.items())
        return (
            f"fold {self.fold + 1}, {named or 'the settings'}: loss {self.loss:.5g} "
            f"after {self.epochs} epochs"
        )


@dataclass(frozen=True)
class SearchRecord:
    """The fits of a search, and the records of its rounds."""

    candidates: Sequence[Candidate]
    fits: Sequence[CandidateFit]
    history: Sequence[RoundReport] = field(default_factory=tuple)

    def losses(self, candidate: int) -> list[float]:
        """Return the losses of a candidate, fold by fold."""
        return [fit.loss for fit in self.fits if fit.candidate == candidate]

    def mean_loss(self, candidate: int) -> float:
        """Return the mean loss of a candidate; infinity if a fit has diverged."""
        losses = self.losses(candidate)
        return fmean(losses) if losses else math.inf

    @property
    def best(self) -> int:
        """The candidate of the lowest mean loss, of equals the first."""
        return min(range(len(self.candidates)), key=self.mean_loss)

    @property
    def lowest(self) -> float:
        """Its mean loss."""
        return self.mean_loss(self.best)

    @property
    def _starts(self) -> list[int]:
        """Where the fits begin in the history."""
        phase = Action.NEXT.phase
        return [i for i, item in enumerate(self.history) if item.phase == phase]

    @property
    def of_model(self) -> list[RoundReport]:
        """The rounds of the set-up, and those of the fit in progress: the model's."""
        starts = self._starts
        if not starts:
            return list(self.history)
        return [*self.history[: starts[0]], *self.history[starts[-1] :]]

    def section(self, folds: int, split: str) -> Document:
        """Return the entry of the report."""
        starts = [*self._starts, len(self.history)]
        rounds = [self.history[start:stop] for start, stop in pairwise(starts)]
        fits = [
            {**_fit_entry(fit), **_costs(of_fit)}
            for fit, of_fit in zip(self.fits, rounds, strict=False)
        ]
        return {
            "folds": folds,
            "split": split,
            "candidates": [
                self._candidate_entry(number, dict(candidate))
                for number, candidate in enumerate(self.candidates)
            ],
            "best": self.best if self.fits else None,
            "fits": fits,
            "set-up": _costs(self.history[: starts[0]]),
        }

    def _candidate_entry(self, number: int, settings: Document) -> Document:
        """Return a candidate with its means over the folds."""
        fits = [fit for fit in self.fits if fit.candidate == number]
        losses = self.losses(number)
        is_finite = bool(losses) and all(map(math.isfinite, losses))
        names = set.intersection(*({*fit.test} for fit in fits)) if fits else set()
        return {
            "settings": settings,
            LOSS: fmean(losses) if is_finite else None,
            "deviation": pstdev(losses) if is_finite else None,
            "metrics": {
                name: fmean(fit.test[name] for fit in fits)
                for name in sorted(names - {LOSS})
            },
            "epochs": fmean(fit.epochs for fit in fits) if fits else 0,
        }


def _fit_entry(fit: CandidateFit) -> dict[str, Any]:
    metrics = {name: value for name, value in fit.test.items() if name != LOSS}
    return {
        "candidate": fit.candidate,
        "fold": fit.fold,
        LOSS: fit.loss,
        "metrics": metrics,
        "train-loss": fit.train.get(LOSS, math.inf),
        "epochs": fit.epochs,
        "verdict": fit.verdict,
    }


def _costs(rounds: Sequence[RoundReport]) -> dict[str, Any]:
    """Return the rounds, bytes and seconds of some records."""
    total = merge_rounds(rounds or [RoundReport(0, 0, "", rounds=0)])
    return {
        "rounds": total.rounds,
        "bytes": sum(total.bytes_up.values()) + sum(total.bytes_down.values()),
        "seconds": total.server_seconds + total.client_seconds + total.wait_seconds,
    }
