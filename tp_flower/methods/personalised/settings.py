"""Settings of personalised models, and of the graph of similar sites."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tp_flower.learning.models.local_model import LINEAR
from tp_flower.methods.personalised.messages import (
    BY_DATA,
    BY_FEATURES,
    BY_MODELS,
    SUMMARIES,
    TRAIN_PERSONALISE,
)
from tp_flower.settings.declare import Form, Range, Readers, items_of, setting
from tp_flower.settings.rules import Rules, names_of
from tp_flower.settings.run import EXPLAIN, TRAIN
from tp_flower.settings.settings import Settings
from tp_flower.settings.training import MLP

NO_GRAPH: Final = "none"
EVERYTHING: Final = "*"  # all coordinates of a site's model are personal
LAST: Final = "last"  # the parameters of an MLP's last layer are personal
INTERCEPT: Final = "(intercept)"


def named_coordinates(personal: str) -> tuple[str, ...]:
    """Return the features that a list names; none for "*", "" and "last".

    >>> named_coordinates("age, (intercept)")
    ('age', '(intercept)')
    """
    if personal in (EVERYTHING, LAST):
        return ()
    return items_of(personal)


def _personal(text: str) -> str:
    """Return a list of personal features; ValueError if it is ambiguous."""
    parts = items_of(text)
    if not all(parts):
        raise ValueError(
            f"{text!r} has an empty name: list features such as 'age, (intercept)'"
        )
    if twice := {name for name in parts if parts.count(name) > 1}:
        raise ValueError(f"names {', '.join(sorted(twice))} more than once")
    single = {EVERYTHING, LAST} & set(parts)
    if single and len(parts) > 1:
        raise ValueError(f"{min(single)!r} must stand alone, not in a list of features")
    return text


def _graph(text: str) -> str:
    if text.strip():
        return text
    raise ValueError(
        f"is empty: it must be one of {', '.join(SUMMARIES)}, a list of edges "
        "such as 'a-b, b-c', or the path of a file with such a list"
    )


@dataclass(frozen=True)
class PersonalisedSettings:
    """Strategy "personalised": each site's model, pulled towards similar sites'."""

    readers = Readers(
        of_methods=True,
        refusal="is for strategy 'personalised' only, not {strategy!r}",
    )

    personal: str = setting(
        EVERYTHING,
        'Parameters that are each site\'s own: "*" all; "" none (one model for '
        'all); "last": an MLP\'s last layer; or features, "age, (intercept)".',
        Form('"*", "", "last", or features, comma separated', _personal),
    )
    graph: str = setting(
        BY_MODELS,
        'Which sites are similar: nearest neighbours by "data" (kernel mean '
        'embedding), "features" (covariance) or "models" (of sites alone); or edges '
        '"a-b, b-c" between sites, or the path of a file with such a list.',
        Form('"data", "features", "models", edges, or a path', _graph),
    )
    graph_penalty: float = setting(
        0.01,
        "lambda: penalty on the difference along an edge; 0 = independent models.",
        Range(0),
    )
    graph_neighbours: int = setting(
        5,
        "Neighbours that each site chooses; two sites have an edge if either chose "
        "the other.",
        Range(1),
    )
    graph_epsilon: float = setting(
        0.0,
        "Epsilon of the summaries for the graph alone, per row (delta is "
        "privacy.delta); 0 = no noise.",
        Range(0),
    )
    baselines: bool = setting(
        True,
        "Also train one model for all sites, and a model of each site alone, for "
        "comparison.",
    )


def summaries_of(settings: Settings) -> str:
    """Return the data behind the graph of similar sites."""
    graph = settings.of(PersonalisedSettings).graph
    return graph if graph in SUMMARIES else NO_GRAPH


def _conflicts(settings: Settings) -> Iterator[str]:
    """Refuse modes, mechanisms and models that a model per site has no use for."""
    strategy = settings.method_name
    values = settings.of(PersonalisedSettings)
    if settings.mode == EXPLAIN:
        yield f"mode: 'explain' explains joins; strategy {strategy!r} has none"
    for kind in settings.privacy.covered("features", "labels", "predictions"):
        yield (
            f"privacy.{kind}: strategy {strategy!r} does not use it: labels and rows "
            "stay at the sites; gradients and metrics leave without noise "
            "(graph-epsilon puts noise on the graph's summaries)"
        )
    models = {model for _, model in settings.models} or {settings.model}
    if values.personal == LAST and models != {MLP}:
        yield "personal: 'last' is the last layer of model 'mlp'"
    if named_coordinates(values.personal) and models != {LINEAR}:
        yield "personal: a list of features needs model 'linear'"
    if values.graph_epsilon and values.graph not in (
        BY_DATA,
        BY_FEATURES,
    ):
        yield (
            "graph-epsilon: noise is for the summaries of graph "
            f"{BY_DATA!r} and {BY_FEATURES!r}, not for {values.graph!r}"
        )


def _begins(settings: Settings) -> bool:
    return settings.mode == TRAIN and not settings.method.joins


RULES: Final = Rules(
    groups=(PersonalisedSettings,),
    reads=names_of(PersonalisedSettings)
    | {"tolerance", "l2", "batch_size", "learning_rate", "local_epochs"},
    conflicts=_conflicts,
    begins={TRAIN_PERSONALISE: _begins},
)
