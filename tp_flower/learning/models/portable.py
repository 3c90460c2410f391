"""Models of tables as plain facts and arrays, which a runner without torch can score.

``tp_flower.export.runner.scoring`` reads them: the facts name its function, the arrays
are its parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np

from tp_flower.arrays import AnyArray
from tp_flower.errors import ModelError
from tp_flower.learning.models.local_model import (
    CENTRES,
    LINEAR,
    NUMPY_KINDS,
    ModelSpec,
)

NETWORK: Final = "mlp"


@dataclass(frozen=True)
class Portable:
    """A model of a table that any program can score.

    Attributes:
        facts: plain JSON types: the `model`, and what it says of its arrays.
        arrays: by name.
        regions: how many regions of another table's rows tell scores apart: with one
            for rows in none, where the model reads regions; else 1.
        divides: whether the table's own rows have regions.
    """

    facts: Mapping[str, Any]
    arrays: Mapping[str, AnyArray] = field(default_factory=dict)
    regions: int = 1
    divides: bool = False


def portable_model(spec: ModelSpec, width: int, parameters: AnyArray) -> Portable:
    """Return a model of d = ``width`` encoded columns with parameters (p,).

    Raises:
        ModelError: it is a module of the user's own.
    """
    if spec.kind == LINEAR:
        # by column, then the intercept
        weights = parameters.reshape(-1, spec.outputs)
        return Portable({"model": "linear"}, {"weights": weights})
    if spec.kind == CENTRES:
        centres = parameters.reshape(spec.outputs, width)
        return Portable({"model": "centres"}, {"weights": centres})
    if spec.kind == NETWORK:
        return _network(spec, width, parameters)
    kind = NUMPY_KINDS.get(spec.kind)
    if kind is None or kind.portable is None:
        raise ModelError(
            f"models of kind {spec.kind!r} cannot be exported: save() keeps the model "
            "for where its code is, or train one of kind 'linear' or 'mlp'"
        )
    portable = kind.portable(spec, width, parameters)
    if not isinstance(portable, Portable):
        raise TypeError(f"kind {spec.kind!r} of models makes no Portable")
    return portable


def _network(spec: ModelSpec, width: int, parameters: AnyArray) -> Portable:
    """Return the layers of a network: weights (outputs, inputs), and biases.

    Torch keeps them in this order, as float32.
    """
    arrays = {}
    widths = (width, *spec.hidden_sizes, spec.outputs)
    left = parameters.astype(np.float32)
    for layer, (inputs, outputs) in enumerate(pairwise(widths)):
        weights, left = np.split(left, [inputs * outputs])
        arrays[f"weights{layer}"] = weights.reshape(outputs, inputs)
        if layer < len(spec.hidden_sizes) or spec.intercept:
            arrays[f"bias{layer}"], left = np.split(left, [outputs])
    if len(left):
        raise ModelError("a network has other parameters than its layers take")
    structure = {
        "model": "network",
        "layers": len(widths) - 1,
        "scale": spec.output_scale,
    }
    return Portable(structure, arrays)
