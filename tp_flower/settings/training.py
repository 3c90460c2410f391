"""Settings of the methods that train in epochs: ADMM and gradient descent."""

import re
from dataclasses import dataclass
from typing import Final

from tp_flower.methods import ADMM, CORESET, PERSONAL, SGD
from tp_flower.protocol.coreset_messages import MOST_CLUSTERS, MOST_SAMPLED
from tp_flower.settings.declare import (
    ListOf,
    OneOf,
    Range,
    Readers,
    Text,
    has_type,
    of_families,
    setting,
)
from tp_flower.settings.run import AUTO

SHARING: Final = "sharing"
JACOBI: Final = "jacobi"
GRAM: Final = "gram"
CONSENSUS: Final = "consensus"

_ADMM: Final = Readers(of_families(ADMM))
_SGD: Final = Readers(of_families(SGD))
_BATCHES: Final = Readers(("sgd", "vfl-sgd"))


@dataclass(frozen=True)
class AdmmSettings:
    """ADMM, over the tables and over the shards of a table."""

    admm_form: str = setting(
        SHARING,
        'ADMM over the tables: "sharing" (converges for every rho) or "jacobi" (as in '
        "the paper).",
        OneOf((SHARING, JACOBI)),
        _ADMM,
    )
    rho: float = setting(
        0.0,
        "ADMM penalty; 0 = from the curvature of the loss, then residual balancing.",
        Range(0),
        _ADMM,
    )
    over_relaxation: float = setting(
        0.0,
        "ADMM over-relaxation, below 2; 1 = off, 0 = 1.5 where Anderson mixing is not "
        "used, else 1.",
        Range(0, 2),
        _ADMM,
    )
    anderson_memory: int = setting(
        5,
        "Epochs that Anderson acceleration looks back on; 0 = off.",
        Range(0),
        _ADMM,
    )
    lou: str = setting(
        AUTO,
        'ADMM over the shards of a table: "gram" (exact, linear models), "consensus" '
        '(any model), or "auto": gram where the table\'s model is linear.',
        OneOf((AUTO, GRAM, CONSENSUS)),
        _ADMM,
    )
    inner_rounds: int = setting(
        1, "Rounds of consensus between shards per epoch.", Range(1), _ADMM
    )
    local_epochs: int = setting(
        0,
        "Passes over a shard's rows in one local update of a non-linear model; 0 = 4 "
        '(at least 100 steps). "personalised": passes in a round; 0 = 1, which is one '
        "step if batch-size is 0.",
        Range(0),
        Readers(of_families(ADMM, PERSONAL)),
    )


@dataclass(frozen=True)
class SgdSettings:
    """Stochastic gradient descent, and local updates by it."""

    batch_size: int = setting(
        0,
        'SGD: joined rows per batch; 0 = a hundredth of them. "gd" takes 0 only: all '
        'of them. "personalised": rows of a site\'s step; 0 = all, accelerated.',
        Range(0),
        Readers(of_families(SGD, PERSONAL)),
    )
    learning_rate: float = setting(
        0.0,
        "Step size of SGD and of local updates; 0 = chosen.",
        Range(0),
        Readers(of_families(ADMM, SGD, PERSONAL)),
    )
    momentum: float = setting(
        0.9, 'SGD and "gd": momentum, in [0, 1).', Range(0, 1), _SGD
    )
    decay: float = setting(
        1.0,
        "SGD: the step size of epoch e = 0, 1, ... is learning-rate / (1 + decay * e); "
        'that of "gd" stays.',
        Range(0),
        _BATCHES,
    )
    staleness: int = setting(
        0,
        "SGD with sharded tables: 0 = two rounds per batch; 1 = one, and their models "
        "are one step late.",
        Range(0, 2),
        _BATCHES,
    )


LINEAR: Final = "linear"
MLP: Final = "mlp"
SQUARED, LOGISTIC, SOFTMAX = "squared", "logistic", "softmax"

_FACTORY: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_MODEL_FORMS: Final = '"linear", "mlp" or "package.module:factory"'
_ITERATIVE: Final = Readers(of_families(ADMM, SGD, PERSONAL))


def _model_problem(model: object) -> str | None:
    is_factory = isinstance(model, str) and _FACTORY.fullmatch(model)
    if is_factory or model in (LINEAR, MLP):
        return None
    return f"{model!r} is not a model: it must be {_MODEL_FORMS}"


def _models_problem(value: object) -> str | None:
    if not isinstance(value, tuple) or any(len(pair) != 2 for pair in value):
        return f"{value!r} is not a list of table=model pairs"
    aliases = [alias.lower() for alias, _ in value]
    twice = sorted({alias for alias in aliases if aliases.count(alias) > 1})
    if twice:
        return f"names {', '.join(twice)} more than once"
    wrong = [_model_problem(model) for _, model in value]
    return next((problem for problem in wrong if problem), None)


def _parse_models(value: object) -> object:
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",") if part.strip()]
    if any(not (alias.strip() and model.strip()) for alias, _, model in pairs):
        message = f'{value!r} is not a list such as "flights=mlp, planes=linear"'
        raise ValueError(message)
    return tuple((alias.strip(), model.strip()) for alias, _, model in pairs)


def _render_models(pairs: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{alias}={model}" for alias, model in pairs)


def _widths_problem(value: object) -> str | None:
    widths = value if isinstance(value, tuple) else ()
    if not widths or not all(has_type(width, int) and width > 0 for width in widths):
        return f"{value!r} is not a list of widths of at least 1"
    return None


def _parse_widths(value: object) -> object:
    # `-c hidden-sizes=16` sends an int
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if not isinstance(value, str):
        return value
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        message = f'{value!r} is not a comma-separated list of widths such as "16,8"'
        raise ValueError(message) from None


def _render_widths(widths: tuple[int, ...]) -> str:
    return ",".join(map(str, widths))


@dataclass(frozen=True)
class ModelSettings:
    """The models, their objective, and when training ends."""

    num_epochs: int = setting(
        0,
        'Passes over the joined rows; 0 = 12 for ADMM, 10 for SGD, 100 for "gd"; of '
        '"personalised", rounds: 60.',
        Range(0),
    )
    tolerance: float = setting(
        0.0,
        "Stop when the residuals (ADMM), the change of the loss (SGD) or of the models "
        '("personalised") fall below it; 0 = off.',
        Range(0),
        _ITERATIVE,
    )
    model: str = setting(
        LINEAR,
        f"Model of each table: {_MODEL_FORMS.replace(' or', ', or')}.",
        Text(_MODEL_FORMS, _model_problem),
    )
    models: tuple[tuple[str, str], ...] = setting(
        (),
        "Tables with another model than `model`, by alias: "
        '"flights=mlp, planes=linear".',
        ListOf("<table>=<model>, ...", _models_problem, _parse_models, _render_models),
    )
    hidden_sizes: tuple[int, ...] = setting(
        (16,),
        'Hidden layers of "mlp": widths, comma separated.',
        ListOf(
            "widths, comma separated", _widths_problem, _parse_widths, _render_widths
        ),
    )
    l2: float = setting(
        1e-4, "Weight of the penalty 1/2 ||theta||^2 (biases are free).", Range(0)
    )
    loss: str = setting(
        AUTO,
        '"squared", "logistic", "softmax", or "auto": from the task and the number of '
        "classes.",
        OneOf((AUTO, SQUARED, LOGISTIC, SOFTMAX)),
    )


IMPORTANCE: Final = "importance"
UNIFORM: Final = "uniform"

EXACT: Final = "exact"
SAGA: Final = "saga"
KMEANS: Final = "kmeans++"
DISTDIM: Final = "distdim"

_JOINING: Final = of_families(ADMM, SGD, CORESET)


@dataclass(frozen=True)
class CoresetSettings:
    """Coresets: training on a weighted sample of the joined rows."""

    coreset_size: int = setting(
        0,
        "Train on a coreset: so many joined rows, drawn with weights; 0 = on all of "
        "them (2000 for the strategies coreset-*).",
        Range(0, MOST_SAMPLED + 1),
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
