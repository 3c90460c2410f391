"""Training on the materialised join, row by row, from the papers.

Deliberately slow, and shares nothing with `tp_flower`. A table's linear model has the
matrix W (d, d_c); the label table's has one more row, the intercept, which no penalty
covers.
"""

import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from scipy.optimize import brentq, minimize
from torch import nn

from tests.support.reference import joins, losses

Rows = Sequence[tuple[int, ...]]
Place = Callable[[str, str], bytes]
"""(column, category) -> what the categories of a column are ordered by."""


def place_by_hash(secret: bytes, table: str) -> Place:
    """The keyed hash that the sites with this secret give a table's categories."""

    def place(column: str, category: str) -> bytes:
        purpose = f"category/{len(table)}/{table}/{column}".encode()
        key = hmac.digest(secret, purpose + b"\x01", "sha256")
        return hmac.digest(key, category.encode(), "sha256")

    return place


def encode(
    frame: pd.DataFrame,
    columns: Sequence[str],
    joined: np.ndarray,
    place: Place,
    weights: np.ndarray | None = None,
) -> np.ndarray:
    """Encode a table with the weighted statistics of its ``joined`` rows, by
    position.
    """
    encoded = []
    # a LEFT JOIN has joined rows without a row of the table, -1
    is_matched = joined >= 0
    joined, weights = (
        joined[is_matched],
        None if weights is None else weights[is_matched],
    )
    for name in columns:
        column = frame[name]
        own = frame[name].iloc[joined]
        if pd.api.types.is_numeric_dtype(column):
            column, own = column.astype(float), own.astype(float)
            has_value = own.notna().to_numpy()
            present = own[has_value].to_numpy()
            of_rows = None if weights is None else weights[has_value]
            mean = np.average(present, weights=of_rows)
            scale = np.average((present - mean) ** 2, weights=of_rows) ** 0.5
            if scale > 0:
                encoded.append(((column - mean) / scale).fillna(0.0).to_numpy())
            continue
        texts = sorted(own.dropna().unique(), key=lambda text: place(name, text))
        hot = [(column == text).to_numpy(float) for text in texts]
        if own.isna().any():
            hot.append(column.isna().to_numpy(float))
        encoded += hot if len(hot) > 1 else []
    return np.column_stack(encoded)


@dataclass(frozen=True)
class Centralised:
    """The training problem on the materialised join.

    Attributes:
        loss: its name.
        inputs: per table the encoded row behind each joined row, (N, d [+ 1]).
        labels: (N,).
        base: b, (d_c,).
        l2: beta.
        penalised: per table, (d [+ 1],) bool.
        weights: (N,), with mean 1; None: all alike.
    """

    loss: str
    inputs: Mapping[str, np.ndarray]
    labels: np.ndarray
    base: np.ndarray
    l2: float
    penalised: Mapping[str, np.ndarray]
    weights: np.ndarray | None = None

    @property
    def outputs(self) -> int:
        return len(self.base)

    def split(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Cut all parameters into one matrix per table."""
        matrices = {}
        start = 0
        for table, rows in self.inputs.items():
            size = rows.shape[1] * self.outputs
            matrices[table] = flat[start : start + size].reshape(-1, self.outputs)
            start += size
        return matrices

    def scores(self, flat: np.ndarray, rows: Sequence[int]) -> np.ndarray:
        """h of some joined rows, one at a time."""
        matrices = self.split(flat)
        found = []
        for row in rows:
            score = self.base.copy()
            for table, inputs in self.inputs.items():
                score = score + inputs[row] @ matrices[table]
            found.append(score)
        return np.array(found)

    def objective(self, flat: np.ndarray) -> float:
        """Eq. 2."""
        scores = self.scores(flat, range(len(self.labels)))
        value = losses.mean_value(self.loss, scores, self.labels, self.weights)
        for table, matrix in self.split(flat).items():
            value += self.l2 / 2 * float((matrix[self.penalised[table]] ** 2).sum())
        return value

    def gradient(
        self, flat: np.ndarray, rows: Sequence[int] | None = None
    ) -> np.ndarray:
        """Gradient of Eq. 2 with the mean over some joined rows, one at a time."""
        rows = range(len(self.labels)) if rows is None else rows
        derivatives = losses.gradients(
            self.loss, self.scores(flat, rows), self.labels[list(rows)]
        )
        if self.weights is not None:
            derivatives = self.weights[list(rows), None] * derivatives
        parts = []
        for table, matrix in self.split(flat).items():
            own = np.zeros_like(matrix)
            for row, derivative in zip(rows, derivatives, strict=True):
                own += np.outer(self.inputs[table][row], derivative) / len(rows)
            own[self.penalised[table]] += self.l2 * matrix[self.penalised[table]]
            parts.append(own.ravel())
        return np.concatenate(parts)

    def optimum(self) -> np.ndarray:
        """A minimiser of Eq. 2 by a general method."""
        found = minimize(
            self.objective,
            np.zeros(
                sum(rows.shape[1] for rows in self.inputs.values()) * self.outputs
            ),
            jac=self.gradient,
            method="L-BFGS-B",
            options={"maxiter": 500, "gtol": 1e-9, "ftol": 1e-15},
        )
        return found.x


def centralised(
    frames: Mapping[str, pd.DataFrame],
    aliases: Mapping[str, str],
    columns: Mapping[str, Sequence[str]],
    positions: Rows,
    label: tuple[str, np.ndarray],
    loss: str,
    l2: float,
    secret: bytes,
    weights: np.ndarray | None = None,
) -> Centralised:
    """Materialise the join, and encode it.

    Args:
        frames: table by name.
        aliases: table name by alias, in the order of the query.
        columns: features by alias.
        positions: of the joined training rows, in the order of the aliases.
        label: alias of the label table, and the label of its rows.
        loss: its name.
        l2: beta.
        secret: of the sites, which orders categories.
        weights: of the joined training rows, in any unit; None: all alike.
    """
    label_alias, values = label
    inputs = {}
    penalised = {}
    for number, (alias, name) in enumerate(aliases.items()):
        frame = frames[name]
        row_of = [position[number] for position in positions]
        place = place_by_hash(secret, alias)
        encoded = encode(frame, columns[alias], np.array(row_of), place, weights)
        penalised[alias] = np.ones(encoded.shape[1] + (alias == label_alias), bool)
        if alias == label_alias:
            encoded = np.hstack([encoded, np.ones((len(frame), 1))])
            penalised[alias][-1] = False
        # sites keep features in 32 bits
        inputs[alias] = np.array(joins.expand(row_of, encoded), np.float32).astype(
            np.float64
        )
    number = list(aliases).index(label_alias)
    labels = np.array([values[position[number]] for position in positions])
    own = None if weights is None else weights / np.mean(weights)
    base = base_score(loss, labels, own)
    return Centralised(loss, inputs, labels, base, l2, penalised, own)


def base_score(
    loss: str, labels: np.ndarray, weights: np.ndarray | None = None
) -> np.ndarray:
    """Mean label, log-odds or log class frequencies."""
    if loss == "squared":
        return np.array([np.average(labels, weights=weights)])
    assert loss in ("logistic", "softmax"), f"write down the best score of {loss!r}"
    shares = np.bincount(labels.astype(int), weights) / len(labels)
    if loss == "logistic":
        return np.array([np.log(shares[1] / shares[0])])
    return np.log(shares)


@dataclass(frozen=True)
class SgdSettings:
    """How mini-batch SGD steps; an epoch's rate is ``rate / (1 + decay * e)``."""

    rate: float
    momentum: float = 0.9
    decay: float = 1.0


def sgd(
    problem: Centralised, epochs: Sequence[Sequence[Sequence[int]]], how: SgdSettings
) -> list[np.ndarray]:
    """Linear models by mini-batch SGD on joined rows; epochs hold batches of rows.

    Returns:
        All parameters at the start and after every step.
    """
    data = replace(problem, l2=0.0)
    theta = np.zeros(sum(m.shape[1] for m in problem.inputs.values()) * problem.outputs)
    penalty = np.concatenate(
        [
            np.repeat(problem.penalised[table], problem.outputs)
            for table in problem.split(theta)
        ]
    )
    velocity = theta
    steps = [theta]
    for epoch, batches in enumerate(epochs):
        rate = how.rate / (1 + how.decay * epoch)
        for batch in batches:
            decay = problem.l2 * penalty * theta
            velocity = how.momentum * velocity + decay + data.gradient(theta, batch)
            theta = theta - rate * velocity
            steps.append(theta)
    return steps


@dataclass(frozen=True)
class Mlp:
    """How the tables' networks look: one hidden layer of ReLU each."""

    hidden: int
    scale: float
    label_table: str


def mlp_sgd(
    problem: Centralised,
    start: Mapping[str, np.ndarray],
    network: Mlp,
    epochs: Sequence[Sequence[Sequence[int]]],
    how: SgdSettings,
) -> dict[str, np.ndarray]:
    """One additive MLP on the joined rows, in float64, by torch's own autograd."""
    modules = nn.ModuleDict()
    for table, inputs in problem.inputs.items():
        has_bias = table == network.label_table
        # the column of ones is the bias's
        modules[table] = nn.Sequential(
            nn.Linear(inputs.shape[1] - has_bias, network.hidden),
            nn.ReLU(),
            nn.Linear(network.hidden, problem.outputs, bias=has_bias),
        ).double()
        vector = torch.tensor(start[table], dtype=torch.float64)
        nn.utils.vector_to_parameters(vector, modules[table].parameters())
    optimizer = torch.optim.SGD(modules.parameters(), how.rate, how.momentum)
    for epoch, batches in enumerate(epochs):
        optimizer.param_groups[0]["lr"] = how.rate / (1 + how.decay * epoch)
        for batch in batches:
            optimizer.zero_grad()
            _mlp_objective(problem, modules, network, batch).backward()
            optimizer.step()
    return {
        table: nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
        for table, module in modules.items()
    }


def _mlp_objective(problem, modules, network, batch) -> torch.Tensor:
    total = torch.tensor(problem.base).repeat(len(batch), 1)
    penalty = torch.zeros((), dtype=torch.float64)
    for table, module in modules.items():
        width = module[0].in_features
        rows = torch.tensor(problem.inputs[table][list(batch)][:, :width])
        total = total + network.scale * module(rows)
        for theta in module.parameters():
            if theta.ndim > 1:
                penalty = penalty + problem.l2 / 2 * theta.square().sum()
    labels = torch.tensor(problem.labels[list(batch)])
    if problem.loss == "squared":
        loss = 0.5 * (total[:, 0] - labels).square().mean()
    elif problem.loss == "logistic":
        loss = nn.functional.binary_cross_entropy_with_logits(total[:, 0], labels)
    else:
        assert problem.loss == "softmax", f"write {problem.loss!r} in torch"
        loss = nn.functional.cross_entropy(total, labels.long())
    return loss + penalty


def conjugate_gradients(
    problem: Centralised, epochs: int, curvature: float
) -> list[np.ndarray]:
    """Parameters before and after each epoch; blocks of the Hessian are inverted."""
    count = len(problem.labels)
    weights = problem.weights
    weights = np.ones(count) if weights is None else weights
    inverses = {
        table: np.linalg.inv(
            curvature * rows.T @ (weights[:, None] * rows) / count
            + len(problem.inputs)
            * problem.l2
            * np.diag(problem.penalised[table].astype(float))
        )
        for table, rows in problem.inputs.items()
    }
    size = sum(rows.shape[1] for rows in problem.inputs.values())
    theta = direction = before = last = np.zeros(size * problem.outputs)
    reached = [theta]
    for epoch in range(epochs):
        gradient = problem.gradient(theta)
        blocks = problem.split(gradient).items()
        step = -np.concatenate([(inverses[t] @ own).ravel() for t, own in blocks])
        share = (gradient - before) @ step / (before @ last) if epoch else 0.0
        direction = step + max(0.0, share) * direction
        before = gradient
        last = step
        theta = theta + length_of(problem, theta, direction) * direction
        reached.append(theta)
    return reached


def length_of(problem: Centralised, theta: np.ndarray, direction: np.ndarray) -> float:
    """Where the objective is least along a direction."""

    def slope(length: float) -> float:
        return problem.gradient(theta + length * direction) @ direction

    # at the minimum, where all is rounding, the objective may fall for ever
    if slope(0.0) >= 0.0 or slope(64.0) <= 0.0:
        return 0.0
    # a slope that rounding makes of steps takes up to the square of a bisection's 56
    # iterations
    return brentq(slope, 0.0, 64.0, xtol=1e-15, rtol=1e-14, maxiter=56**2)
