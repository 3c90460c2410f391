"""The fit that a theta-update without closed form is."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tp_flower.learning.models.encoded_rows import Features, FloatArray


@dataclass(frozen=True)
class FitProblem:
    """A penalised weighted least-squares fit of a model to targets.

        minimise  (kappa / 2N) sum_j G_j ||f(theta; T_j) - target_j||^2
                  + strength / 2 ||theta - centre||^2     over the ``penalised`` ones

    Attributes:
        features: T, (n, d).
        multiplicity: G, or G^w of weighted joined rows, (n,).
        target: (n, d_c).
        kappa: c * rho.
        joined_rows: N.
        strength: beta in the theta-update, rho_in in a consensus step.
        centre: (p,): zero in the theta-update, w - u in a consensus step.
        penalised: (p,) bool.
    """

    features: Features
    multiplicity: npt.NDArray[np.integer] | FloatArray
    target: FloatArray
    kappa: float
    joined_rows: int
    strength: float
    centre: FloatArray
    penalised: npt.NDArray[np.bool_]

    @property
    def weights(self) -> FloatArray:
        """G with mean 1, (n,); there must be a row that is in some joined row."""
        weights: FloatArray = self.multiplicity / self.multiplicity.mean()
        return weights

    @property
    def relative_penalty(self) -> FloatArray:
        """What the penalty weighs beside a weighted mean over the rows, (p,)."""
        data_weight = self.kappa * float(self.multiplicity.sum())
        ridge = self.strength * self.joined_rows / data_weight
        return np.where(self.penalised, ridge, 0.0)

    def settle(self, parameters: FloatArray) -> FloatArray:
        """Return the parameters (p,) that the penalty alone leads to."""
        is_drawn = self.penalised & (self.strength > 0)
        return np.where(is_drawn, self.centre, parameters)
