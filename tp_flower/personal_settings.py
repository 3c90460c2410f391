"""The settings of personalised models: which coordinates, which graph, which updates.

The checks of ``personal``, ``graph`` and ``graph-*``, ``update-*`` and ``baselines``,
and of how they go together with the others.
"""

from collections.abc import Mapping
from typing import Final

from tp_flower.joins.row_weights import JOINED
from tp_flower.methods import METHODS, PERSONAL
from tp_flower.privacy.settings import PrivacySettings

EVERYTHING: Final = "*"
"""All coordinates of a site's model are its own."""
LAST: Final = "last"
"""Those of an MLP's last layer are."""
INTERCEPT: Final = "(intercept)"

DATA: Final = "data"
FEATURES: Final = "features"
MODELS: Final = "models"
SUMMARIES: Final = (DATA, FEATURES, MODELS)
"""What of the sites a similarity graph is made of."""

NORMS: Final = ("1", "2", "inf")
EQUAL, BY_ROWS = "equal", "rows"
EDGE_WEIGHTS: Final = (EQUAL, BY_ROWS)
LINEAR: Final = "linear"
MLP: Final = "mlp"

_USUAL: Final[Mapping[str, object]] = {
    "personal": EVERYTHING,
    "graph": MODELS,
    "graph-penalty": 0.01,
    "graph-norm": "2",
    "graph-weights": EQUAL,
    "graph-neighbours": 5,
    "graph-epsilon": 0.0,
    "update-penalty": 0.0,
    "update-clusters": 0,
    "baselines": True,
}


def personal_problem(text: str) -> str | None:
    """Return what is wrong with "*", "", "last" or a comma list of features."""
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


def named_coordinates(personal: str) -> tuple[str, ...]:
    """Return the features that a list names; none for "*", "" and "last".

    >>> named_coordinates("age, (intercept)")
    ('age', '(intercept)')
    """
    if personal in (EVERYTHING, LAST) or not personal.strip():
        return ()
    return tuple(part.strip() for part in personal.split(","))


def graph_problem(text: str) -> str | None:
    """Return what is wrong with a kind of summary, a list of edges or a path."""
    if text.strip():
        return None
    return (
        f"is empty: it must be one of {', '.join(SUMMARIES)}, a list of edges such as "
        "'a-b, b-c', or the path of a file with such a list"
    )


def personal_problems(values: Mapping[str, object]) -> list[str]:
    """Return what of these settings, by key, does not go with the others.

    Args:
        values: that are fine alone; keys may be missing.
    """
    strategy = str(values.get("strategy", "admm"))
    if METHODS[strategy].family != PERSONAL:
        return [
            f"{key}: is of strategy 'personalised' alone, not {strategy!r}"
            for key, usual in _USUAL.items()
            if values.get(key, usual) != usual
        ]
    return [
        *_unusable(values, strategy),
        *_model_problems(values),
        *_update_problems(values),
        *_graph_problems(values),
    ]


def _unusable(values: Mapping[str, object], strategy: str) -> list[str]:
    """Refuse what has no meaning where labels and rows stay at the sites."""
    problems = []
    if values.get("mode") == "explain":
        problems.append(
            f"mode: 'explain' is about joins, which strategy {strategy!r} has none of"
        )
    if values.get("row-weight", JOINED) != JOINED:
        problems.append(
            f"row-weight: {values['row-weight']!r} is of joined rows; strategy "
            f"{strategy!r} has none: leave it {JOINED!r}"
        )
    if values.get("coreset-size"):
        problems.append(
            f"coreset-size: is of joined rows; strategy {strategy!r} trains on every "
            "row: leave it 0"
        )
    privacy = values.get("privacy")
    if isinstance(privacy, PrivacySettings):
        covered = {
            "features": privacy.covers_features,
            "labels": privacy.covers_labels,
            "predictions": privacy.covers_predictions,
            "statistics": privacy.covers_statistics,
        }
        problems += [
            f"privacy.{key}: strategy {strategy!r} goes without: labels and rows stay "
            "at the sites, and gradients and metrics leave as they are (graph-epsilon "
            "puts noise on the graph's summaries)"
            for key, is_covered in covered.items()
            if is_covered
        ]
    return problems


def _model_problems(values: Mapping[str, object]) -> list[str]:
    personal = str(values.get("personal", EVERYTHING))
    model = str(values.get("model", LINEAR))
    named = {own for _, own in _pairs(values.get("models"))} or {model}
    problems = []
    if personal == LAST and named != {MLP}:
        problems.append("personal: 'last' is the last layer of model 'mlp'")
    if named_coordinates(personal) and named != {LINEAR}:
        problems.append("personal: a list of features needs model 'linear'")
    return problems


def _pairs(models: object) -> tuple[tuple[str, str], ...]:
    return models if isinstance(models, tuple) else ()


def _update_problems(values: Mapping[str, object]) -> list[str]:
    if values.get("update-clusters") and not values.get("update-penalty"):
        return ["update-clusters: is of encoded updates: set update-penalty above 0"]
    return []


def _graph_problems(values: Mapping[str, object]) -> list[str]:
    problems, graph = [], values.get("graph", MODELS)
    if values.get("graph-epsilon") and graph not in (DATA, FEATURES):
        problems.append(
            f"graph-epsilon: noise is for the summaries of graph {DATA!r} and "
            f"{FEATURES!r}, not for {graph!r}"
        )
    return problems
