"""MLPs on the joined table: one of all columns, or one per table, summed."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from scripts.joined.centralized import JoinedTable
from scripts.joined.optima import FloatArray
from scripts.joined.problem import Matrix, Problem
from tp_flower.settings import Settings

EPOCHS = 6
BATCH_ROWS = 256
LEARNING_RATE = 1e-3
EVALUATION_ROWS = 65536


class AdditiveMlp(nn.Module):
    """The sum of MLPs over columns of their own, plus a constant.

    Args:
        columns: of each MLP.
        outputs: scores per row, d_c.
        hidden: width of the hidden layer.
        scale: the outputs are multiplied by it.
    """

    def __init__(
        self, columns: Sequence[slice], outputs: int, hidden: int, scale: float
    ) -> None:
        super().__init__()
        self.columns, self.scale = columns, scale
        self.parts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(own.stop - own.start, hidden),
                nn.ReLU(),
                nn.Linear(hidden, outputs, bias=False),
            )
            for own in self.columns
        )
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the scores (rows, d_c) of encoded joined rows."""
        parts = zip(self.parts, self.columns, strict=True)
        total = sum(part(features[:, own]) for part, own in parts)
        scores: torch.Tensor = (total + self.bias) * self.scale
        return scores

    def penalty(self) -> torch.Tensor:
        """Return ||theta||^2 / 2 over the weights; biases are free."""
        weights = [p for p in self.parameters() if p.ndim > 1]
        return 0.5 * torch.stack([weight.square().sum() for weight in weights]).sum()


def fit_additive_mlp(
    joined: JoinedTable, settings: Settings, rng: np.random.Generator
) -> list[float]:
    """Train one MLP per table with Adam; return the test loss after each epoch.

    Args:
        joined: the training set.
        settings: ``hidden_sizes`` (the first one) and ``l2``.
        rng: for the weights and the batches.
    """
    problem = Problem.of(joined, settings)
    losses: list[float] = []

    def record(test_scores: Callable[[], FloatArray]) -> bool:
        losses.append(problem.loss.value(test_scores(), problem.test_labels))
        return len(losses) == EPOCHS

    columns = list(joined.columns.values())
    fit_mlp(problem, columns, settings.hidden_sizes[0], rng, record)
    return losses


def fit_mlp(
    problem: Problem,
    columns: Sequence[slice],
    hidden: int,
    rng: np.random.Generator,
    ends: Callable[[Callable[[], FloatArray]], bool],
) -> None:
    """Train the sum of MLPs over these columns with Adam until ``ends`` says so.

    Args:
        problem: the training set; its features are dense.
        columns: of each MLP.
        hidden: width of the hidden layer.
        rng: for the weights and the batches.
        ends: called after each epoch with a function that returns the test scores.
    """
    loss, labels = problem.loss, problem.train_labels
    base = loss.base_score(labels)
    scale = float(labels.std()) if loss.name == "squared" else 1.0
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(int(rng.integers(2**31)))
        model = AdditiveMlp(columns, loss.outputs, hidden, scale)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    rows, target = torch.from_numpy(problem.train), torch.from_numpy(labels)
    offset = torch.from_numpy(base).float()
    done = False
    while not done:
        order = torch.from_numpy(rng.permutation(len(labels)))
        for batch in torch.split(order, BATCH_ROWS):
            scores = model(rows[batch]) + offset
            value = _loss(loss.name, scores, target[batch])
            # in units of the label's variance, so that Adam's steps fit any label
            objective = (value + problem.l2 * model.penalty()) / scale**2
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(objective)
            optimizer.step()
        done = ends(lambda: _scores(model, problem.test) + base)


def _loss(name: str, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if name == "squared":
        return 0.5 * (scores[:, 0] - labels.float()).square().mean()
    if name == "logistic":
        return nn.functional.binary_cross_entropy_with_logits(
            scores[:, 0], labels.float()
        )
    return nn.functional.cross_entropy(scores, labels.long())


def _scores(model: AdditiveMlp, features: Matrix) -> FloatArray:
    with torch.no_grad():
        blocks = torch.split(torch.from_numpy(features), EVALUATION_ROWS)
        scores: FloatArray = torch.cat([model(x) for x in blocks]).double().numpy()
    return scores
