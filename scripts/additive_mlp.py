"""One MLP per table, summed and trained jointly on the joined table, in one place."""

import numpy as np
import torch
from centralized import JoinedTable
from torch import nn

from tp_flower.experiment import Settings

EPOCHS = 6
BATCH_ROWS = 256
LEARNING_RATE = 1e-3
EVALUATION_ROWS = 65536


class AdditiveMlp(nn.Module):
    """The sum of an MLP per table over its own columns, plus a constant.

    Args:
        joined: gives the columns of each table and the loss.
        hidden: width of the hidden layer.
        scale: the outputs are multiplied by it.
    """

    def __init__(self, joined: JoinedTable, hidden: int, scale: float) -> None:
        super().__init__()
        self.columns, self.scale = list(joined.columns.values()), scale
        outputs = joined.loss.outputs
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
    """Train with Adam; return the test loss after each epoch.

    Args:
        joined: the training set.
        settings: ``hidden_sizes`` (the first one) and ``l2``.
        rng: for the weights and the batches.
    """
    features, labels = joined.part(test=False)
    is_squared = joined.loss.name == "squared"
    base = joined.loss.base_score(labels)
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(int(rng.integers(2**31)))
        scale = float(labels.std()) if is_squared else 1.0
        model = AdditiveMlp(joined, settings.hidden_sizes[0], scale)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    rows, target = torch.from_numpy(features), torch.from_numpy(labels)
    offset = torch.from_numpy(base).float()
    losses = []
    for _ in range(EPOCHS):
        order = torch.from_numpy(rng.permutation(len(labels)))
        for batch in torch.split(order, BATCH_ROWS):
            scores = model(rows[batch]) + offset
            loss = _loss(joined.loss.name, scores, target[batch])
            # in units of the label's variance, so that Adam's steps fit any label
            objective = (loss + settings.l2 * model.penalty()) / scale**2
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(objective)
            optimizer.step()
        losses.append(_test_loss(joined, model, base))
    return losses


def _loss(name: str, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if name == "squared":
        return 0.5 * (scores[:, 0] - labels.float()).square().mean()
    if name == "logistic":
        return nn.functional.binary_cross_entropy_with_logits(
            scores[:, 0], labels.float()
        )
    return nn.functional.cross_entropy(scores, labels.long())


def _test_loss(
    joined: JoinedTable, model: AdditiveMlp, base: np.ndarray[tuple[int], np.dtype]
) -> float:
    features, labels = joined.part(test=True)
    with torch.no_grad():
        scores = [
            model(block)
            for block in torch.split(torch.from_numpy(features), EVALUATION_ROWS)
        ]
    return joined.loss.value(torch.cat(scores).double().numpy() + base, labels)
