"""Factories of torch modules that runs name as models."""

from torch import nn


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
