"""Settings of coresets: solvers on a weighted sample of the joined rows."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from tp_flower.methods.coreset.messages import MOST_CLUSTERS, TRAIN_MEASURE
from tp_flower.privacy.plan import CENTRES, SAMPLED_ROWS
from tp_flower.settings.declare import (
    AUTO,
    BY_METHOD,
    OneOf,
    Range,
    Readers,
    setting,
)
from tp_flower.settings.rules import Rules, general_methods
from tp_flower.settings.run import CLASSIFICATION, TRAIN
from tp_flower.settings.settings import Settings
from tp_flower.settings.training import OVER_JOINS, SampleSettings

EXACT: Final = "exact"
SAGA: Final = "saga"
DISTDIM: Final = "distdim"


@dataclass(frozen=True)
class CoresetSettings:
    """Solvers on a coreset, at the server."""

    readers = BY_METHOD

    coreset_solver: str = setting(
        AUTO,
        'Solver on the coreset. coreset-ridge: "exact" or "saga"; '
        'coreset-kmeans: "kmeans++" or "distdim"; "auto" = the first.',
        OneOf((AUTO, EXACT, SAGA, "kmeans++", DISTDIM)),
        Readers(
            of_methods=True,
            refusal="{value!r} does not go with strategy {strategy!r}: use auto",
        ),
    )
    clusters: int = setting(
        10,
        "coreset-kmeans: number of centres.",
        Range(1, MOST_CLUSTERS + 1),
    )


def _conflicts(settings: Settings) -> Iterator[str]:
    """Refuse solvers, models and tasks that the server cannot solve on a sample."""
    strategy = settings.method_name
    values = settings.of(CoresetSettings)
    solvers = (AUTO, *settings.method.solvers)
    if values.coreset_solver not in solvers:
        yield (
            f"coreset-solver: {values.coreset_solver!r} does not go with strategy "
            f"{strategy!r}: use {', '.join(solvers)}"
        )
    if settings.l1 and values.coreset_solver == SAGA:
        yield "l1: solver 'saga' takes none: use 'exact', or leave it 0"
    if settings.other_model:
        yield (
            f"model: {settings.other_model!r} does not go with strategy "
            f"{strategy!r}, which has a model of its own: leave it 'linear'"
        )
    if settings.num_epochs > 1:
        yield (
            f"num-epochs: strategy {strategy!r} solves once, not "
            f"{settings.num_epochs} times: leave it 0"
        )
    if settings.task == CLASSIFICATION:
        yield (
            f"task: 'classification' does not go with strategy {strategy!r}: use "
            f"{general_methods()}, with a coreset-size"
        )


def _sends(settings: Settings) -> str:
    is_centres = settings.of(CoresetSettings).coreset_solver == DISTDIM
    return CENTRES if is_centres else SAMPLED_ROWS


def _draws(settings: Settings) -> bool:
    """Return whether rows are drawn by importance, for this method or another one."""
    is_drawn = settings.training_sample > 0 and settings.is_by_importance
    return settings.mode == TRAIN and settings.method.joins and is_drawn


RIDGE_RULES: Final = Rules(
    groups=(SampleSettings, CoresetSettings),
    reads=OVER_JOINS | {"l2", "coreset_solver", "l1"},
    conflicts=_conflicts,
    sends=_sends,
    begins={TRAIN_MEASURE: _draws},
    synonyms=dict.fromkeys(("reg-alpha", "lasso", "l1-ratio"), "l1"),
)
KMEANS_RULES: Final = replace(
    RIDGE_RULES,
    # it has no label, and holds out no rows
    reads=OVER_JOINS - {"test_split"} | {"l2", "coreset_solver", "clusters"},
)
