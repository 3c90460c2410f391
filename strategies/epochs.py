"""What an epoch of training has reached."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EpochResult:
    """How far an epoch got.

    Attributes:
        epoch: from 1.
        train: metrics on the training rows.
        test: metrics on the held-out rows.
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
