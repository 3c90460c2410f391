"""The families of objectives: the only list of them.

A subclass of :class:`Objective` in a file of its own makes a family, with a line here.
"""

import math
import re
from collections.abc import Sequence
from typing import Final

from tp_flower.arrays import FloatArray
from tp_flower.objectives.kmeans import KMeans
from tp_flower.objectives.log_link import Gamma, NegativeBinomial, Poisson, Tweedie
from tp_flower.objectives.logistic import Logistic
from tp_flower.objectives.noise import LabelNoise
from tp_flower.objectives.objective import Objective
from tp_flower.objectives.response import Response
from tp_flower.objectives.robust import Huber, Quantile
from tp_flower.objectives.softmax import Softmax
from tp_flower.objectives.squared import Squared
from tp_flower.objectives.survival.cox import Cox
from tp_flower.objectives.target import LABEL, Target

FAMILIES: Final[dict[str, type[Objective]]] = {
    Squared.name: Squared,
    Logistic.name: Logistic,
    Softmax.name: Softmax,
    Poisson.name: Poisson,
    Gamma.name: Gamma,
    Tweedie.name: Tweedie,
    NegativeBinomial.name: NegativeBinomial,
    Quantile.name: Quantile,
    Huber.name: Huber,
    Cox.name: Cox,
    KMeans.name: KMeans,
}
"""By name. "auto" is the first of labels whose classes fit."""
_ELSEWHERE: Final = {
    **dict.fromkeys(("gaussian", "normal", "mse", "l2", "regression"), "squared"),
    **dict.fromkeys(("binomial", "binary", "bernoulli", "log_loss"), "logistic"),
    **dict.fromkeys(("multinomial", "multiclass", "cross_entropy"), "softmax"),
    **dict.fromkeys(("nb", "negbin", "negative_binomial"), "negative-binomial"),
    **dict.fromkeys(("pinball", "quantreg"), "quantile"),
    **dict.fromkeys(("mae", "l1", "median", "absolute_error"), "quantile(0.5)"),
}
"""What R, scikit-learn and LightGBM call families that are here."""
_NAME: Final = re.compile(r"(?P<family>[a-z-]+)(\((?P<parameter>[0-9.e+-]{1,25})\))?")


def names_of_losses() -> tuple[str, ...]:
    """Return the names that the setting `loss` takes: those of families with labels.

    >>> names_of_losses()[:3]
    ('squared', 'logistic', 'softmax')
    """
    return tuple(name for name, kind in FAMILIES.items() if kind.takes_label)


def forms_of_losses() -> tuple[str, ...]:
    """Return what the setting `loss` takes, as "name" or "name(parameter)".

    >>> [form for form in forms_of_losses() if "(" in form]
    ['tweedie(1.5)', 'negative-binomial(1)', 'quantile(0.5)', 'huber(1)']
    """
    return tuple(
        FAMILIES[name].of_parameter(FAMILIES[name].parameter).name
        if FAMILIES[name].parameter_range
        else name
        for name in names_of_losses()
    )


def family_named(name: str) -> type[Objective]:
    """Return the family of a name, at the parameter that it may have in parentheses.

    >>> family_named("quantile(0.9)").parameter
    0.9

    Raises:
        ValueError: there is none, or its parameter is another one.
    """
    if name_here := _ELSEWHERE.get(name.lower()):
        raise ValueError(f"{name!r} is {name_here!r} here")
    match = _NAME.fullmatch(name)
    if not (match and match["family"] in FAMILIES):
        raise ValueError(f"{name!r} is not one of {', '.join(forms_of_losses())}")
    family = FAMILIES[match["family"]]
    if match["parameter"] is None:
        return family
    if not family.parameter_range:
        raise ValueError(f"{name!r}: {family.name!r} has no parameter")
    low, high = family.parameter_range
    try:
        value = float(match["parameter"])
    except ValueError:
        value = math.nan
    if not low < value < high:
        bound = f" and below {high:g}" if math.isfinite(high) else ""
        raise ValueError(
            f"{name!r}: the parameter of {family.name!r} is a number above {low:g}"
            f"{bound}"
        )
    return family.of_parameter(value)


def takes_numbers(name: str) -> bool:
    """Return whether a family's labels are numbers, not classes."""
    return 0 in family_named(name).class_counts


def fits(family: type[Objective], classes: int, names: Sequence[str]) -> bool:
    """Return whether labels of so many classes, 0 for numbers, are those of a family.

    The label's columns have ``names``, which begin with those that the family needs.
    """
    needed = family.label_names
    return classes in family.class_counts and needed == tuple(names[: len(needed)])


def fitting_families(classes: int, names: Sequence[str] = (LABEL,)) -> list[str]:
    """Return the families of labels with so many classes, 0 for numbers.

    The label's columns have ``names``.

    >>> fitting_families(2), fitting_families(0)[:2]
    (['logistic', 'softmax'], ['squared', 'poisson'])
    >>> fitting_families(0, ("time", "event", "entry"))
    ['cox']
    """
    return [name for name in names_of_losses() if fits(FAMILIES[name], classes, names)]


def family_of(name: str, classes: int) -> type[Objective]:
    """Return the family of a name, for labels with some classes, 0 for numbers.

    Raises:
        ValueError: there is none of that name, or it is for other labels.
    """
    objective = family_named(name)
    if classes not in objective.class_counts:
        raise ValueError(f"loss {name!r} with {classes} classes")
    return objective


def make_objective(
    name: str,
    target: Target,
    weights: FloatArray | None = None,
    noise: LabelNoise | None = None,
) -> Objective:
    """Return the objective of a family, bound to a target and weights (N,).

    It is corrected for ``noise``.

    >>> target = Target.of([2.0], ("a", "b", "c"))
    >>> make_objective("softmax", target).outputs
    3

    Raises:
        TypeError: the family knows no correction for such noise.
    """
    family = family_of(name, len(target.classes))
    if noise is not None and type(noise) is not family.noise_kind:
        raise TypeError(f"{type(noise).__name__} is not noise for {name!r} labels")
    return family(target, weights, noise)


def response_of(name: str, classes: tuple[str, ...], kind: str) -> Response:
    """Return the meaning of the scores of a family, of labels with some classes.

    Raises:
        ValueError: there is none of that name, or it is for other labels.
    """
    return family_of(name, len(classes)).make_response(classes, kind)
