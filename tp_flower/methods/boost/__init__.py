"""Gradient boosting: trees, and what the shards of a table add to them."""

from typing import Final

from tp_flower.arrays import AnyArray
from tp_flower.learning.models.local_model import (
    LocalModel,
    ModelKind,
    ModelSpec,
    register_kind,
)
from tp_flower.methods.boost.messages import (
    BAGGED,
    LOCAL,
    POOLED,
    SCORES_PER_EPOCH,
    TRAIN_BAG,
    TRAIN_BOOST,
    TRAIN_PAIRS,
    TRAIN_REGIONS,
    TREES,
)
from tp_flower.methods.method import Method, curved_loss
from tp_flower.protocol.training_messages import Update

BOOST: Final = Method(
    name="boost",
    family="boost",
    actions=(TRAIN_BOOST, TRAIN_BAG, TRAIN_REGIONS, TRAIN_PAIRS),
    epochs=100,
    few_epochs=6,
    patience=2,
    scores_per_epoch=SCORES_PER_EPOCH,
    rules="tp_flower.methods.boost.settings:RULES",
    overfits=True,
    unions=(LOCAL, BAGGED, POOLED),
    only_model=TREES,
    takes_codes=True,
    starts_from="boost_from",
    updates=(Update.LOCAL,),
    takes_loss=curved_loss,
)


def _build(spec: ModelSpec, _features: int) -> LocalModel:
    # only runs that boost need LightGBM
    from tp_flower.methods.boost.trees import TreeModel

    return TreeModel(spec.outputs)


def _portable(spec: ModelSpec, features: int, parameters: AnyArray) -> object:
    # only exports need it
    from tp_flower.methods.boost.portable import portable_forest

    return portable_forest(spec, features, parameters)


# each round says how many leaves it grows
register_kind(
    TREES,
    ModelKind(
        _build,
        lambda _spec, _features: 0,
        fields=("hidden_sizes", "seed"),
        portable=_portable,
    ),
)
