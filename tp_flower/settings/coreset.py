"""Settings of coresets: training on a weighted sample of the joined rows."""

from dataclasses import dataclass
from typing import Final

from tp_flower.methods import ADMM, CORESET, SGD
from tp_flower.settings.allowed import OneOf, Range
from tp_flower.settings.declare import Readers, of_families, setting
from tp_flower.settings.run import AUTO

IMPORTANCE: Final = "importance"
UNIFORM: Final = "uniform"

EXACT: Final = "exact"
SAGA: Final = "saga"
KMEANS: Final = "kmeans++"
DISTDIM: Final = "distdim"

MOST_ROWS: Final = 1 << 24
"""Rows that may be drawn: a site answers with a number for each."""

MOST_CLUSTERS: Final = 10_000

_JOINING: Final = of_families(ADMM, SGD, CORESET)


@dataclass(frozen=True)
class CoresetSettings:
    """Coresets: training on a weighted sample of the joined rows."""

    coreset_size: int = setting(
        0,
        "Train on a coreset: so many joined rows, drawn with weights; 0 = on all of "
        "them (2000 for the strategies coreset-*).",
        Range(0, MOST_ROWS + 1),
        Readers(
            _JOINING,
            refusal="is of joined rows; strategy {strategy!r} trains on every row: "
            "leave it 0",
        ),
    )
    coreset_kind: str = setting(
        IMPORTANCE,
        'How they are drawn: "importance" (by what each table tells of its rows\' '
        'sensitivity) or "uniform" (no row is read for it).',
        OneOf((IMPORTANCE, UNIFORM)),
        Readers(_JOINING),
    )
    coreset_solver: str = setting(
        AUTO,
        'What solves on the drawn rows. coreset-ridge: "exact" or "saga"; '
        'coreset-kmeans: "kmeans++" or "distdim"; "auto" = the first.',
        OneOf((AUTO, EXACT, SAGA, KMEANS, DISTDIM)),
        Readers(of_families(CORESET)),
    )
    clusters: int = setting(
        10,
        "coreset-kmeans: centres.",
        Range(1, MOST_CLUSTERS + 1),
        Readers(("coreset-kmeans",)),
    )
    l1: float = setting(
        0.0,
        "coreset-ridge: weight of the penalty ||theta||_1; above 0 makes it a lasso, "
        "beside l2 an elastic net.",
        Range(0),
        Readers(
            ("coreset-ridge",),
            refusal="strategy {strategy!r} has no such penalty: leave it 0",
        ),
    )
