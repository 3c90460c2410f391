"""Small networks: factories of torch modules that runs name as models, and models."""

from typing import Any

from torch import nn

from tp_flower.learning.models.local_model import LocalModel, ModelSpec, build_model


def torch_model(
    columns: int, outputs: int = 1, kind: str = "mlp", **spec: Any
) -> LocalModel:
    """A model with an intercept and, if it is an MLP, five hidden units by default."""
    spec = {"intercept": True, "hidden_sizes": (5,), **spec}
    return build_model(ModelSpec(kind, outputs, **spec), columns, "cpu")


def network(features: int, outputs: int, intercept: bool) -> nn.Module:
    """A small network."""
    return nn.Sequential(
        nn.Linear(features, 3), nn.Tanh(), nn.Linear(3, outputs, bias=intercept)
    )


def wide_network(features: int, outputs: int, intercept: bool) -> nn.Module:
    """A network of a gigabyte."""
    wide = nn.Linear(16_000, 16_000)
    return nn.Sequential(
        nn.Linear(features, 16_000), wide, nn.Linear(16_000, outputs, intercept)
    )
