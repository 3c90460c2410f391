"""Objectives: losses that are bound to a target and its weights, one file a family."""

from tp_flower.objectives.classes import ClassResponse
from tp_flower.objectives.comparison import no_better
from tp_flower.objectives.kmeans import KMEANS, ClusterResponse
from tp_flower.objectives.noise import ClassNoise, LabelNoise, NumberNoise
from tp_flower.objectives.objective import Objective
from tp_flower.objectives.offset import OFFSET, OffsetObjective, with_offset
from tp_flower.objectives.registry import (
    FAMILIES,
    family_named,
    family_of,
    fits,
    fitting_families,
    forms_of_losses,
    make_objective,
    names_of_losses,
    response_of,
    takes_numbers,
)
from tp_flower.objectives.response import NumberResponse, Response
from tp_flower.objectives.target import (
    ENTRY,
    EVENT,
    LABEL,
    LARGEST_LABEL,
    MAX_CLASSES,
    STRATA,
    TIME,
    Target,
)

__all__ = [
    "ENTRY",
    "EVENT",
    "FAMILIES",
    "KMEANS",
    "LABEL",
    "LARGEST_LABEL",
    "MAX_CLASSES",
    "OFFSET",
    "STRATA",
    "TIME",
    "ClassNoise",
    "ClassResponse",
    "ClusterResponse",
    "LabelNoise",
    "NumberNoise",
    "NumberResponse",
    "Objective",
    "OffsetObjective",
    "Response",
    "Target",
    "family_named",
    "family_of",
    "fits",
    "fitting_families",
    "forms_of_losses",
    "make_objective",
    "names_of_losses",
    "no_better",
    "response_of",
    "takes_numbers",
    "with_offset",
]
