"""Row effects: what the rows of a table add to the scores, beside their features.

A user, a film or a plane has a level of its own that no column tells. After the tables'
training the server, which has the loss's derivatives, fits a number to each key k of a
table: random effects of mean 0, shrunk by their penalty,

    b = argmin_b sum_j w_j loss(h_j + sum_i b_i[k_i(j)]; y_j)
                 + 1/2 sum_i lambda_i ||b_i||^2

by Newton steps, one table after the other:

    b_k <- b_k - (sum_{j in k} w_j g_j + lambda b_k) / (sum_{j in k} w_j h''_j + lambda)

Of a squared loss they are the best linear unbiased predictions of a mixed model with
variances sigma^2 / lambda_i (Robinson 1991); several outputs use the diagonal of their
Hessian.

Notation:
    h  ``scores``   (N, d_c)    k_i  the key of each row, (n_i,)
    b  ``effects``  (K_i, d_c)  lambda  ``penalty``
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.joins.mapping import TableRows
from tp_flower.joins.rows import JoinedRows, Vectors
from tp_flower.objectives import Objective

PENALTIES: Final = (100.0, 30.0, 10.0, 3.0, 1.0)
"""Rows' worth of curvature that pull an effect to 0: from strong to weak."""
MIDDLING: Final = 10.0
SWEEPS: Final = 5
MOST_SWEEPS: Final = 50
PRECISION: Final = 1e-4  # of effects, relative to the largest
# of a Newton step where the curvature changes: a row that is certain has almost none
LONGEST_STEP: Final = 2.0
NOTABLE: Final = 2.0  # standard errors


class RowEffects:
    """The effects of tables' keys, between steps that fit them.

    Attributes:
        effects: by table, (K, d_c).
        penalties: by table, lambda; tables that are not in it have no effects.
    """

    def __init__(
        self,
        rows: Sequence[JoinedRows],
        objective: Objective,
        keys: Mapping[str, TableRows],
    ) -> None:
        """Begin without effects.

        Args:
            rows: those to fit to, with the objective's vectors, and any others that
                the effects are to reach; all with the vector ``scores``.
            objective: of the former.
            keys: by table, the key of each row, -1 for none: as the mapping has the
                row of each joined row.
        """
        self._rows = rows
        self._objective = objective
        self._keys = keys
        outputs = objective.outputs
        self.effects = {
            name: np.zeros((each.rows, outputs)) for name, each in keys.items()
        }
        self.penalties: dict[str, float] = {}
        self._constant: dict[str, FloatArray] = {}

    def by_first_gain(self) -> list[str]:
        """Return the tables, first the one whose effects alone would gain most.

        By the second order of the loss, at a middling penalty.
        """
        gains = {}
        for table in self._keys:
            gradient, curvature = self._derivatives(table)
            gains[table] = float((gradient**2 / (curvature + MIDDLING)).sum())
        return sorted(gains, key=lambda table: -gains[table])

    def fit(self, table: str, penalty: float, sweeps: int = SWEEPS) -> None:
        """Fit the effects of one table, those of the others given."""
        self.penalties[table] = penalty
        for _ in range(1 if self._objective.has_constant_hessian else sweeps):
            if self._step(table) < PRECISION:
                return

    def fit_all(self, precision: float = PRECISION, sweeps: int = MOST_SWEEPS) -> None:
        """Fit the effects of all tables that have some, until they change no more."""
        for _ in range(sweeps):
            if max(map(self._step, self.penalties), default=0.0) < precision:
                return

    def set(self, table: str, effects: FloatArray) -> None:
        """Give the keys of a table other effects; the scores follow."""
        change = self._keys[table].expand(effects - self.effects[table])
        self.effects[table] = effects

        def move(vectors: Vectors, added: AnyArray) -> tuple[Vectors, Iterable[float]]:
            return {"scores": vectors["scores"] + added}, ()

        for rows in self._rows:
            rows.run(move, {table: change})

    def of_rows(self, table: str) -> FloatArray:
        """Return the effect of each row of a table, (n, d_c)."""
        return self._keys[table].expand(self.effects[table])

    def remaining(self, table: str) -> FloatArray:
        """Return the share of each key's own mean that its effect keeps, (K, d_c).

        It is H / (H + lambda): 0 for keys without a row, towards 1 for those of many.
        """
        _, curvature = self._derivatives(table)
        share: FloatArray = curvature / (curvature + self.penalties[table])
        return share

    def _step(self, table: str) -> float:
        """Take a Newton step of a table's effects; return how far, relative to them."""
        gradient, curvature = self._derivatives(table)
        before = self.effects[table]
        penalty = self.penalties[table]
        step = -(gradient + penalty * before) / (curvature + penalty)
        if not self._objective.has_constant_hessian:
            step = np.clip(step, -LONGEST_STEP, LONGEST_STEP)
        self.set(table, before + step)
        size = np.abs(self.effects[table]).max(initial=0.0)
        return float(np.abs(step).max(initial=0.0) / size) if size else 0.0

    def _derivatives(self, table: str) -> tuple[FloatArray, FloatArray]:
        """Return the sums of gradient and curvature over each key's rows, (K, d_c)."""
        objective = self._objective
        rows = self._rows[0]
        needs_curvature = table not in self._constant

        def derive(vectors: Vectors, _: AnyArray) -> tuple[Vectors, Iterable[float]]:
            part = objective.on(vectors)
            scores = vectors["scores"]
            derivatives = {"gradient": part.weigh(part.gradient(scores))}
            if needs_curvature:
                derivatives["hessian"] = part.weigh(part.hessian(scores))
            return derivatives, ()

        rows.run(derive)
        keys = self._keys[table]
        gradient = keys.segment_sum(rows.sums("gradient", [table])[table])
        if not needs_curvature:
            return gradient, self._constant[table]
        curvature = keys.segment_sum(rows.sums("hessian", [table])[table])
        if objective.has_constant_hessian:
            self._constant[table] = curvature
        return gradient, np.maximum(curvature, 0.0)


@dataclass(frozen=True)
class Fall:
    """The mean loss of the rows that validate, and how far it fell.

    ``noise`` is the standard error of the fall: less may be chance.
    """

    before: float
    after: float
    noise: float

    @classmethod
    def between(cls, before: FloatArray, after: FloatArray) -> Self:
        """Return the fall between the losses (V,) of the rows."""
        noise = float((before - after).std() / math.sqrt(max(len(before), 1)))
        return cls(float(before.mean()), float(after.mean()), noise)

    @property
    def is_notable(self) -> bool:
        """Whether the fall is more than chance."""
        return self.before - self.after > NOTABLE * self.noise


def choose_penalties(
    effects: RowEffects,
    tables: Iterable[str],
    losses: Callable[[], FloatArray],
    *,
    are_wanted: bool = False,
) -> dict[str, Fall]:
    """Fit each table's effects by the penalty of the lowest loss, if any lowers it.

    Args:
        effects: to fit, without any so far.
        tables: in the order in which they are tried: each is fitted to what those
            before it leave.
        losses: returns the weighted losses (V,) of the rows that validate.
        are_wanted: whether the tables are named: then any fall will do, not only one
            that is more than chance.

    Returns:
        By table with effects, the fall of the validation loss.
    """
    falls: dict[str, Fall] = {}
    for table in tables:
        before = losses()
        best, best_loss = math.inf, before.mean()
        chosen = none = effects.effects[table]
        fall = before
        for penalty in PENALTIES:
            effects.fit(table, penalty)
            after = losses()
            if not after.mean() < best_loss:
                break
            best, best_loss, fall = penalty, after.mean(), after
            chosen = effects.effects[table]
        result = Fall.between(before, fall)
        if math.isfinite(best) and (are_wanted or result.is_notable):
            effects.penalties[table] = best
            effects.set(table, chosen)
            falls[table] = result
        else:
            del effects.penalties[table]
            effects.set(table, none)
    if len(falls) > 1:
        fit_together(effects, losses)
    return falls


def fit_together(effects: RowEffects, losses: Callable[[], FloatArray]) -> None:
    """Fit the effects of all tables that have some, unless that loses."""
    before = losses().mean()
    apart = dict(effects.effects)
    effects.fit_all()
    if losses().mean() > before:
        for table in effects.penalties:
            effects.set(table, apart[table])
