"""Settings of personalised models: which coordinates, which graph, which updates."""

from dataclasses import dataclass
from typing import Final

from tp_flower.methods import BY_MODELS, PERSONAL, SUMMARIES
from tp_flower.settings.declare import OneOf, Range, Readers, Text, of_families, setting

EVERYTHING: Final = "*"
"""All coordinates of a site's model are personal."""
LAST: Final = "last"
"""Those of an MLP's last layer are."""
INTERCEPT: Final = "(intercept)"

EQUAL, BY_ROWS = "equal", "rows"

_ALONE: Final = Readers(
    of_families(PERSONAL),
    refusal="is of strategy 'personalised' alone, not {strategy!r}",
)


def named_coordinates(personal: str) -> tuple[str, ...]:
    """Return the features that a list names; none for "*", "" and "last".

    >>> named_coordinates("age, (intercept)")
    ('age', '(intercept)')
    """
    if personal in (EVERYTHING, LAST) or not personal.strip():
        return ()
    return tuple(part.strip() for part in personal.split(","))


def _personal_problem(text: str) -> str | None:
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(parts):
        return f"{text!r} has an empty name: list features such as 'age, (intercept)'"
    twice = sorted({name for name in parts if parts.count(name) > 1})
    if twice:
        return f"names {', '.join(twice)} more than once"
    alone = sorted({EVERYTHING, LAST} & set(parts))
    if alone and len(parts) > 1:
        return f"{alone[0]!r} stands alone, not in a list of features"
    return None


def _graph_problem(text: str) -> str | None:
    if text.strip():
        return None
    return (
        f"is empty: it must be one of {', '.join(SUMMARIES)}, a list of edges such as "
        "'a-b, b-c', or the path of a file with such a list"
    )


@dataclass(frozen=True)
class PersonalisedSettings:
    """Strategy "personalised": each site's model, drawn to those of similar sites."""

    personal: str = setting(
        EVERYTHING,
        'Coordinates that each site has for itself: "*" all; "" none (one model for '
        'all); "last": an MLP\'s last layer; or features, "age, (intercept)".',
        Text('"*", "", "last", or features, comma separated', _personal_problem),
        _ALONE,
    )
    graph: str = setting(
        BY_MODELS,
        'Which sites are similar: nearest neighbours by "data" (kernel mean '
        'embedding), "features" (covariance) or "models" (of sites alone); or edges '
        '"a-b, b-c" between sites, or the path of a file with such a list.',
        Text('"data", "features", "models", edges, or a path', _graph_problem),
        _ALONE,
    )
    graph_penalty: float = setting(
        0.01,
        "lambda: the price of an edge whose two sites differ; 0 = independent models.",
        Range(0),
        _ALONE,
    )
    graph_norm: str = setting(
        "2",
        'Norm of the difference along an edge: "1", "2" or "inf".',
        OneOf(("1", "2", "inf")),
        _ALONE,
    )
    graph_weights: str = setting(
        EQUAL,
        'Weight of an edge in lambda: "equal", or "rows": as sqrt(1/n_i + 1/n_j), so '
        "that sites with few rows are drawn more.",
        OneOf((EQUAL, BY_ROWS)),
        _ALONE,
    )
    graph_neighbours: int = setting(
        5,
        "Neighbours that each site looks for; an edge is there where one of its two "
        "sites has chosen the other.",
        Range(1),
        _ALONE,
    )
    graph_epsilon: float = setting(
        0.0,
        "Epsilon of the noise on the summaries for the graph, per row (delta is "
        "privacy.delta); 0 = no noise.",
        Range(0),
        _ALONE,
    )
    update_penalty: float = setting(
        0.0,
        "gamma: makes the updates piecewise constant, which shortens them; it falls "
        "from round to round. 0 = gradients unchanged.",
        Range(0),
        _ALONE,
    )
    update_clusters: int = setting(
        0,
        "Encoded updates: distinct values in each, by k-means, at most 256; 0 = as "
        "many as there are.",
        Range(0, 257),
        _ALONE,
    )
    baselines: bool = setting(
        True,
        "Train one model for all sites and a model of each site alone besides, to "
        "compare with.",
        read_by=_ALONE,
    )
