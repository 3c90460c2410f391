"""Standard errors of a regression, from second moments.

With C the covariance of the features over N rows, sigma^2 the variance of the residuals
and r the rank of C, the estimate under a ridge has the covariance

    sigma^2 (C + l2)^-1 C (C + l2)^-1 / N,    sigma^2 = sum_j r_j^2 / (N - r - 1)

for given features and rows whose labels are independent; without l2 it is that of
ordinary least squares, sigma^2 (X^T X)^-1. It is conditional on l2: the spread of the
estimate around its own mean, which l2 has drawn towards 0 (Hoerl and Kennard 1970,
"Ridge Regression", section 4). A lasso chooses its columns by the same labels, and no
such formula holds (Tibshirani 1996, section 2.5): there are no errors then.

Notation:
    d  features        C = V diag(w) V^T
"""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from scipy import special

from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.methods.moments.penalties import Fit
from tp_flower.methods.moments.solve import JoinedMoments

STATISTICS: Final = ("standard-error", "t", "p", "low", "high")
"""Of a coefficient: p for both sides, and the ends of its interval."""
CONFIDENCE: Final = 0.95
ESTIMABLE: Final = 1e-8
"""The share of a column that may be a combination of the others, by rounding."""


@dataclass(frozen=True, eq=False)
class Inference:
    """How well the coefficients of features, and the intercept, are known.

    Attributes:
        errors: standard errors, (d + 1,), that of the intercept last; NaN for those
            that collinear columns leave undetermined.
        freedom: degrees of freedom of sigma^2.
    """

    errors: FloatArray
    freedom: float

    @classmethod
    def of(cls, moments: JoinedMoments, fit: Fit) -> Self:
        """Return the errors of a regression without l1, by the rows that it fits."""
        spectrum = moments.spectrum
        rows = moments.joined_rows
        freedom = rows - spectrum.rank - 1.0
        squares = 2.0 * rows * moments.metrics(fit.solution)["loss"]
        variance = squares / freedom if freedom > 0.0 else np.nan
        # of theta, and of b = mean of y - mean of x theta, along the eigenvectors
        combinations = np.vstack(
            [np.eye(len(moments.features)), -moments.mean_features]
        )
        shares = (combinations @ spectrum.vectors) ** 2
        l2 = fit.penalty.l2
        spread = shares @ (spectrum.values * spectrum.inverses(l2) ** 2)
        spread[-1] += 1.0
        errors = np.sqrt(variance * spread / rows)
        if not l2:
            undetermined = shares[:, spectrum.values == 0.0].sum(axis=1)
            errors[undetermined > ESTIMABLE] = np.nan
        return cls(errors, freedom)

    @property
    def has_error(self) -> BoolArray:
        """Which features have an error, (d,): not those that others add up to."""
        has_error: BoolArray = ~np.isnan(self.errors[:-1])
        return has_error

    def statistics(self, estimates: FloatArray) -> FloatArray:
        """Return what ``STATISTICS`` names of some estimates (d + 1,), (d + 1, 5).

        That an intercept is 0 is no hypothesis: it has neither t nor p.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            t = estimates / self.errors
        t[-1] = np.nan
        p = 2.0 * special.stdtr(self.freedom, -np.abs(t))
        reach = special.stdtrit(self.freedom, 0.5 + 0.5 * CONFIDENCE) * self.errors
        return np.column_stack(
            [self.errors, t, p, estimates - reach, estimates + reach]
        )
