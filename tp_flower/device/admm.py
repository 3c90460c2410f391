"""The server's half of an ADMM epoch on a device, on tensors of float64.

The iteration and its notation are those of :mod:`tp_flower.learning.admm`.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from tp_flower.device.losses import DeviceLoss
from tp_flower.device.rows import DeviceRows
from tp_flower.learning.admm import Residuals


def sum_scores(
    base: Tensor, joined_rows: int, tables: Iterable[tuple[DeviceRows, Tensor]]
) -> Tensor:
    """Return h = b + sum_i expand_i(h_i), (N, d_c).

    Args:
        base: b, (d_c,).
        joined_rows: N.
        tables: every table's rows and local scores (n_i, d_c).
    """
    total = base.expand(joined_rows, -1).clone()
    for rows, values in tables:
        rows.add_expanded(values, total)
    return total


def admm_step(
    loss: DeviceLoss,
    labels: Tensor,
    rho: float,
    over_relaxation: float,
    at: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Take the z- and dual update (Eq. 7 and 8).

    Args:
        loss: of the joined rows.
        labels: y, (N,).
        rho: penalty, > 0.
        over_relaxation: alpha, in [1, 2).
        at: scores h, the z and the duals of the epoch before, each (N, d_c).

    Returns:
        z, duals and v, each (N, d_c).
    """
    scores, z, duals = at
    relaxed = scores
    if over_relaxation != 1.0:
        relaxed = over_relaxation * scores + (1.0 - over_relaxation) * z
    z = loss.prox(relaxed + duals / rho, labels, rho, z)
    duals = loss.gradient(z, labels)
    return z, duals, (scores - z) * rho + duals


def targets(
    rows: DeviceRows,
    local_scores: Tensor,
    message: Tensor,
    kappa: float,
    inverse_mass: Tensor | None = None,
) -> Tensor:
    """Return target_i = h_i - seg_i(v) / (kappa G_i), (n_i, d_c); h_i where G_i = 0.

    Args:
        rows: of table i.
        local_scores: h_i, (n_i, d_c).
        message: v, (N, d_c); w v where rows are weighted.
        kappa: c * rho.
        inverse_mass: 1 / G^w_i, (n_i,), where rows are weighted, else None.
    """
    inverse = rows.inverse_multiplicity if inverse_mass is None else inverse_mass
    own = rows.segment_sum(message) * inverse[:, None]
    return local_scores - own / kappa


def residuals(
    z: Tensor,
    duals: Tensor,
    rho: float,
    base: Tensor,
    scores: tuple[Tensor, Tensor],
    weights: Tensor | None = None,
) -> Residuals:
    """Return the relative residuals of an epoch.

    Args:
        z: of the epoch, (N, d_c).
        duals: of the epoch, (N, d_c).
        rho: its penalty.
        base: b, (d_c,).
        scores: h at its end and at the end of the epoch before, each (N, d_c).
        weights: w, (N, 1), of the rows; None: all alike.
    """
    new, old = scores
    roots = None if weights is None else weights.sqrt()
    sizes = torch.stack(
        [
            torch.linalg.vector_norm(array if roots is None else array * roots)
            for array in (new - z, new - base, z - base, new - old, duals)
        ]
    )
    # one transfer for all
    gap, size_h, size_z, change, dual_size = sizes.tolist()
    tiny = np.finfo(np.float64).tiny
    return Residuals(
        primal=gap / max(size_h, size_z, tiny),
        dual=rho * change / max(dual_size, tiny),
    )
