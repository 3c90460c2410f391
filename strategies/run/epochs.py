"""What an epoch of training has reached."""

from dataclasses import dataclass

from tp_flower.settings import STALE, Settings


@dataclass(frozen=True)
class EpochResult:
    """How far an epoch got.

    Attributes:
        epoch: from 1.
        train: metrics on the training rows.
        test: metrics on the held-out rows; empty where they were not scored.
        primal_residual: ADMM's, relative; None for SGD.
        dual_residual: ADMM's, relative; None for SGD.
    """

    epoch: int
    train: dict[str, float]
    test: dict[str, float]
    primal_residual: float | None = None
    dual_residual: float | None = None

    def is_within(self, tolerance: float) -> bool:
        """Whether both residuals are below the tolerance."""
        if self.primal_residual is None or self.dual_residual is None:
            return False
        return max(self.primal_residual, self.dual_residual) < tolerance


def tests_every_epoch(settings: Settings) -> bool:
    """Whether held-out rows are scored in every epoch, or in the last one only.

    With a coreset their scores would cost more than the training. Where any epoch may
    be the last, or scores may have to do for later epochs, they are all there.
    """
    may_be_last = settings.tolerance > 0.0 or settings.on_missing == STALE
    return may_be_last or not settings.coreset_rows
