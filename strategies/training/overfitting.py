"""Overfitting: a worse fit of held-out rows than at an earlier epoch of training."""

from typing import Final

import numpy as np

from strategies.run.strategy import EpochResult
from tp_flower.arrays import FloatArray

# of the loss, relative to it: less is not worth another setting
LEAST_RISE: Final = 5e-3
LEAST_FALL: Final = 1e-2
"""Of the training loss meanwhile, relative to it. Conjugate gradients overshoot: where
held-out rows alone tell, a loss that settles from below is no overfitting, and a higher
l2 ends higher."""
LEAST_ROWS: Final = 30
DEVIATIONS: Final = 1.0
"""Of the mean difference from 0. Of 30 runs on 15 data sets
(docs/reference/strategies.md) these rules warn of 12, of which 11 end lower with the
tenfold l2, and 11 with validation rows; two deviations would miss wide categories like
those of formula 1."""

LEAST_L2: Final = 1e-3  # that a warning names where there is none


def overfitting(
    earlier: EpochResult,
    last: EpochResult,
    weights: FloatArray | None,
    rows: str,
    l2: float | None,
) -> str:
    """Return a warning if an earlier epoch fitted the test rows better, or "".

    ``rows`` names them, and ``weights`` (N',) are theirs; ``l2`` is None without a
    penalty.
    """
    if (
        earlier.row_losses is None
        or last.row_losses is None
        or earlier.epoch >= last.epoch
    ):
        return ""
    if last.train["loss"] > (1.0 - LEAST_FALL) * earlier.train["loss"]:
        return ""
    rise = rise_of(earlier.row_losses, last.row_losses, weights)
    if rise is None:
        return ""
    remedies = ["validation-fraction = 0.1, which saves the best epoch,"]
    if l2 is not None:
        remedies.insert(0, f"l2 = {10.0 * l2 or LEAST_L2:g} (here {l2:g})")
    return (
        f"the model overfits: its loss on {rows} is {100.0 * rise:.2g} % above that "
        f"after epoch {earlier.epoch} of {last.epoch}; {' or '.join(remedies)} may end "
        "lower"
    )


def rise_of(
    earlier: FloatArray, last: FloatArray, weights: FloatArray | None = None
) -> float | None:
    """Return the relative rise of the last losses' mean above that of earlier ones.

    The losses (N',) are of the same rows, so that the deviation of the mean difference
    is that of their differences. None if the rise is small, or chance might explain it.

    >>> rise_of(np.full(40, 1.0), np.full(40, 1.0)) is None
    True
    >>> round(rise_of(np.linspace(1, 2, 40), np.linspace(1.1, 2.2, 40)), 3)
    0.1
    """
    shares = np.full(len(last), 1.0 / max(len(last), 1))
    if weights is not None:
        shares = weights / weights.sum()
    earlier_mean = float(shares @ earlier)
    difference = last - earlier
    rise = float(shares @ difference)
    deviation = float(np.linalg.norm(shares * (difference - rise)))
    is_clear = len(last) >= LEAST_ROWS and rise > DEVIATIONS * deviation
    if is_clear and rise > LEAST_RISE * abs(earlier_mean):
        return rise / earlier_mean
    return None
