"""Settings of a run: what it does, where it writes, and how it waits for sites."""

import re
from dataclasses import dataclass
from typing import Final

from tp_flower.methods import METHODS
from tp_flower.model_names import NAME, VERSION
from tp_flower.settings.allowed import OneOf, Range, Text
from tp_flower.settings.declare import Readers, setting

TRAIN: Final = "train"
EXPLAIN: Final = "explain"
PREDICT: Final = "predict"
EVALUATE: Final = "evaluate"
MODES: Final = (TRAIN, EXPLAIN, PREDICT, EVALUATE)

SERVER: Final = "server"
LABEL_SITE: Final = "label-site"

STOP: Final = "stop"
STALE: Final = "stale"
MEAN: Final = "mean"

ABSENCES: Final = {
    TRAIN: (STOP, STALE),
    EXPLAIN: (STOP,),
    PREDICT: (STOP, MEAN),
    EVALUATE: (STOP, MEAN),
}
"""By mode, the values of ``on-missing``."""

AUTO: Final = "auto"
DEVICES: Final = (AUTO, "cpu", "cuda")
TRACKERS: Final = ("tensorboard", "mlflow")

_RESUMED: Final = Readers(
    modes=(TRAIN,), refusal="only training is resumed, not mode {mode!r}"
)
_PREDICT_ALONE: Final = Readers(
    modes=(PREDICT,), refusal=f"is of mode {PREDICT!r} alone, not {{mode!r}}"
)
_COLUMN: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?")


def columns_of(text: str) -> tuple[str, ...]:
    """Return the parts of a comma-separated list.

    >>> columns_of("f.flight, f.time_hour")
    ('f.flight', 'f.time_hour')
    """
    return tuple(part.strip() for part in text.split(",")) if text.strip() else ()


def _model_name_problem(text: str) -> str | None:
    name, at, version = text.partition("@")
    if not NAME.fullmatch(name):
        return (
            f"{name!r} is no name of a model: it must begin with a-z or 0-9 and have "
            "at most 64 of a-z, 0-9, '.', '_' and '-'"
        )
    if at and not VERSION.fullmatch(version):
        return f"{version!r} is no version of a model, such as '20261121-093000-1a2b'"
    return None


def _row_key_problem(text: str) -> str | None:
    wrong = [part for part in columns_of(text) if not _COLUMN.fullmatch(part)]
    if wrong:
        return f'{wrong[0]!r} is no column such as "f.flight" or "flight"'
    return None


def _track_problem(text: str) -> str | None:
    wrong = [part for part in columns_of(text) if part not in TRACKERS]
    return OneOf(TRACKERS).problem(wrong[0]) if wrong else None


@dataclass(frozen=True)
class RunSettings:
    """The run: what it does, with which model, and where it writes."""

    strategy: str = setting(
        "admm",
        'Training method: "admm" (few rounds) or "sgd" (mini-batches); to compare '
        'with: "vfl-admm", "vfl-sgd", "gd". "personalised": a model for every site of '
        "one table. Solved at the server on a sample of the joined rows: "
        '"coreset-ridge" (regression) and "coreset-kmeans" (no label).',
        OneOf(tuple(METHODS)),
    )
    mode: str = setting(
        TRAIN,
        'What to do: "train"; "explain": the query, sizes and costs, without training; '
        '"predict" or "evaluate" with a saved model.',
        OneOf(MODES),
    )
    resume: str = setting(
        "",
        "Run to go on with after it stopped: its folder, or the folder's name below "
        "~/.tp_flower/runs/.",
        read_by=_RESUMED,
    )
    model_name: str = setting(
        "default",
        "Name that the trained models are saved under; to predict or evaluate also "
        '"name@version" ("name" = the latest).',
        Text("name, name@version", _model_name_problem),
    )
    row_key: str = setting(
        "",
        '"predict": columns of the label table that name a row of the predictions, '
        '"f.flight, f.time_hour".',
        Text("columns, comma separated", _row_key_problem),
        _PREDICT_ALONE,
    )
    predictions_at: str = setting(
        SERVER,
        '"predict": who writes the predictions: "server" (row keys hashed), or '
        '"label-site" (they are written nowhere else).',
        OneOf((SERVER, LABEL_SITE)),
        _PREDICT_ALONE,
    )
    seed: int = setting(0, "Seed of everything random.", Range(0, 2**63))
    device: str = setting(
        AUTO,
        'Where sites train: "cpu", "cuda", or "auto": CUDA where there is one (linear '
        "models: from 2^26 features of a part on).",
        OneOf(DEVICES),
    )
    output_dir: str = setting(
        "", 'Folder for the report; "" = a new one under ~/.tp_flower/runs/.'
    )
    progress: bool = setting(True, "One console line per epoch.")
    track: str = setting(
        "",
        'Where else to log epochs and results: "tensorboard", "mlflow" (extras of the '
        "same names), or both, comma separated.",
        Text(", ".join(f'"{name}"' for name in TRACKERS), _track_problem),
    )


@dataclass(frozen=True)
class SiteSettings:
    """The sites: how many there must be, and how long to wait for them."""

    site_timeout: float = setting(
        600.0,
        "Seconds to wait for a site in a round; it is asked again meanwhile. Above 70, "
        "a crashed site is reported as such.",
        Range(0, includes_low=False),
    )
    on_missing: str = setting(
        STOP,
        'What to do about a site that does not answer in time: "stop" (a checkpoint is '
        'kept), "stale" (ADMM goes on with its last scores), or, to predict or '
        'evaluate, "mean" (the mean contribution of its table; such rows are marked).',
        OneOf((STOP, STALE, MEAN)),
    )
    max_stale: int = setting(
        3, '"stale": epochs in a row that a site may be missing.', Range(1)
    )
    min_sites: int = setting(
        0,
        "SuperNodes that must be online; 0 = as many as it takes to host all tables of "
        "the query.",
        Range(0),
    )
    wait_seconds: float = setting(60.0, "Seconds to wait for them.", Range(0))
