"""When to stop a training that goes nowhere."""

import math
from typing import Final

import numpy as np

from strategies.setup.problem import Federation
from tp_flower.errors import DivergedError

WORSE: Final = 100.0
"""Times the loss of the best constant score: no epoch of a training that converges is
so bad."""


def baseline_loss(federation: Federation) -> float:
    """Return the training loss of the base score alone."""
    shape = (len(federation.train_labels), len(federation.base_score))
    return federation.loss.value(
        np.broadcast_to(federation.base_score, shape),
        federation.train_labels,
        federation.weighting.train_rows,
    )


def check_epoch(epoch: int, loss: float, baseline: float) -> None:
    """Stop where an epoch's loss is not finite, or far beyond that of a constant.

    Raises:
        DivergedError: it is.
    """
    # a corrected loss may be 0 or below
    if math.isfinite(loss) and loss <= WORSE * max(abs(baseline), 1.0):
        return
    raise DivergedError(
        f"training diverged in epoch {epoch}: its loss is {loss:.4g}, that of the same "
        f"score for all rows {baseline:.4g}. Lower learning-rate (0 chooses it), set "
        "rho to 0 (chosen), or raise l2"
        + (f"; num-epochs = {epoch - 1} ends before" if epoch > 1 else "")
    )
