"""Settings of training that several methods read, and of the models that they train."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tp_flower.arrays import FEWEST_BINS, MOST_BINS
from tp_flower.learning.models.local_model import LINEAR, MOST_LAYERS
from tp_flower.methods.method import METHODS
from tp_flower.objectives import family_named, forms_of_losses
from tp_flower.protocol.training_messages import MOST_FACTORS, MOST_SAMPLED
from tp_flower.settings.declare import (
    AUTO,
    BY_METHOD,
    Form,
    OneOf,
    Range,
    Readers,
    items_of,
    list_of,
    setting,
)

if TYPE_CHECKING:
    from tp_flower.settings.settings import Settings

GRAM: Final = "gram"
NONE: Final = "none"
OVER_JOINS: Final = frozenset(
    {"sample", "test_split", "row_weight", "coreset_size", "coreset_kind"}
)
"""Settings that methods over joins read, and those whose epochs can be chosen from."""
FITTED: Final = OVER_JOINS | frozenset(
    {"validation_fraction", "effects", "factors", "bins", "server_workers"}
)


def _unions() -> tuple[str, ...]:
    """Return how the shards of a table may train together, by any method."""
    return tuple(name for method in METHODS.values() for name in method.unions)


@dataclass(frozen=True)
class LocalSettings:
    """Local updates: of the shards of a table, by passes, batches and steps."""

    lou: str = setting(
        AUTO,
        'How a table\'s shards train. ADMM: "gram" (exact, linear models), "consensus" '
        '(any model); "auto": gram where its model is linear. "boost": "local" (each '
        'shard grows its own trees), "bagged" (the average of all shards\' trees, '
        'which they show each other), "pooled" (trees of one column each, grown on '
        'sums that the shards show each other); "auto": local and bagged, until the '
        "validation rows prefer local; without validation rows bagged, but local from "
        "50,000 joined rows a shard on; and pooled where a table's "
        "shards tell the label.",
        OneOf((AUTO,), _unions),
        BY_METHOD,
    )
    local_epochs: int = setting(
        0,
        "Passes over a shard's rows in one local update of a non-linear model; 0 = 4 "
        '(at least 100 steps). "personalised": passes in a round; 0 = 1, which is one '
        "step if batch-size is 0.",
        Range(0),
        BY_METHOD,
    )
    batch_size: int = setting(
        0,
        'SGD: joined rows per batch; 0 = a hundredth of them. "gd" takes 0 only: all '
        'of them. "personalised": rows of a site\'s step; 0 = all, accelerated.',
        Range(0),
        BY_METHOD,
    )
    learning_rate: float = setting(
        0.0,
        "Step size of SGD and of local updates; SGD divides it by the number of the "
        'epoch, "gd" keeps it; 0 = chosen, and halved when the loss stalls.',
        Range(0),
        BY_METHOD,
    )


MLP: Final = "mlp"

_LOSSES: Final = ", ".join(f'"{name}"' for name in (AUTO, *forms_of_losses()))
_FACTORY: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_MODEL_FORMS: Final = '"linear", "mlp" or "package.module:factory"'


def _model(model: object) -> str:
    if isinstance(model, str) and (model in (LINEAR, MLP) or _FACTORY.fullmatch(model)):
        return model
    raise ValueError(f"{model!r} is not a model: it must be {_MODEL_FORMS}")


def _loss(name: str) -> str:
    """Return the name of a loss, or ValueError."""
    return name if name == AUTO else family_named(name).name


def _models(value: object) -> tuple[tuple[str, str], ...]:
    """Return pairs of alias and model; ValueError for a list of another form."""
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


def _effects(value: object) -> str:
    """Return "auto", "none" or aliases, comma separated; ValueError for no list."""
    aliases = items_of(str(value))
    if not aliases:
        raise ValueError(f"{value!r} names no table")
    if len(aliases) > 1 and {AUTO, NONE} & set(aliases):
        raise ValueError(f"{value!r} names tables beside {AUTO!r} or {NONE!r}")
    return ", ".join(aliases)


def _factors(value: object) -> str:
    """Return "auto", "none", or two aliases and perhaps a width: "f, p: 32"."""
    text = str(value).strip()
    if text in (AUTO, NONE):
        return text
    names, colon, width = map(str.strip, text.partition(":"))
    aliases = [alias for alias in items_of(names) if alias]
    if len({alias.lower() for alias in aliases}) != 2 or len(aliases) != 2:
        raise ValueError(f"{value!r} does not name two tables")
    if not colon:
        return ", ".join(aliases)
    if not (width.isdecimal() and 1 <= int(width) <= MOST_FACTORS):
        raise ValueError(
            f"{value!r} has no width from 1 to {MOST_FACTORS} after the colon"
        )
    return f"{', '.join(aliases)}: {int(width)}"


def _bins(value: object) -> int | str:
    """Return "auto", "none" or a number of bins; ValueError for another."""
    if value in (AUTO, NONE):
        return str(value)
    with suppress(ValueError):
        if FEWEST_BINS <= int(str(value)) <= MOST_BINS:
            return int(str(value))
    raise ValueError(f"{value!r} is neither {_BINS}")


_BINS: Final = f'"{AUTO}", "{NONE}" nor a number from {FEWEST_BINS} to {MOST_BINS}'
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
        BY_METHOD,
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
            of_methods=True,
            refusal="strategy {strategy!r} has no such penalty: {instead}",
        ),
    )
    l1: float = setting(
        0.0,
        "Weight of the penalty ||theta||_1 of least squares; above 0 makes it a lasso, "
        "together with l2 an elastic net.",
        Range(0),
        Readers(
            of_methods=True,
            refusal="strategy {strategy!r} has no such penalty: leave it 0",
        ),
    )
    loss: str = setting(
        AUTO,
        'The loss of a label, some with a parameter. "auto": from the task and the '
        "number of classes.",
        Form(_LOSSES, _loss),
    )
    effects: str = setting(
        AUTO,
        "Tables whose keys have an effect of their own on the scores beside their "
        'features (of a user, a film, a plane), by alias, or "none". "auto": where '
        "rows validate and it lowers their loss; without epsilons.",
        Form(f'"{AUTO}", "{NONE}" or aliases, comma separated', _effects),
        Readers(
            of_methods=True,
            refusal="strategy {strategy!r} fits none: {instead}",
        ),
    )
    factors: str = setting(
        AUTO,
        "Two tables whose keys have factors, by alias: numbers of a user and of a film "
        'whose products add up to a part of the score, and how many ("u, f: 32"); or '
        '"none". "auto": where effects are "auto", policies allow it '
        "(releases.factors) and it lowers the loss of the rows that validate.",
        Form(f'"{AUTO}", "{NONE}" or "<table>, <table>[: <width>]"', _factors),
        Readers(
            of_methods=True,
            refusal="strategy {strategy!r} fits none: {instead}",
        ),
    )
    bins: int | str = setting(
        AUTO,
        "Bins, at most, of each encoded column whose number the sites send the server "
        "for every row, once, so that it grows trees on the columns of all tables; "
        '"none". "auto": of two tables or more whose policies name a number '
        "(`releases.bins`), where rows validate and it lowers their loss; without "
        "epsilons.",
        Form(_BINS.replace("nor", "or"), _bins, lambda value: value),
        Readers(
            of_methods=True,
            refusal="strategy {strategy!r} grows no trees on bins: {instead}",
        ),
    )


IMPORTANCE: Final = "importance"
UNIFORM: Final = "uniform"


@dataclass(frozen=True)
class SampleSettings:
    """Coresets: training on a weighted sample of the joined rows."""

    coreset_size: int = setting(
        0,
        "Number of joined rows, drawn with weights, to train on; 0 = no coreset: all "
        "rows (2000 for the strategies coreset-*).",
        Range(0, MOST_SAMPLED + 1),
        Readers(
            of_methods=True,
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
        BY_METHOD,
    )

    def rows_to_draw(self, default: int) -> int:
        """Return the number of joined rows to draw, a method's default if none is set.

        0 trains on all rows.
        """
        return self.coreset_size or default

    @property
    def is_sampled(self) -> bool:
        """Whether the settings ask for a sample of the joined rows to train on."""
        return self.coreset_size > 0

    @property
    def is_by_importance(self) -> bool:
        """Whether drawn rows are the important ones."""
        return self.coreset_kind == IMPORTANCE


def sample_conflicts(settings: "Settings") -> Iterator[str]:
    """Yield what contradicts the sample that a run trains on."""
    if settings.start and settings.coreset_size:
        start = settings.method.starts_from.replace("_", "-")
        yield (
            f"coreset-size: {settings.coreset_size} does not go with {start}, whose "
            "scores are for all joined rows: leave it 0"
        )
    if settings.training_sample and settings.is_by_importance:
        for kind in settings.privacy.covered("features", "predictions", "labels"):
            yield (
                f"coreset-kind: 'importance' does not go with privacy.{kind}: which "
                "rows are drawn, and what they weigh, is computed from rows without "
                "noise; use 'uniform', which reads none"
            )


def problems_of_drawn_rows(loss: str, settings: "Settings") -> Iterator[str]:
    """Yield why a loss that compares rows cannot be trained on a sample of them."""
    if settings.training_sample:
        yield (
            f"coreset-size: loss {loss!r} compares each row with all that are at "
            "risk: leave it 0, or use another loss"
        )
