"""The families of objectives: the only list of them.

A subclass of :class:`Objective` in a file of its own makes a family, with a line here.
"""

from typing import Final

from tp_flower.arrays import FloatArray
from tp_flower.objectives.kmeans import KMeans
from tp_flower.objectives.logistic import Logistic
from tp_flower.objectives.noise import LabelNoise
from tp_flower.objectives.objective import Objective
from tp_flower.objectives.response import Response
from tp_flower.objectives.softmax import Softmax
from tp_flower.objectives.squared import Squared
from tp_flower.objectives.target import Target

FAMILIES: Final[dict[str, type[Objective]]] = {
    Squared.name: Squared,
    Logistic.name: Logistic,
    Softmax.name: Softmax,
    KMeans.name: KMeans,
}
"""By name. "auto" is the first of labels whose classes fit."""


def names_of_losses() -> tuple[str, ...]:
    """Return the names that the setting `loss` takes: those of families with labels.

    >>> names_of_losses()
    ('squared', 'logistic', 'softmax')
    """
    return tuple(name for name, kind in FAMILIES.items() if kind.takes_label)


def takes_numbers(name: str) -> bool:
    """Return whether a family's labels are numbers, not classes."""
    return 0 in FAMILIES[name].class_counts


def fitting_families(classes: int) -> list[str]:
    """Return the families of labels with so many classes, 0 for numbers.

    >>> fitting_families(2), fitting_families(0)
    (['logistic', 'softmax'], ['squared'])
    """
    losses = names_of_losses()
    return [name for name in losses if classes in FAMILIES[name].class_counts]


def family_of(name: str, classes: int) -> type[Objective]:
    """Return the family of a name, for labels with some classes, 0 for numbers.

    Raises:
        ValueError: there is none of that name, or it is for other labels.
    """
    objective = FAMILIES.get(name)
    if objective is None or classes not in objective.class_counts:
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
