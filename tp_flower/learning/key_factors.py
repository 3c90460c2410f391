"""Factors of two tables' keys: a part of the scores that no sum over tables has.

A user likes some films more than others, whatever both are like on average. After the
tables' training, and the effects of keys (:mod:`tp_flower.learning.row_effects`), the
server fits numbers p_k to the keys of one table and q_l to those of another, whose
product p_k . q_l is added to the scores of their joined rows (matrix factorisation):

    P, Q = argmin sum_j w_j loss(h_j + p_k(j) . q_l(j); y_j)
                  + 1/2 sum_k lambda_k |p_k|^2 + 1/2 sum_l lambda_l |q_l|^2

by weighted alternating least squares: with the loss's derivatives at the present scores
every row has a weight H = w h'' and a working response p . q - h' / h'', and

    p_k <- (sum_{j in k} H_j q q' + lambda_k I)^-1 sum_{j in k} H_j q y~_j

then the same for q. lambda_k grows with the weight of the key's rows (Zhou et al.
2008), above a ``least``, which pulls keys of few rows to 0. As a product has the unit
of the scores, and a factor its root, lambda has that unit, too.

The least that such sweeps find depends on where they start. So more than ``TOGETHER``
factors are fits of their own, from other starts, of which the mean is taken: of m fits
the factors stand side by side, divided by the root of m.

Notation:
    h  ``scores``  (N, 1)     k, l  the two keys of a joined row, K and L of them
    P, Q  ``factors``, by table, (K, d) and (L, d)     d  ``width``
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Final

import numpy as np

from tp_flower.arrays import AnyArray, FloatArray, IntArray, blocks
from tp_flower.joins.key_pairs import pair_keys
from tp_flower.joins.mapping import TableMapping, TableRows
from tp_flower.joins.rows import JoinedRows, Vectors
from tp_flower.learning.row_effects import Fall
from tp_flower.objectives import Objective

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Factors = Mapping[str, FloatArray]
"""By table, the factors of its keys, (K, d)."""

WIDTHS: Final = (8, 32)
SWEEPS: Final = 10
PATIENCE: Final = 4  # sweeps without a lower loss: the first few may raise it
PENALTIES: Final = (8.0, 2.0)
"""Rows' worth of curvature that pull the factors of a key to 0, at least."""
PENALTY_SHARE: Final = 0.08
"""What is added to it of the curvature of the key's own rows."""
START: Final = 0.1  # deviation of the first factors, in roots of the scores' unit
TOGETHER: Final = 8
"""Factors that are fitted together, at most."""
SYSTEM_NUMBERS: Final = 1 << 22
"""Numbers of the equations that are made at once: 32 MiB of them."""

_SCORES: Final = "scores"
_PAIRS: Final = "pairs"
_GRADIENT: Final = "gradient"
_HESSIAN: Final = "hessian"


class KeyFactors:
    """The joined rows that two tables' factors are fitted to.

    Attributes:
        tables: the two.
        pairs: how many pairs of their keys the joined rows have.
        sizes: of their keys, (K, L).
    """

    def __init__(
        self,
        rows: JoinedRows,
        objective: Objective,
        keys: Mapping[str, TableRows],
        unit: float = 1.0,
    ) -> None:
        """Add up the rows by pair of keys.

        Args:
            rows: those to fit to, with the vector ``scores``.
            objective: of these rows, with one score.
            keys: of the two tables, the key of each row, -1 for none.
            unit: the deviation of what the scores leave, of a label that is a number.
        """
        self.tables: tuple[str, ...] = tuple(keys)
        self._objective = objective
        self._unit = unit
        first, second = (
            rows.mapping.tables[table].behind(of_rows)
            for table, of_rows in keys.items()
        )
        pairs = pair_keys(first, second)
        self.pairs = pairs.count
        self.sizes = pairs.sizes
        self._rows = JoinedRows(
            TableMapping({_PAIRS: pairs.rows}),
            {**objective.vectors, _SCORES: rows.whole(_SCORES)},
            rows.is_one_part,
        )
        self._keys = dict(zip(self.tables, pairs.keys, strict=True))
        first_table, second_table = self.tables
        self._sides = {
            first_table: _Side(*pairs.keys, pairs.sizes),
            second_table: _Side(*pairs.keys[::-1], pairs.sizes[::-1]),
        }
        self._constant: tuple[FloatArray, FloatArray] | None = None

    def begin(self, width: int, draws: np.random.Generator) -> dict[str, FloatArray]:
        """Return the factors to begin with: none of the first table, small others."""
        first, second = self.tables
        keys, others = self.sizes
        deviation = START * np.sqrt(self._unit)
        return {
            first: np.zeros((keys, width)),
            second: deviation * draws.normal(size=(others, width)),
        }

    def sweep(self, factors: Factors, least: float) -> dict[str, FloatArray]:
        """Fit the factors of the first table, then those of the second."""
        fitted = dict(factors)
        for table, other in (self.tables, self.tables[::-1]):
            weights, responses = self._sums(fitted)
            side = self._sides[table]
            penalties = self._unit * (PENALTY_SHARE * side.masses(weights) + least)
            fitted[table] = side.solve(weights, responses, fitted[other], penalties)
        return fitted

    def _sums(self, factors: Factors) -> tuple[FloatArray, FloatArray]:
        """Return by pair the sums of H and of H times the working response, (P,)."""
        if self._constant is not None:
            return self._constant
        first, second = (factors[table][self._keys[table]] for table in self.tables)
        products = (first * second).sum(axis=1, keepdims=True)

        def derive(
            vectors: Vectors, added: AnyArray
        ) -> tuple[Vectors, Iterable[float]]:
            part = self._objective.on(vectors)
            scores = vectors[_SCORES] + added
            hessian = np.maximum(part.hessian(scores), 0.0)
            derivatives = {
                _GRADIENT: part.weigh(part.gradient(scores)),
                _HESSIAN: part.weigh(hessian),
            }
            return derivatives, ()

        self._rows.run(derive, {_PAIRS: products})
        gradient, weights = (
            self._rows.sums(name, [_PAIRS])[_PAIRS][:, 0]
            for name in (_GRADIENT, _HESSIAN)
        )
        sums = weights, weights * products[:, 0] - gradient
        if self._objective.has_constant_hessian:
            # the response is what the scores leave, whatever the factors
            self._constant = sums
        return sums


class _Side:
    """The pairs from the view of one table: by its keys, the keys of the other."""

    def __init__(self, keys: IntArray, other: IntArray, shape: tuple[int, int]) -> None:
        self._shape = shape
        self._order = np.argsort(keys, kind="stable")
        self._other = other[self._order]
        self._start = np.searchsorted(keys[self._order], np.arange(shape[0] + 1))

    def masses(self, weights: FloatArray) -> FloatArray:
        """Return the sum of weights by pair (P,) over each key's pairs, (K,)."""
        sums: FloatArray = self._matrix(weights).sum(axis=1)
        return sums

    def solve(
        self,
        weights: FloatArray,
        responses: FloatArray,
        others: FloatArray,
        penalties: FloatArray,
    ) -> FloatArray:
        """Return each key's factors (K, d), those of the other table (L, d) given.

        ``weights`` and ``responses`` are the sums of H and H y~ by pair, (P,).
        """
        width = others.shape[1]
        by_key = self._matrix(weights)
        right: FloatArray = self._matrix(responses) @ others
        solution = np.empty_like(right)
        diagonal = np.arange(width)
        for block in blocks(len(right), max(SYSTEM_NUMBERS // width**2, 1)):
            rows = by_key[block]
            systems = np.empty((rows.shape[0], width, width))
            for column in range(width):
                products = others[:, column:] * others[:, column, None]
                sums = rows @ products
                systems[:, column, column:] = sums
                systems[:, column:, column] = sums
            systems[:, diagonal, diagonal] += penalties[block, None]
            solution[block] = np.linalg.solve(systems, right[block, :, None])[..., 0]
        return solution

    def _matrix(self, values: FloatArray) -> "csr_array":
        """Return values by pair (P,) as a sparse matrix (K, L)."""
        # most runs fit none, and scipy takes a sixth of a second to import
        from scipy.sparse import csr_array

        entries = values[self._order], self._other, self._start
        return csr_array(entries, self._shape)


def add_products(
    rows: JoinedRows, factors: Mapping[str, AnyArray], name: str = _SCORES
) -> None:
    """Store the scores plus the products of two tables' factors, as a vector.

    ``factors`` are those of the tables' rows, (n_i, d); a joined row that lacks a row
    of either table adds 0.
    """

    def multiply(vectors: Vectors, each: AnyArray) -> tuple[Vectors, Iterable[float]]:
        products = (each[:, 0] * each[:, 1]).sum(axis=1, keepdims=True)
        return {name: vectors[_SCORES] + products}, ()

    rows.run(multiply, factors, by_table=True)


@dataclass(frozen=True)
class ChosenFactors:
    """The factors of two tables' keys that the rows that validate prefer.

    Attributes:
        pair: the rows that they are fitted to.
        least: the penalty of a key without rows.
        fall: of the validation loss.
    """

    pair: KeyFactors
    factors: Factors
    least: float
    fall: Fall

    @property
    def width(self) -> int:
        """The factors of a key, d."""
        first, *_ = self.factors.values()
        return int(first.shape[1])


def choose_factors(
    candidates: Sequence[KeyFactors],
    widths: Sequence[int],
    losses: Callable[[Factors], FloatArray],
    draws: Callable[[int], np.random.Generator],
    *,
    are_wanted: bool = False,
) -> ChosenFactors | None:
    """Return the factors of the lowest loss, if they lower it; None if none do.

    Pairs of tables and penalties are compared at the first width; the best of them
    have the others, too.

    Args:
        candidates: pairs of tables, at least one.
        widths: of the factors to try, at least one.
        losses: returns the weighted losses (V,) of the rows that validate, with some
            factors; of none with {}.
        draws: returns the generator of the factors of a width to begin with.
        are_wanted: whether the tables are named: then any fall will do, not only one
            that is more than chance.
    """
    before = losses({})
    narrow, *wider = widths
    tried = [
        _fit(pair, narrow, least, losses, draws(narrow))
        for pair, least in product(candidates, PENALTIES)
    ]
    best = min(tried, key=_Fit.mean_loss)
    tried = [
        _fit(best.pair, width, best.least, losses, draws(width)) for width in wider
    ]
    best = min([best, *tried], key=_Fit.mean_loss)
    noise = (before - best.losses).std() / np.sqrt(max(len(before), 1))
    fall = Fall(float(before.mean()), best.mean_loss(), float(noise))
    if fall.is_notable or (are_wanted and fall.after < fall.before):
        return ChosenFactors(best.pair, best.factors, best.least, fall)
    return None


@dataclass(frozen=True)
class _Fit:
    """The best sweep of a fit, with the losses (V,) of the rows that validate."""

    pair: KeyFactors
    least: float
    factors: Factors
    losses: FloatArray

    def mean_loss(self) -> float:
        """Return the mean loss, by which fits are compared."""
        return float(self.losses.mean())


def _fit(
    pair: KeyFactors,
    width: int,
    least: float,
    losses: Callable[[Factors], FloatArray],
    draws: np.random.Generator,
) -> _Fit:
    """Return the sweep of the lowest loss, or the start if none lowers it."""
    count = -(-width // TOGETHER)
    sizes = [len(group) for group in np.array_split(np.arange(width), count)]
    fits = [pair.begin(size, draws) for size in sizes]
    # of the first table there are none yet, and so no products
    best = _Fit(pair, least, mean_of(fits), losses({}))
    waited = 0
    for _ in range(SWEEPS):
        fits = [pair.sweep(fit, least) for fit in fits]
        factors = mean_of(fits)
        last = _Fit(pair, least, factors, losses(factors))
        waited += 1
        if last.mean_loss() < best.mean_loss():
            best, waited = last, 0
        if waited == PATIENCE:
            break
    return best


def mean_of(fits: Sequence[Factors]) -> Factors:
    """Return factors whose products are the mean of those of several fits."""
    return {
        table: np.concatenate([fit[table] for fit in fits], axis=1) / np.sqrt(len(fits))
        for table in fits[0]
    }
