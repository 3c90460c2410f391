"""Families of objectives by name, to be bound to labels in a test."""

import re
from dataclasses import dataclass

import numpy as np

from tp_flower.objectives import (
    FAMILIES,
    LabelNoise,
    Objective,
    Target,
    make_objective,
    names_of_losses,
)


@dataclass(frozen=True)
class Family:
    """A family of labels with so many classes, 0 for numbers, and their noise."""

    name: str
    classes: int = 0
    noise: LabelNoise | None = None

    @property
    def outputs(self) -> int:
        return self.on([]).outputs

    @property
    def plain(self) -> "Family":
        """The family without the correction of noise."""
        return Family(self.name, self.classes)

    def __str__(self) -> str:
        return f"{self.name}-{self.classes}{'-noisy' if self.noise else ''}"

    def on(self, labels, weights=None) -> Objective:
        """Bind the family to labels (N,), or columns (N, k), and weights (N,)."""
        columns = np.asarray(labels, float)
        columns = columns[:, None] if columns.ndim == 1 else columns
        names = tuple(map(str, range(self.classes)))
        target = Target(columns, names, "text" if names else "number", self.noise)
        return make_objective(self.name, target, weights, self.noise)

    def labels(self, rng: np.random.Generator, rows: int) -> np.ndarray:
        """Draw labels (N,), of which each class has some."""
        if self.name in ("poisson", "negative-binomial"):
            return rng.poisson(rng.gamma(2.0, 1.5, rows)).astype(float)
        if self.name in ("gamma", "tweedie"):
            return rng.gamma(2.0, 1.5, rows)
        if not self.classes:
            return rng.normal(0.0, 3.0, rows)
        labels = rng.integers(0, self.classes, rows)
        labels[: self.classes] = np.arange(self.classes)
        return labels.astype(float)


def lightgbm_objective(name: str) -> dict[str, str | float]:
    """LightGBM's options of a loss, softmax of three classes."""
    plain, *parameter = re.split(r"[()]", name)
    named = {"squared": "l2", "logistic": "binary", "softmax": "multiclass"}
    options: dict[str, str | float] = {"objective": named.get(plain, plain)}
    if plain == "softmax":
        options["num_class"] = 3
    elif parameter:
        places = {"tweedie": "tweedie_variance_power", "huber": "alpha"}
        options[places[plain]] = float(parameter[0])
    return options


def family(name: str) -> Family:
    """The family with the fewest classes; of three or more, with three."""
    counts = FAMILIES[name].class_counts
    return Family(name, min(3, counts[-1]))


ALL = [
    Family(name, classes)
    for name in names_of_losses()
    # quantiles have corners, and survival times no separate rows: see their own tests
    if name not in ("quantile", "cox")
    for classes in range(7)
    if classes in FAMILIES[name].class_counts
]
