"""Two models of the same rows, of which one has more columns: what these are worth.

With D the deviance, twice the negative log likelihood but for a constant, the columns
that the larger model has besides tell nothing more of the label if the fall of D is
chi-squared, by their number; or, where the dispersion phi is estimated, if the fall by
column and phi is F's (McCullagh and Nelder 1989, "Generalized Linear Models", sections
2.3 and 2.5). It is R's ``anova(smaller, larger, test = "LRT")``, or "F".
"""

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tp_flower.errors import ModelError

SAME: Final = 1e-9
"""The relative difference of two sums over the same rows."""
SET_ERRORS: Final = (
    "train it by strategy 'cg' with standard_errors='model', to the optimum"
)


class LikelihoodRatio(NamedTuple):
    """A test of the hypothesis that a model needs none of some columns.

    Attributes:
        statistic: chi-squared, or F where the dispersion is estimated.
        columns: parameters that the larger model has more.
        p: the probability of a statistic as large, if they are not needed.
    """

    statistic: float
    columns: int
    p: float


def likelihood_ratio(
    smaller: Mapping[str, Any], larger: Mapping[str, Any]
) -> LikelihoodRatio:
    """Return the test of two reports.

    Raises:
        ModelError: they are not of the same rows and loss, or not at their optima.
    """
    few, many = inference_of(smaller), inference_of(larger)
    if smaller["settings"]["l2"] or larger["settings"]["l2"]:
        raise ModelError(
            "a model has a penalty, l2, and no likelihood: train both with l2=0"
        )
    for name, values in _what_is_the_same(smaller, larger):
        if not _are_same(*values):
            raise ModelError(
                f"the models differ in {name} ({values[0]} and {values[1]}), and their "
                "likelihoods cannot be compared: train both on the same rows, by the "
                "same loss"
            )
    # importing this package is to be fast
    from tp_flower.methods.moments.inference import tail_of

    columns = many["parameters"] - few["parameters"]
    if columns < 1:
        raise ModelError(
            f"the smaller model has {few['parameters']} parameters, the larger one "
            f"{many['parameters']}: the larger must have all columns of the smaller, "
            "and more"
        )
    rows = larger["joined-rows"]["train"]
    fall = 2.0 * rows * (_loss(smaller) - _loss(larger)) / many["dispersion"]
    freedom = math.inf if many["freedom"] is None else many["freedom"]
    statistic, p = tail_of(max(fall, 0.0), columns, freedom)
    return LikelihoodRatio(statistic, columns, p)


def inference_of(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a report says of its model's parameters.

    Raises:
        ModelError: the model has no standard errors, and why.
    """
    inference: Mapping[str, Any] = report.get("inference") or {}
    if "parameters" not in inference:
        reason = inference.get("note", "")
        raise ModelError(
            f"a model has no standard errors: {reason or SET_ERRORS}".replace(
                "No standard errors: ", ""
            )
        )
    return inference


def _loss(report: Mapping[str, Any]) -> float:
    loss: float = report["final"]["train"]["loss"]
    return loss


def _what_is_the_same(*reports: Mapping[str, Any]) -> list[tuple[str, list[Any]]]:
    """Return what two reports of comparable models have in common.

    The loss of a constant is that of the same labels and weights.
    """
    return [
        ("the loss", [report["chosen"]["loss"] for report in reports]),
        ("training rows", [report["joined-rows"]["train"] for report in reports]),
        (
            "the loss of a constant",
            [report["baseline"]["train"]["loss"] for report in reports],
        ),
    ]


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, float):
        return bool(abs(one - other) <= SAME * abs(one))
    return bool(one == other)
