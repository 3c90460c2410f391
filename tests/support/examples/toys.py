"""Small noiseless and nearly noiseless training problems, and Ridge's optimum of each.

A toy is a star or a chain of 2 to 4 tables of 5 to 300 rows with a linear label. Among
them are collinear features, a feature equal to the label, timestamps, and labels of
huge and tiny scales.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.linear_model import Ridge

from client_apps.data.saved_models import SavedModel
from tests.support.reference.joins import engine_of

ALIASES = "abcd"
DAY = pd.Timedelta("1D")


@dataclass(frozen=True)
class Toy:
    """Tables by alias, the query, and settings of the run."""

    frames: dict[str, pd.DataFrame]
    sql: str
    features: dict[str, list[str]]
    l2: float
    traits: tuple[str, ...] = field(default=())

    def joined(self) -> pd.DataFrame:
        """The query's result, by DuckDB; times in seconds."""
        with engine_of(self.frames) as engine:
            frame = engine.sql(self.sql).df()
        for name, values in frame.items():
            if values.dtype.kind == "M":
                frame[name] = (values - values.min()) / pd.Timedelta("1s")
        return frame.astype(float)


def _column(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Values of a feature: a count, a deviate, a price, or one with a far outlier."""
    kind = rng.integers(4)
    if kind == 0:
        return rng.permutation(rows).astype(float)
    if kind == 1:
        return rng.normal(size=rows)
    if kind == 2:
        return rng.gamma(2.0, 50.0, rows).round(2)
    values = rng.normal(1e3, 0.5, rows)
    values[rng.integers(rows)] += 50.0
    return values


def toy(seed: int) -> Toy:
    """Return a random toy."""
    rng = np.random.default_rng(seed)
    names = ALIASES[: int(rng.integers(2, 5))]
    frames, joins = _keyed(rng, names)
    features, is_collinear = _add_features(rng, frames)
    traits = ["collinear"] * is_collinear
    label, scale = _label(rng, frames, joins, features, traits)
    if rng.random() < 0.3:
        traits.append("offset")
        label = label + 1e4 * scale
    frames["a"]["y"] = label
    if rng.random() < 0.15:
        traits.append("leak")
        frames["a"]["x0"] = label
    if rng.random() < 0.3:
        traits.append("time")
        days = np.round(frames["a"]["x0"].rank() + rng.integers(0, 3, len(label)))
        frames["a"]["x0"] = pd.Timestamp("2020-01-01") + days * DAY
    columns = ", ".join(f"{n}.{c}" for n in names for c in features[n])
    l2 = float(rng.choice([1e-4, 1e-4, 1e-4, 1e-2, 1e-8, 0.0]))
    traits.append(f"l2 {l2:g}")
    return Toy(
        frames,
        f"SELECT a.y AS label, {columns} FROM a {joins}",
        features,
        l2,
        tuple(traits),
    )


def _keyed(rng: np.random.Generator, names: str) -> tuple[dict[str, pd.DataFrame], str]:
    """Return tables of keys, a star around the label's table or a chain, and their
    joins.
    """
    sizes = [
        int(rng.integers(5, 301)),
        *(int(n) for n in rng.integers(5, 41, len(names) - 1)),
    ]
    frames = {
        name: pd.DataFrame({"id": np.arange(rows)})
        for name, rows in zip(names, sizes, strict=True)
    }
    joins = []
    for place, name in enumerate(names[1:], 1):
        parent = names[int(rng.integers(place))]
        frames[parent][f"{name}_id"] = rng.integers(
            sizes[place], size=len(frames[parent])
        )
        joins.append(f"JOIN {name} ON {parent}.{name}_id = {name}.id")
    return frames, " ".join(joins)


def _add_features(
    rng: np.random.Generator, frames: dict[str, pd.DataFrame]
) -> tuple[dict[str, list[str]], bool]:
    """Add columns to every table; return their names, and whether some are
    collinear.
    """
    features = {}
    is_collinear = False
    for name, frame in frames.items():
        features[name] = [f"x{n}" for n in range(rng.integers(1, 4))]
        for column in features[name]:
            frame[column] = _column(rng, len(frame))
        if len(features[name]) > 1 and rng.random() < 0.3:
            is_collinear = True
            nearly = rng.choice([0.0, 1e-6, 1e-2]) * rng.normal(size=len(frame))
            frame["x1"] = 3.0 - 2.0 * frame["x0"] + nearly
    return features, is_collinear


def _label(rng, frames, joins, features, traits) -> tuple[np.ndarray, float]:
    """Return the label of each row, nearly linear in the standardised features; its
    scale.
    """
    columns = ", ".join(f"{n}.{c} AS {n}_{c}" for n in features for c in features[n])
    with engine_of(frames) as engine:
        wide = engine.sql(f"SELECT {columns} FROM a {joins} ORDER BY a.id").df()
    scaled = (wide - wide.mean()) / wide.std(ddof=0).replace(0.0, 1.0)
    label = scaled.to_numpy() @ rng.normal(size=scaled.shape[1])
    spread = label.std() or 1.0
    noise = rng.choice([0.0, 0.0, 1e-12, 1e-9, 1e-7, 1e-5, 1e-3, 1e-1])
    label = label + noise * spread * rng.normal(size=len(label))
    scale = 10.0 ** rng.choice([0, 0, 0, -9, -3, 5, 9])
    traits += [f"noise {noise:g}", f"scale {scale:g}"]
    return label * scale / spread, float(scale)


@dataclass(frozen=True)
class Optimum:
    """Standardised features (N, d), labels and the ridge regression on them."""

    inputs: np.ndarray
    labels: np.ndarray
    l2: float

    @classmethod
    def of(cls, toy: Toy) -> "Optimum":
        frame = toy.joined()
        labels = frame.iloc[:, 0].to_numpy()
        inputs = frame.iloc[:, 1:].to_numpy()
        varies = inputs.max(axis=0) > inputs.min(axis=0)
        inputs = inputs[:, varies]
        return cls((inputs - inputs.mean(axis=0)) / inputs.std(axis=0), labels, toy.l2)

    @property
    def variance(self) -> float:
        return float(self.labels.var())

    def best(self) -> np.ndarray:
        """Return the weights and the intercept, (d + 1,)."""
        ridge = Ridge(alpha=self.l2 * len(self.labels), solver="svd")
        # at a scale and without an offset that cost it no digits
        centre = self.labels.mean()
        scale = self.labels.std() or 1.0
        ridge.fit(self.inputs, (self.labels - centre) / scale)
        return np.append(scale * ridge.coef_, centre + scale * ridge.intercept_)

    def loss(self, weights: np.ndarray) -> float:
        """Return half of the mean squared error."""
        errors = self.inputs @ weights[:-1] + weights[-1] - self.labels
        return float(errors @ errors) / (2.0 * len(errors))

    def objective(self, weights: np.ndarray) -> float:
        """Return the loss with its penalty, of which the intercept has none."""
        return self.loss(weights) + self.l2 / 2.0 * float(weights[:-1] @ weights[:-1])


def saved_weights(toy: Toy, state: Path, base: float) -> np.ndarray:
    """Return the weights of the saved model, whose parts are below ``state``, (d + 1,).

    The shards of a table have equal weights.
    """
    parts = {}
    for folder in state.rglob("part-*"):
        saved = SavedModel.load(folder)
        parts[saved.table] = saved.parameters
    rest = parts["a"][:-1]
    intercept = parts["a"][-1]
    parts["a"] = rest
    return np.append(
        np.concatenate([parts[name] for name in toy.features]), intercept + base
    )
