"""Gradient boosting: trees, and what the shards of a table add to them."""

from tp_flower.learning.models.local_model import (
    LocalModel,
    ModelKind,
    ModelSpec,
    register_kind,
)
from tp_flower.methods.boost.messages import TREES


def _build(spec: ModelSpec, _features: int) -> LocalModel:
    # only runs that boost need LightGBM
    from tp_flower.methods.boost.trees import TreeModel

    return TreeModel(spec.outputs)


# each round says how many leaves it grows
register_kind(TREES, ModelKind(_build, lambda _spec, _features: 0))
