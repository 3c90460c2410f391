"""The fits of a search, as both sides count them.

A search trains every candidate on every fold, and the best of them on all folds. A
site counts the fits itself, and derives from their number what belongs to each: the
fold, the settings, and the keys of masks and seals, so that what leaves in two fits is
never under the same masks.
"""

import hashlib
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tp_flower.errors import ProposalError
from tp_flower.settings import Settings
from tp_flower.settings.search import candidates_of, fits_of, with_candidate

if TYPE_CHECKING:
    from tp_flower.terms.run_terms import RunTerms

_PURPOSE: Final = b"tp_flower fit of a search v1 "


@dataclass(frozen=True)
class CountedFit:
    """A fit that has begun.

    Attributes:
        number: from 1.
        fold: that is held out; None in the last fit.
        candidate: the position of the candidate that trains.
    """

    number: int
    fold: int | None
    candidate: int

    @classmethod
    def of(cls, settings: Settings, number: int, candidate: int) -> "CountedFit":
        """Return the fit of a number in the search that these settings propose.

        Raises:
            ProposalError: the search has no such fit, or trains another candidate in
                it.
        """
        fits = fits_of(settings)
        if not 1 <= number <= len(fits):
            raise ProposalError(
                f"'fit' is {number}; the run was proposed with {len(fits)} fits"
            )
        fit = fits[number - 1]
        count = len(candidates_of(settings))
        allowed = range(count) if fit.candidate is None else (fit.candidate,)
        if candidate not in allowed:
            named = f"from 0 to {count - 1}"
            if fit.candidate is not None:
                named = str(fit.candidate)
            raise ProposalError(
                f"'candidate': the run was proposed with {named} in fit {number}, and "
                f"the request says {candidate}"
            )
        return cls(number, fit.fold, candidate)

    def settings(self, proposed: Settings) -> Settings:
        """Return the settings of the fit, of those that the run was proposed with."""
        return with_candidate(proposed, candidates_of(proposed)[self.candidate])


def fit_key(key: bytes, fit: int) -> bytes:
    """Return a group's key in a fit of a search; before the first it is the run's.

    >>> len({fit_key(bytes(32), fit) for fit in range(3)})
    3
    """
    if not fit:
        return key
    return hmac.digest(key, _PURPOSE + str(fit).encode(), hashlib.sha256)


def share_encoders(terms: "RunTerms", others: "RunTerms") -> bool:
    """Return whether two fits encode rows alike: of one fold, by the same encoders.

    The set-up before the first fit has no fold.
    """
    if terms.fit is None or others.fit is None or terms.fit.fold != others.fit.fold:
        return False
    return terms.choices == others.choices
