"""What a run does, with which saved model, and what happens without a site.

The checks of the settings ``mode``, ``resume``, ``on-missing``, ``model-name``,
``row-key``, ``predictions-at`` and ``track``, and of how they go together.
"""

import re
from collections.abc import Mapping
from typing import Final

from tp_flower.methods import ADMM, CORESET, METHODS, SGD

TRAIN: Final = "train"
EXPLAIN: Final = "explain"
PREDICT: Final = "predict"
EVALUATE: Final = "evaluate"

STOP: Final = "stop"
STALE: Final = "stale"
MEAN: Final = "mean"

SERVER: Final = "server"
LABEL_SITE: Final = "label-site"

TRACKERS: Final = ("tensorboard", "mlflow")

NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""Of a saved model."""

VERSION: Final = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{4}")
"""Of a saved model: when its run started, and the start of the run's name."""

_COLUMN: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?")

_ON_MISSING: Final[Mapping[str, tuple[str, ...]]] = {
    TRAIN: (STOP, STALE),
    EXPLAIN: (STOP,),
    PREDICT: (STOP, MEAN),
    EVALUATE: (STOP, MEAN),
}


def model_name_problem(text: str) -> str | None:
    """Return what is wrong with ``name`` or ``name@version``."""
    name, at, version = text.partition("@")
    if not NAME.fullmatch(name):
        return (
            f"{name!r} is no name of a model: it must begin with a-z or 0-9 and have "
            "at most 64 of a-z, 0-9, '.', '_' and '-'"
        )
    if at and not VERSION.fullmatch(version):
        return f"{version!r} is no version of a model, such as '20261121-093000-1a2b'"
    return None


def row_key_problem(text: str) -> str | None:
    """Return what is wrong with a comma-separated list of columns; "" is none."""
    wrong = [part for part in columns_of(text) if not _COLUMN.fullmatch(part)]
    if wrong:
        return f'{wrong[0]!r} is no column such as "f.flight" or "flight"'
    return None


def track_problem(text: str) -> str | None:
    """Return what is wrong with a comma-separated list of trackers; "" is none."""
    wrong = [part for part in columns_of(text) if part not in TRACKERS]
    if wrong:
        return f"{wrong[0]!r} is not one of {', '.join(TRACKERS)}"
    return None


def columns_of(text: str) -> tuple[str, ...]:
    """Return the parts of a comma-separated list.

    >>> columns_of("f.flight, f.time_hour")
    ('f.flight', 'f.time_hour')
    """
    return tuple(part.strip() for part in text.split(",")) if text.strip() else ()


def mode_problems(values: Mapping[str, object]) -> list[str]:
    """Return what of the settings, by key, does not go with the run's mode.

    Args:
        values: that are fine alone; keys may be missing.
    """
    mode, problems = str(values.get("mode", TRAIN)), []
    wanted = str(values.get("on-missing", STOP))
    if wanted not in _ON_MISSING[mode]:
        allowed = ", ".join(_ON_MISSING[mode])
        problems.append(
            f"on-missing: {wanted!r} does not go with mode {mode!r}: use {allowed}"
        )
    family = METHODS[str(values.get("strategy", ADMM))].family
    if wanted == STALE and family in (SGD, CORESET):
        problems.append(
            f"on-missing: {STALE!r} needs the last scores of all rows, which strategy "
            f"{values['strategy']!r} does not have at the server: use admm, or stop"
        )
    if values.get("resume") and mode != TRAIN:
        problems.append(f"resume: only training is resumed, not mode {mode!r}")
    if "@" in str(values.get("model-name", "")) and mode in (TRAIN, EXPLAIN):
        problems.append(
            f"model-name: a version is of a model that was trained; mode {mode!r} "
            "takes a name alone, and makes the version"
        )
    if mode != PREDICT:
        problems += [
            f"{key}: is of mode {PREDICT!r} alone, not {mode!r}"
            for key, usual in (("row-key", ""), ("predictions-at", SERVER))
            if values.get(key, usual) != usual
        ]
    return problems
