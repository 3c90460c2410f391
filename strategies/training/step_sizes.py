"""How large the steps of SGD may be: from the curvature, the noise, and the delay."""

import math
from collections.abc import Mapping

from strategies.setup.problem import Federation, Table
from tp_flower.privacy.dp_fit import NOISE_DAMPING
from tp_flower.settings import Settings

TORCH_LEARNING_RATE = 0.05
"""Automatic learning rate where some model is not linear. It is far below what is
stable: on flights, MLPs reach the same loss with it whether scores are stale or not,
and 0.018 more in three epochs with an eighth of it."""

NOISE_MARGIN = 4.0
"""Automatic learning rate: how far it stays below the bound on steps of few rows."""

STALE_MARGIN = 0.5
"""How far steps on stale scores stay below what is stable: oscillations then die away
nearly as fast as without delay (by 0.960 per step instead of 0.949 at momentum 0.9)."""


def decay_of(settings: Settings, epoch: int) -> float:
    """Return what the step size is divided by in an epoch, from 1.

    A batch of all rows has no noise that ever smaller steps would average.
    """
    if settings.method.is_full_batch:
        return 1.0
    return 1.0 + settings.decay * (epoch - 1)


def safe_rate(
    federation: Federation, batch_rows: float, momentum: float, *, is_stale: bool
) -> float:
    """Return 1 / (L / s + 4 T / averaged) for linear models.

    L bounds the curvature of the whole objective: the largest eigenvalue of the joined
    features' Gram matrix is at most the sum of the tables' own, and the loss's
    curvature multiplies it. T does so with its trace, the mean curvature of single
    rows: steps on few of them must be smaller. ``averaged`` is batch size *
    (1 - momentum), the rows of which the momentum makes an average; where rows are
    weighted, the equal ones whose average is as sure. s is 1, or less where scores are
    stale. Other models have a rate of their own.
    """
    tables: list[Table] = list(federation.tables.values())
    if not all(table.is_linear for table in tables):
        return TORCH_LEARNING_RATE
    largest = sum(table.largest_curvature for table in tables)
    trace = sum(
        sum(table.mean_curvature) * (table.features + table.has_intercept)
        for table in tables
    )
    weights = federation.weighting.train
    counted = 1.0 if weights is None else weights.effective_share
    averaged = batch_rows * (1.0 - momentum) * counted
    share = STALE_MARGIN * stale_limit(momentum) if is_stale else 1.0
    bound = largest / share + NOISE_MARGIN * trace / averaged
    return 1.0 / (federation.loss.max_curvature * bound + federation.l2)


def stale_limit(momentum: float) -> float:
    """Return the a below which SGD with scores of one step ago is stable.

    a is learning rate * curvature. On a quadratic, momentum mu and scores that lack
    the last gradient only (``strategies.training.sgd``) make

        (z - 1)(z - mu)(z - a) + a z^2 = 0

    the equation of its modes. All |z| < 1 (Jury) where mu^2 a^2 + (1 - mu^2) a < 1 -
    mu. Without delay it is a < 2 (1 + mu).

    >>> round(stale_limit(0.9), 3), stale_limit(0.0)
    (0.253, 1.0)
    """
    if not momentum:
        return 1.0
    square = momentum**2
    root = math.sqrt((1.0 - square) ** 2 + 4.0 * square * (1.0 - momentum))
    return (root - (1.0 - square)) / (2.0 * square)


def damped_rates(
    federation: Federation, rate: float, rows_per_batch: Mapping[str, float]
) -> dict[str, float]:
    """Return the rates of the tables where their steps must average noise.

    A rate is divided by the noise of a batch's gradient over the largest that its rows
    can make it.

    Args:
        federation: whose tables have noise.
        rate: without it.
        rows_per_batch: distinct rows of a table in a batch, on average.
    """

    def damping(table: Table) -> float:
        in_batch = max(rows_per_batch[table.name], 1.0)
        noise = table.gradient_noise * math.sqrt(len(table.penalised)) / in_batch
        return 1.0 + NOISE_DAMPING * noise

    return {name: rate / damping(table) for name, table in federation.tables.items()}
