"""One MLP per table, summed, trained jointly on the joined table."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from scripts.joined.centralized import JoinedTable
from scripts.joined.models import Problem
from tp_flower.settings import Settings

EPOCHS = 6
BATCH_ROWS = 256
LEARNING_RATE = 1e-3


class AdditiveMlp(nn.Module):
    """The sum of MLPs over columns of their own plus a constant, times a scale."""

    def __init__(
        self, columns: Sequence[slice], outputs: int, hidden: int, scale: float
    ) -> None:
        super().__init__()
        self.columns, self.scale = columns, scale
        self.parts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(block.stop - block.start, hidden),
                nn.ReLU(),
                nn.Linear(hidden, outputs, bias=False),
            )
            for block in columns
        )
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the scores (rows, d_c) of encoded joined rows."""
        parts = zip(self.parts, self.columns, strict=True)
        total = sum(part(features[:, block]) for part, block in parts)
        scores: torch.Tensor = (total + self.bias) * self.scale
        return scores

    def penalty(self) -> torch.Tensor:
        """Return ||theta||^2 / 2 over the weights; biases are free."""
        weights = [p for p in self.parameters() if p.ndim > 1]
        return 0.5 * torch.stack([weight.square().sum() for weight in weights]).sum()


def fit_additive_mlp(
    joined: JoinedTable, settings: Settings, rng: np.random.Generator
) -> list[float]:
    """Train with Adam; return the test loss after each epoch.

    ``hidden_sizes`` (the first one) and ``l2`` of the settings are read.
    """
    problem, columns = Problem.of(joined, settings), list(joined.columns.values())
    loss, labels = problem.loss, problem.train_labels
    scale = float(labels.std()) if loss.name == "squared" else 1.0
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(int(rng.integers(2**31)))
        hidden = settings.hidden_sizes[0]
        model = AdditiveMlp(columns, loss.outputs, hidden, scale)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    rows, target = torch.from_numpy(problem.train), torch.from_numpy(labels)
    test, base = torch.from_numpy(problem.test), loss.base_score(labels)
    offset = torch.from_numpy(base).float()
    losses: list[float] = []
    for _ in range(EPOCHS):
        order = torch.from_numpy(rng.permutation(len(labels)))
        for batch in torch.split(order, BATCH_ROWS):
            value = _loss(loss.name, model(rows[batch]) + offset, target[batch])
            # in units of the label's variance, so that Adam's steps fit any label
            objective = (value + problem.l2 * model.penalty()) / scale**2
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(objective)
            optimizer.step()
        with torch.no_grad():
            scores = model(test).double().numpy() + base
        losses.append(loss.value(scores, problem.test_labels))
    return losses


def _loss(name: str, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if name == "squared":
        return 0.5 * (scores[:, 0] - labels.float()).square().mean()
    return nn.functional.binary_cross_entropy_with_logits(scores[:, 0], labels.float())
