"""The response: from scores to predictions, as a report and a file of them have them.

Notation:
    h  ``scores``  (N, d_c)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

from tp_flower.arrays import FloatArray
from tp_flower.objectives.comparison import RankedRows, means_by_tenth

IDENTITY: Final = "identity"
EXPONENTIAL: Final = "exponential"
CLASSES: Final = "classes"
HAZARD: Final = "hazard"
NEAREST: Final = "nearest"


@dataclass(frozen=True)
class Response(ABC):
    """The meaning of a model's scores.

    Attributes:
        loss: the name of the objective's family.
        outputs: the number of scores of a row, d_c.
        classes: names of the label's classes, or of a clustering's centres; empty for
            numbers.
        kind: the label's type, which a predicted class has: "number", "boolean" or
            "text".
        link: what makes predictions of the scores, in the words of exported models
            (``tp_flower/export/runner/answers.py``); "" of a family that they lack.
        headline: the metric by which a model is compared with a constant.
        ratio: what the exponential of a coefficient is; "" if it is nothing.
        reads_scores: whether the scores of the training rows add to it; see
            :meth:`Objective.fit_response`.
    """

    loss: str
    outputs: int = 1
    classes: tuple[str, ...] = ()
    kind: str = "number"
    link: str = field(default="", kw_only=True)
    headline: ClassVar[str]
    ratio: ClassVar[str] = ""
    reads_scores: ClassVar[bool] = False

    @abstractmethod
    def predict(self, scores: FloatArray) -> FloatArray:
        """Return the predictions: numbers, or indices of ``classes``; a new (N,)."""

    def comparable(self, scores: FloatArray) -> FloatArray:
        """Return what :meth:`compare` takes of scores, a new (N,): predictions."""
        return self.predict(scores)

    def details(self, scores: FloatArray) -> Mapping[str, FloatArray]:
        """Return by name what predictions come with, (N,) each."""
        del scores
        return {}

    def report_entries(self) -> dict[str, object]:
        """Return the report's entries on what training rows have added to it."""
        return {}

    @property
    def cautions(self) -> tuple[str, ...]:
        """What training rows have shown that makes a model, or its errors, doubtful."""
        return ()

    @abstractmethod
    def compare(
        self, predicted: FloatArray, actual: FloatArray, weights: FloatArray | None
    ) -> dict[str, object]:
        """Return the report's entries on predictions and labels (N,), N > 0.

        Predictions are as :meth:`comparable` returns them.
        """


def identity(scores: FloatArray) -> FloatArray:
    """Return a copy of the scores: the inverse link of a squared loss."""
    return scores.copy()


@dataclass(frozen=True)
class NumberResponse(Response):
    """A number: the inverse link of the only score.

    >>> import numpy as np
    >>> log_link = NumberResponse("poisson", inverse_link=np.exp)
    >>> log_link.predict(np.array([[0.0]])).tolist()
    [1.0]
    """

    headline: ClassVar[str] = "rmse"
    inverse_link: Callable[[FloatArray], FloatArray] = identity

    def predict(self, scores: FloatArray) -> FloatArray:
        """Return the inverse link of the scores."""
        return self.inverse_link(scores[:, 0])

    def compare(
        self, predicted: FloatArray, actual: FloatArray, weights: FloatArray | None
    ) -> dict[str, object]:
        """Return the mean prediction and label by tenth of the rows, as `deciles`."""
        return {"deciles": means_by_tenth(RankedRows.of(predicted, actual, weights))}
