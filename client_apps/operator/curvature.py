"""The curvature of a participant's objective, from which the server takes step sizes.

Notation:
    T, G     ``data.trained`` (n, d), ``data.multiplicity`` (n,)
    N, p     ``data.joined_rows``, parameters per output
    J        derivative of the scores by the parameters

Both are of the objective with squared loss: the mean curvature is the trace of
J^T diag(G) J over N p, the largest one its largest eigenvalue over N.
"""

from typing import Any

import numpy as np

from client_apps.operator.participant import Participant
from tp_flower.arrays import FloatArray
from tp_flower.errors import SettingsError
from tp_flower.learning.models.local_model import LinearModel
from tp_flower.randomness import Stream, generator

Curvature = dict[str, float]
"""Fields of ``PreparedPart`` by name."""


def typical_curvature(part: Participant[Any], columns: int) -> Curvature:
    """Return the curvature of standardised features, which reveals nothing about rows.

    The mean squared norm of a row is about ``columns``, its encodings, and 1 for an
    intercept. The trace of the Gram matrix over N is the mean of G ||x||^2, summed over
    the rows, and its largest eigenvalue is at most that.
    """
    data = part.data
    gradients = part.data.plan.gradients
    model = part.model
    outputs = 1
    if isinstance(model, LinearModel):
        outputs = model.outputs
    trace = columns * int(data.multiplicity.sum()) / data.joined_rows
    has_batches = len(data.batch_start) > 1
    noise = 0.0
    if gradients is not None:
        noise = gradients.noise_multiplier * data.plan.unit_norm
    return {
        "largest_curvature": trace if has_batches else 0.0,
        "mean_curvature": trace / max(len(model.penalised) // outputs, 1),
        "gradient_noise": noise,
    }


def probed_curvature(part: Participant[Any], columns: int) -> Curvature:
    """Return the mean diagonal of the Gauss-Newton matrix of a torch model.

    The diagonal is estimated with one random vector e of signs (Hutchinson):
    ||J^T (sqrt(G) e)||^2 / p has that mean as its expectation. Of a model that is
    trained privately it is the typical one.
    """
    data = part.data
    model = part.model
    spec = part.data.spec
    shape = len(data.multiplicity), spec.outputs
    signs: FloatArray = generator(spec.seed, Stream.CURVATURE).choice(
        [-1.0, 1.0], size=shape
    )
    try:
        probe = model.pullback(
            data.trained, np.sqrt(data.multiplicity)[:, None] * signs
        )
    except (RuntimeError, TypeError, ValueError) as error:
        # torch's errors name shapes and types, no values
        raise SettingsError(
            f"model {spec.kind!r} does not turn rows of {data.features.shape[1]} "
            f"features into {spec.outputs} scores: {error}"
        ) from error
    if data.plan.is_private:
        return typical_curvature(part, columns)
    return {"mean_curvature": float(probe @ probe) / (data.joined_rows * len(probe))}
