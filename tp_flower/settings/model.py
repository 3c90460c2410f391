"""Settings of the models, their objective and when training ends."""

import re
from dataclasses import dataclass
from typing import Final

from tp_flower.methods import ADMM, PERSONAL, SGD
from tp_flower.settings.allowed import ListOf, OneOf, Range, Text
from tp_flower.settings.declare import Readers, has_type, of_families, setting
from tp_flower.settings.run import AUTO

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
