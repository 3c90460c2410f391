"""Learning over joins by sharing ADMM: the server's half of one epoch, on arrays.

    minimise (1/N) sum_j loss(z_j; y_j) + beta sum_i R(theta_i)  s.t.  z = b + sum_i h_i

One epoch, with kappa = c * rho (Boyd et al. 2011, section 7.3; paper Eq. 7, 8, 14):

    h~       = alpha h + (1 - alpha) z                  over-relaxation, alpha in [1, 2)
    z        = prox(h~ + duals / rho)
    duals   += rho (h~ - z)                             == grad loss(z)
    v        = duals + rho (h - z)
    step_i   = -seg_i(v) / (kappa G_i)                  sent to the sites of table i
    target_i = h_i + step_i                             at the sites

The server needs the sum of the tables' scores, and no table's own.

The paper's Eq. 9/16 has c = 1 (Jacobi: every table corrects the whole residual at
once), which in general does not converge for three tables; c = M (sharing) converges
for every rho > 0 on convex problems.

A joined row of a LEFT JOIN may lack a table: there h_i = 0 for any theta_i, as if the
table's row had a constant model. In the constraint z = b + sum_i A_i theta_i this is a
zero row of A_i, which the convergence of sharing ADMM allows: the row's term in table
i's update is a constant, so G_i counts matched joined rows only, seg_i sums over them,
and c stays M. (Only M_j <= M tables share the residual of joined row j; a c above M_j
makes a shorter step there, never a wrong one.)

If joined rows have weights w_j of mean 1, the whole augmented Lagrangian of row j is
multiplied by w_j. This changes neither its z- nor its dual update (the multiplier of
the constraint is w_j duals_j, and equals w_j grad loss(z_j)), and the tables' updates
through sums only: step_i = -seg_i(w v) / (kappa G^w_i) with G^w_i = seg_i(w), which
takes the place of G_i at the sites too. Equal weights leave all as it is; a weight of 2
is the row twice.

Notation:
    h     ``scores``  (N, d_c)            h_i   ``local_scores``  (n_i, d_c)
    z     ``z``  (N, d_c)                 lambda  ``duals``  (N, d_c)
    c     ``corrections``: M              G_i   ``multiplicity``  (n_i,)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tp_flower.arrays import AnyArray, BoolArray, FloatArray, dot
from tp_flower.joins.rows import JoinedRows, Vectors
from tp_flower.objectives import Objective

IMBALANCE = 10.0
BALANCE_WINDOW = 3


@dataclass(frozen=True)
class Residuals:
    """Root-mean-square residuals of an epoch, relative to the size of their variables.

    ||h - z|| / max(||h - b||, ||z - b||), and rho ||h - h_before|| / ||duals||.
    """

    primal: float
    dual: float


def start(rows: JoinedRows, base: FloatArray) -> None:
    """Store z = b and duals = 0 over the joined rows."""
    rows.fill("z", base)
    rows.fill("duals", np.zeros_like(base))


def admm_step(
    rows: JoinedRows, objective: Objective, rho: float, over_relaxation: float = 1.0
) -> dict[str, FloatArray]:
    """Store z and duals after their updates (Eq. 7, 8); return seg_i(w v), (n_i, d_c).

    They are by table; ``scores``, ``z`` and ``duals`` are vectors of the rows.
    """

    def step(vectors: Vectors, _: FloatArray) -> tuple[Vectors, Sequence[float]]:
        """Take steps 2 and 3 for a block of joined rows."""
        part = objective.on(vectors)
        h = vectors["scores"]
        old_z = vectors["z"]
        relaxed = h
        if over_relaxation != 1.0:
            relaxed = over_relaxation * h + (1.0 - over_relaxation) * old_z
        centre = vectors["duals"] / rho
        centre += relaxed
        z = part.prox(centre, rho, start=old_z)
        duals = part.prox_gradient(z, centre, rho)
        message = h - z
        message *= rho
        message += duals
        return {"z": z, "duals": duals, "message": part.weigh(message)}, ()

    _, sums = rows.run(step, sums_of="message")
    return sums


def advance(
    rows: JoinedRows,
    objective: Objective,
    rho: float,
    base: FloatArray,
    combine: Callable[[AnyArray], FloatArray],
    local: Mapping[str, AnyArray],
) -> tuple[Residuals, float]:
    """Store the scores h of the updated models; return residuals and the loss's sum.

    ``combine`` makes h of the sum of the tables' ``local`` scores. In the norms, as in
    the augmented Lagrangian, a row of weight w counts w times.
    """

    def measure(
        vectors: Vectors, expanded: AnyArray
    ) -> tuple[Vectors, Sequence[float]]:
        """Return the scores of a block, its loss and five squared norms."""
        h = combine(expanded)
        z = vectors["z"]
        part = objective.on(vectors)
        differences = h - z, h - base, z - base, h - vectors["scores"]
        squares = (
            dot(part.weigh(values), values)
            for values in (*differences, vectors["duals"])
        )
        return {"scores": h}, [part.total(h), *squares]

    (total, *squares), _ = rows.run(measure, local)
    gap, size_h, size_z, change, dual_size = np.sqrt(squares)
    tiny = np.finfo(np.float64).tiny
    residuals = Residuals(
        primal=float(gap / max(size_h, size_z, tiny)),
        dual=float(rho * change / max(dual_size, tiny)),
    )
    return residuals, float(total)


def balanced_rho(rho: float, recent: Sequence[Residuals]) -> float:
    """Return rho after balancing relative residuals (Boyd et al. 2011, 3.4.1).

    One residual must exceed the other tenfold in *all* recent epochs, of which
    ``BALANCE_WINDOW`` are needed since rho last changed: in the first epochs of a good
    run the primal one does so now and then, and following it at once doubles the epochs
    to the optimum (observed on flights).

    >>> balanced_rho(1.0, [Residuals(primal=1.0, dual=0.01)] * BALANCE_WINDOW)
    2.0
    """
    if len(recent) < BALANCE_WINDOW:
        return rho
    window = recent[-BALANCE_WINDOW:]
    if all(gap.primal > IMBALANCE * gap.dual for gap in window):
        return rho * 2.0
    if all(gap.dual > IMBALANCE * gap.primal for gap in window):
        return rho / 2.0
    return rho


def consensus_parameters(
    total: FloatArray, shards: int, penalised: BoolArray, rho_in: float, l2: float
) -> FloatArray:
    """Return w from the sum of the shards' theta^q + u^q (Eq. 20), (p,).

    w = Q rho_in / (Q rho_in + beta) * mean(theta + u); the paper's Eq. 20 has M where
    consensus ADMM has Q_i. Biases are not penalised, only averaged.
    """
    average = total / shards
    shrink = shards * rho_in / (shards * rho_in + l2)
    return np.where(penalised, shrink * average, average)
