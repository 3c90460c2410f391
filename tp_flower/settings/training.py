"""Settings of the training methods and of the models that they train."""

import re
from dataclasses import dataclass
from typing import ClassVar, Final

from tp_flower import methods
from tp_flower.learning.models.local_model import LINEAR, MOST_LAYERS
from tp_flower.methods.boost.messages import BAGGED, LARGE_SHARD, LOCAL, POOLED
from tp_flower.methods.coreset.messages import MOST_CLUSTERS, MOST_SAMPLED
from tp_flower.methods.personalised.messages import BY_MODELS, SUMMARIES
from tp_flower.objectives import names_of_losses
from tp_flower.settings.declare import (
    Form,
    OneOf,
    Range,
    Readers,
    items_of,
    list_of,
    setting,
)
from tp_flower.settings.run import AUTO, model_name

GRAM: Final = "gram"
BY_FAMILY: Final = {
    methods.ADMM: (GRAM, "consensus"),
    methods.BOOST: (LOCAL, BAGGED, POOLED),
}
"""How the shards of a table may train together, by family of methods."""


@dataclass(frozen=True)
class AdmmSettings:
    """ADMM, over the tables and over the shards of a table."""

    readers: ClassVar = Readers(methods.of_families(methods.ADMM))

    rho: float = setting(
        0.0,
        "ADMM penalty; 0 = from the curvature of the loss, then residual balancing.",
        Range(0),
    )
    over_relaxation: float = setting(
        0.0,
        "ADMM over-relaxation, below 2; 1 = off, 0 = 1.5, or 1 under noise.",
        Range(0, 2),
    )
    lou: str = setting(
        AUTO,
        'How a table\'s shards train. ADMM: "gram" (exact, linear models), "consensus" '
        '(any model); "auto": gram where its model is linear. "boost": "local" (each '
        'shard grows its own trees), "bagged" (the average of all shards\' trees, '
        'which they show each other), "pooled" (trees of one column each, grown on '
        'sums that the shards show each other); "auto": local and bagged, until the '
        "validation rows prefer local; without validation rows bagged, but local from "
        f"{LARGE_SHARD:,} joined rows a shard on; and pooled where a table's "
        "shards tell the label.",
        OneOf((AUTO, *BY_FAMILY[methods.ADMM], *BY_FAMILY[methods.BOOST])),
        Readers(methods.of_families(*BY_FAMILY)),
    )
    local_epochs: int = setting(
        0,
        "Passes over a shard's rows in one local update of a non-linear model; 0 = 4 "
        '(at least 100 steps). "personalised": passes in a round; 0 = 1, which is one '
        "step if batch-size is 0.",
        Range(0),
        Readers(methods.of_families(methods.ADMM, methods.PERSONAL)),
    )


@dataclass(frozen=True)
class SgdSettings:
    """Stochastic gradient descent, and local updates that use it."""

    batch_size: int = setting(
        0,
        'SGD: joined rows per batch; 0 = a hundredth of them. "gd" takes 0 only: all '
        'of them. "personalised": rows of a site\'s step; 0 = all, accelerated.',
        Range(0),
        Readers(methods.of_families(methods.SGD, methods.PERSONAL)),
    )
    learning_rate: float = setting(
        0.0,
        "Step size of SGD and of local updates; SGD divides it by the number of the "
        'epoch, "gd" keeps it; 0 = chosen, and halved when the loss stalls.',
        Range(0),
        Readers(methods.of_families(methods.ADMM, methods.SGD, methods.PERSONAL)),
    )


MLP: Final = "mlp"

_LOSSES: Final = ", ".join(f'"{name}"' for name in names_of_losses())
_FACTORY: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_MODEL_FORMS: Final = '"linear", "mlp" or "package.module:factory"'
_ITERATIVE: Final = Readers(
    methods.of_families(methods.ADMM, methods.CG, methods.SGD, methods.PERSONAL)
)


def _model(model: object) -> str:
    if isinstance(model, str) and (model in (LINEAR, MLP) or _FACTORY.fullmatch(model)):
        return model
    raise ValueError(f"{model!r} is not a model: it must be {_MODEL_FORMS}")


def _models(value: object) -> tuple[tuple[str, str], ...]:
    pairs = value
    if isinstance(value, str):
        pairs = tuple(
            tuple(part.strip() for part in item.split("=")) for item in items_of(value)
        )
    if not isinstance(pairs, tuple) or not all(len(p) == 2 and all(p) for p in pairs):
        example = '"flights=mlp, planes=linear"'
        raise ValueError(f"{value!r} is not a list such as {example}")
    models = tuple((alias, _model(model)) for alias, model in pairs)
    aliases = [alias.lower() for alias, _ in models]
    if twice := {alias for alias in aliases if aliases.count(alias) > 1}:
        raise ValueError(f"names {', '.join(sorted(twice))} more than once")
    return models


_MODELS: Final = Form(
    "<table>=<model>, ...", _models, lambda pairs: ", ".join(map("=".join, pairs))
)
_WIDTHS: Final = list_of(
    lambda width: int(str(width)),
    'a comma-separated list of widths of at least 1, such as "16,8", and '
    f"{MOST_LAYERS} at most",
    lambda widths: 1 <= len(widths) <= MOST_LAYERS and min(widths) >= 1,
)


@dataclass(frozen=True)
class ModelSettings:
    """The models, their objective, and when training ends."""

    num_epochs: int = setting(
        0,
        "Passes over the joined rows; 0 = until converged, at most 100 for CG, ADMM, "
        '"gd" and "boost" (6 without validation rows), 30 for SGD, 60 for '
        '"personalised"; with noise or a coreset 12 for ADMM, 10 for SGD.',
        Range(0),
    )
    tolerance: float = setting(
        0.0,
        "Stop when the residuals (ADMM), the gradient norm (CG), the change of the "
        'loss (SGD) or of the models ("personalised") fall below it, for CG in '
        "four epochs or by a factor of five; 0 = 0.003 for CG, off for others.",
        Range(0),
        _ITERATIVE,
    )
    model: str = setting(
        LINEAR,
        f"Model of each table: {_MODEL_FORMS.replace(' or', ', or')}.",
        Form(_MODEL_FORMS, _model),
    )
    models: tuple[tuple[str, str], ...] = setting(
        (),
        "Tables with another model than `model`, by alias: "
        '"flights=mlp, planes=linear".',
        _MODELS,
    )
    hidden_sizes: tuple[int, ...] = setting(
        (16,),
        'Hidden layers of "mlp": widths, comma separated.',
        Form("widths, comma separated", _WIDTHS),
    )
    l2: float = setting(
        1e-4,
        "Weight of the penalty 1/2 ||theta||^2, no biases; of MLPs times the label's "
        "variance.",
        Range(0),
        Readers(
            methods.of_families(
                methods.ADMM, methods.CG, methods.SGD, methods.CORESET, methods.PERSONAL
            ),
            refusal="strategy {strategy!r} has no such penalty: fewer leaves, or a "
            "higher min-rows-per-leaf, bound trees",
        ),
    )
    loss: str = setting(
        AUTO,
        f'{_LOSSES}, or "auto": from the task and the number of classes.',
        OneOf((AUTO, *names_of_losses()), names_of_losses),
    )


LEAVES, FEWEST_LEAVES, ROWS_PER_LEAF = 127, 7, 1_500
# larger trees fit the training rows alone, where a model came before
LEAVES_OF_REST: Final = 15
TREES, FEWEST_TREES, ROWS_PER_TREE = 30, 10, 500
"""How many leaves and trees by default: one for so many joined training rows, within
bounds."""
STEADY_TREES: Final = 50
"""Trees, about, that have not lowered the validation loss when training ends."""


def leaves_by_rows(joined_rows: int, most: int = LEAVES) -> int:
    """Return the default of ``leaves`` for so many joined training rows.

    >>> [leaves_by_rows(rows) for rows in (400, 15_000, 217_000)]
    [7, 10, 127]
    """
    return min(max(joined_rows // ROWS_PER_LEAF, FEWEST_LEAVES), most)


def trees_by_rows(joined_rows: int) -> int:
    """Return the default of ``trees-per-round`` for so many joined training rows.

    >>> [trees_by_rows(rows) for rows in (400, 10_000, 217_000)]
    [10, 20, 30]
    """
    return min(max(joined_rows // ROWS_PER_TREE, FEWEST_TREES), TREES)


def patience_by_trees(trees: int) -> int:
    """Return the default of ``patience`` for so many trees in a round.

    >>> [patience_by_trees(trees) for trees in (10, 20, 30, 100)]
    [5, 2, 2, 2]
    """
    return max(STEADY_TREES // trees, 2)


def _leaves(value: int) -> int:
    if value == 0 or 2 <= value <= 1 << 16:
        return value
    raise ValueError(f"{value!r} is neither 0 nor from 2 to 65536")


@dataclass(frozen=True)
class BoostSettings:
    """Boosted trees: how many, how large, and how bold."""

    readers: ClassVar = Readers(methods.of_families(methods.BOOST))

    trees_per_round: int = setting(
        0,
        "Trees that each table grows in a round (an epoch); 0 = one for each "
        f"{ROWS_PER_TREE} joined training rows, {FEWEST_TREES} to {TREES}, or {TREES} "
        "without validation rows.",
        Range(0, 10_001),
    )
    leaves: int = setting(
        0,
        f"Leaves of a tree, at most; 0 = one for each {ROWS_PER_LEAF:,} joined "
        f"training rows, {FEWEST_LEAVES} to {LEAVES}, or to {LEAVES_OF_REST} with "
        "`boost-from`.",
        Form("0, or from 2 to 65536", _leaves),
    )
    tree_rate: float = setting(
        0.1,
        "Share of its best fit that a tree adds, above 0.",
        Range(0, 1.0 + 1e-9, includes_low=False),
    )
    min_rows_per_leaf: int = setting(
        20, "Joined rows that a leaf has at least.", Range(1, 1 << 31)
    )
    boost_from: str = setting(
        "",
        "Saved model to start from, trained on the same query and the same rows "
        '("name@version"; "name" = the latest); "" = a constant score.',
        Form("name, name@version", lambda text: text and model_name(text)),
    )


IMPORTANCE: Final = "importance"
UNIFORM: Final = "uniform"

EXACT: Final = "exact"
SAGA: Final = "saga"
DISTDIM: Final = "distdim"


@dataclass(frozen=True)
class CoresetSettings:
    """Coresets: training on a weighted sample of the joined rows."""

    coreset_size: int = setting(
        0,
        "Number of joined rows, drawn with weights, to train on; 0 = no coreset: all "
        "rows (2000 for the strategies coreset-*).",
        Range(0, MOST_SAMPLED + 1),
        Readers(
            methods.JOINING,
            refusal=(
                "needs joined rows; strategy {strategy!r} trains on every row: leave "
                "it 0"
            ),
        ),
    )
    coreset_kind: str = setting(
        IMPORTANCE,
        'How coreset rows are drawn: "importance" (by how much each table\'s rows '
        'matter) or "uniform" (without reading any row).',
        OneOf((IMPORTANCE, UNIFORM)),
        Readers(methods.JOINING),
    )
    coreset_solver: str = setting(
        AUTO,
        'Solver on the coreset. coreset-ridge: "exact" or "saga"; '
        'coreset-kmeans: "kmeans++" or "distdim"; "auto" = the first.',
        OneOf((AUTO, EXACT, SAGA, "kmeans++", DISTDIM)),
        Readers(methods.of_families(methods.CORESET)),
    )
    clusters: int = setting(
        10,
        "coreset-kmeans: number of centres.",
        Range(1, MOST_CLUSTERS + 1),
        Readers(("coreset-kmeans",)),
    )
    l1: float = setting(
        0.0,
        "coreset-ridge: weight of the penalty ||theta||_1; above 0 makes it a lasso, "
        "together with l2 an elastic net.",
        Range(0),
        Readers(
            ("coreset-ridge",),
            refusal="strategy {strategy!r} has no such penalty: leave it 0",
        ),
    )


EVERYTHING: Final = "*"  # all coordinates of a site's model are personal
LAST: Final = "last"  # the parameters of an MLP's last layer are personal
INTERCEPT: Final = "(intercept)"


def named_coordinates(personal: str) -> tuple[str, ...]:
    """Return the features that a list names; none for "*", "" and "last".

    >>> named_coordinates("age, (intercept)")
    ('age', '(intercept)')
    """
    return () if personal in (EVERYTHING, LAST) else items_of(personal)


def _personal(text: str) -> str:
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

    readers: ClassVar = Readers(
        methods.of_families(methods.PERSONAL),
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
