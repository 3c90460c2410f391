"""Settings of a run: what it does, where it writes, and how it waits for sites."""

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Final

from tp_flower.errors import QueryError
from tp_flower.features.choice import Entry, read_entries, render_entries
from tp_flower.methods.method import METHODS
from tp_flower.model_names import model_name
from tp_flower.query.cutoffs import CutoffGrid
from tp_flower.settings.declare import (
    AUTO,
    Form,
    OneOf,
    Range,
    Readers,
    items_of,
    list_of,
    setting,
)
from tp_flower.splits import RANDOM, RULES, SplitRule

TRAIN: Final = "train"
EXPLAIN: Final = "explain"
PREDICT: Final = "predict"
EVALUATE: Final = "evaluate"
SERVE: Final = "serve"
WITH_A_MODEL: Final = (PREDICT, EVALUATE, SERVE)
"""The modes that use a saved model, and train nothing."""
PREDICTING: Final = (PREDICT, SERVE)

STOP: Final = "stop"
MEAN: Final = "mean"

FLOWER: Final = "flower"
SESSION: Final = "session"
TRACKERS: Final = OneOf(("tensorboard", "mlflow"))

_OVER_ROWS: Final = Readers(of_methods=True)
_RESUMED: Final = Readers(
    modes=(TRAIN,), refusal="only training is resumed, not mode {mode!r}"
)
_PREDICTING_ALONE: Final = Readers(
    modes=PREDICTING, refusal=f"is for mode {PREDICT!r} only, not {{mode!r}}"
)
_EVALUATE_ALONE: Final = Readers(
    modes=(EVALUATE,), refusal=f"is for mode {EVALUATE!r} only, not {{mode!r}}"
)
_WITH_A_MODEL: Final = Readers(
    modes=WITH_A_MODEL,
    refusal="{value!r} is for modes 'predict' and 'evaluate' only, not {mode!r}",
)
MOST_TIMES: Final = 100
MOST_REPEATS: Final = 100
MOST_WORKERS: Final = 1024
_COLUMN: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?")
_CLUSTER: Final = re.compile(r"(ray://)?[\w.-]+:\d{1,5}")


def _server_workers(value: object) -> int | str:
    text = str(value)
    if text.isdecimal():
        return int(Range(0, MOST_WORKERS, includes_high=True).read(int(text)))
    if isinstance(value, str) and _CLUSTER.fullmatch(text):
        return text
    raise ValueError(
        f"{value!r} is neither a number of workers nor the address of a cluster of "
        'Ray such as "ray://head:10001"'
    )


def _row_key(text: str) -> str:
    for column in items_of(text):
        if not _COLUMN.fullmatch(column):
            raise ValueError(f'{column!r} is not a column such as "f.flight", "flight"')
    return text


def _column(text: str) -> str:
    if text and not _COLUMN.fullmatch(text):
        raise ValueError(f'{text!r} is not a column such as "c.region"')
    return text


_SURVIVAL_TIMES: Final = list_of(
    lambda time: float(str(time)),
    f'a list of at most {MOST_TIMES} times of 0 or more, such as "30, 365"',
    lambda times: (
        len(times) <= MOST_TIMES
        and all(0.0 <= time < math.inf for time in times)
        and len(set(times)) == len(times)
    ),
)


@dataclass(frozen=True)
class RunSettings:
    """The run: what it does, with which model, and where it writes."""

    strategy: str = setting(
        AUTO,
        'Training method: "cg" (linear models, fewest rounds), "boost" (boosted '
        'trees), "admm" (few rounds), '
        '"sgd" (mini-batches), or "auto": cg for linear models without noise, admm for '
        'others. As a baseline "gd". "personalised": a model for '
        "every site of one table. Solved at the server on a sample of the joined rows: "
        '"coreset-ridge" (regression) and "coreset-kmeans" (no label).',
        OneOf((AUTO,), lambda: tuple(METHODS)),
    )
    mode: str = setting(
        TRAIN,
        'What to do: "train"; "explain": the query, sizes and costs, without training; '
        '"predict" or "evaluate" with a saved model, or "serve": predict, as requests '
        "come.",
        OneOf((TRAIN, EXPLAIN, *WITH_A_MODEL)),
    )
    resume: str = setting(
        "",
        "Stopped run to resume: its folder, or the folder's name below "
        "~/.tp_flower/runs/.",
        read_by=_RESUMED,
        may_change=True,
    )
    model_name: str = setting(
        "default",
        "Name that the trained models are saved under; to predict or evaluate also "
        '"name@version" ("name" = the latest).',
        Form("name, name@version", model_name),
    )
    row_key: str = setting(
        "",
        '"predict": columns of the label table that identify a predicted row, '
        '"f.flight, f.time_hour".',
        Form("columns, comma separated", _row_key),
        _PREDICTING_ALONE,
    )
    survival_times: tuple[float, ...] = setting(
        (),
        '"predict" with a model of times to an event: times up to which predictions '
        'have the probability of no event, "30, 365"; without any, the quartiles of '
        "the times of events in training.",
        Form("times, comma separated", _SURVIVAL_TIMES),
        _PREDICTING_ALONE,
        is_operational=True,
    )
    importances: int = setting(
        0,
        '"evaluate": how often the values of each feature, and of each table, are '
        "permuted, to see how much worse the model predicts; 0 = not at all. With it "
        "come their shares in the scores.",
        Range(0, MOST_REPEATS, includes_high=True),
        _EVALUATE_ALONE,
    )
    metrics_by: str = setting(
        "",
        '"evaluate": a column of any table, "c.region", by whose values rows are '
        "grouped for metrics of each group.",
        Form("a column", _column),
        _EVALUATE_ALONE,
    )
    seed: int = setting(0, "Seed of everything random.", Range(0, 2**63))
    device: str = setting(
        AUTO,
        'Where sites train torch models (linear ones need no GPU): "cpu", "cuda", or '
        '"auto": CUDA where there is one.',
        OneOf((AUTO, "cpu", "cuda")),
        is_operational=True,
    )
    server_workers: int | str = setting(
        0,
        "Processes beside the server's that hold the vectors over the joined rows and "
        'compute on them: so many on this machine, or, at "ray://head:10001", one on '
        "each node of a cluster of Ray; 0 = none. They take 8 to 17 s to start: for "
        'joined rows that do not fit here. Batches of "sgd" are computed by the '
        "server itself.",
        Form(
            "0 to 1024, or an address of a cluster of Ray",
            _server_workers,
            lambda value: value,
        ),
        _OVER_ROWS,
        is_operational=True,
    )
    output_dir: str = setting(
        "",
        'Folder for the report; "" = a new one under ~/.tp_flower/runs/.',
        is_operational=True,
    )
    progress: bool = setting(True, "One console line per epoch.", may_change=True)
    track: str = setting(
        "",
        'Where else to log epochs and results: "tensorboard", "mlflow" (extras of the '
        "same names), or both, comma separated.",
        Form(str(TRACKERS), lambda text: ", ".join(map(TRACKERS.read, items_of(text)))),
        may_change=True,
    )


@dataclass(frozen=True)
class SiteSettings:
    """The sites: how many there must be, and how long to wait for them."""

    may_change: ClassVar = True

    site_timeout: float = setting(
        600.0,
        "Seconds to wait for a site in a round; the request is repeated meanwhile. "
        "Above 70, a crashed site is reported as such.",
        Range(0, includes_low=False),
    )
    on_missing: str = setting(
        STOP,
        'What to do about a site that does not answer in time: "stop" (a checkpoint is '
        'kept), or, to predict or evaluate, "mean" (the mean contribution of its '
        "table; such rows are marked).",
        OneOf((STOP, MEAN)),
        _WITH_A_MODEL,
    )
    min_sites: int = setting(
        0,
        "SuperNodes that must be online; 0 = as many as it takes to host all tables "
        "of the query.",
        Range(0),
    )
    wait_seconds: float = setting(60.0, "Seconds to wait for the sites.", Range(0))
    channel: str = setting(
        AUTO,
        'How rounds travel: "session" (a process at each site stays and asks for them '
        'over HTTPS: milliseconds a round), "flower" (Flower\'s messages: about 5 s a '
        'round), or "auto": sessions where the deployment offers them, with Flower for '
        "sites that cannot open one.",
        OneOf((AUTO, SESSION, FLOWER)),
    )
    session_seconds: float = setting(
        300.0,
        "Seconds after which a session ends, and other runs can use the site; it "
        "opens anew in 5.",
        Range(10, 86_400),
    )


REGRESSION: Final = "regression"
CLASSIFICATION: Final = "classification"
JOINED: Final = "joined"
_WITH_JOINED_ROWS: Final = Readers(
    of_methods=True,
    refusal="{value!r} needs joined rows; strategy {strategy!r} has none: leave it out",
)
_ENTITY: Final = re.compile(r"entity(?:\(\s*([^()]+?)\s*\))?")


def entity_named(text: str) -> str | None:
    """Return the entity of the setting `row-weight`: an alias, "" for the label table.

    None counts every joined row by itself; any other text raises ValueError.

    >>> entity_named("joined"), entity_named("entity"), entity_named("entity(c)")
    (None, '', 'c')
    """
    if text == JOINED:
        return None
    match = _ENTITY.fullmatch(text)
    if match is None:
        raise ValueError(f'{text!r} is not one of "joined", "entity", "entity(ALIAS)"')
    return match[1] or ""


def _row_weight(text: str) -> str:
    entity_named(text)
    return text


_FRACTION: Final = '"auto", or at least 0 and below 1'


def _validation_fraction(value: object) -> float | str:
    if value == AUTO:
        return AUTO
    with suppress(TypeError, ValueError):
        return Range(0, 1).read(float(str(value)))
    raise ValueError(f"{value!r} is out of range: it must be {_FRACTION}")


_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([MG])B")
_BYTES: Final = {"M": 1e6, "G": 1e9}


def _memory(text: str) -> str:
    if text and not _SIZE.fullmatch(text):
        raise ValueError(f'{text!r} is not a size such as "8 GB" or "500 MB"')
    return text


def bytes_of(size: str) -> float:
    """Return the bytes of a size; of none, "", infinity.

    >>> bytes_of("1.5 GB"), bytes_of("")
    (1500000000.0, inf)
    """
    match = _SIZE.fullmatch(size)
    return float(match[1]) * _BYTES[match[2]] if match else math.inf


def _test_split(text: str) -> str:
    SplitRule.read(text)
    return text


def _cutoff_grid(text: str) -> str:
    if text:
        try:
            CutoffGrid.parse(text)
        except QueryError as error:
            raise ValueError(str(error)) from None
    return text


@dataclass(frozen=True)
class DataSettings:
    """The training set: the query, its tables, its rows and their features."""

    sql: str = setting(
        "",
        "The training set: SELECT <label> AS label, <features> FROM ... JOIN ... ON "
        '... WHERE ... "" = the built-in flights query.',
        # a proposal has the query itself, as it was read
        is_operational=True,
    )
    cutoff_grid: str = setting(
        "",
        "The times that a LATERAL sub-query or an ASOF JOIN looks back from where its "
        'rows are at another site, such as "1 month from 2015-01-01 to 2020-12-31": '
        "of each cutoff the last of them at or before it.",
        Form(
            '"", or a step of hours, days, weeks, months or years and two days, such '
            'as "1 month from 2015-01-01 to 2020-12-31"',
            _cutoff_grid,
        ),
        # a proposal has it in what it asks of the tables
        is_operational=True,
    )
    sealed_cutoffs: bool = setting(
        False,
        "In place of a cutoff-grid, the sites that a LATERAL sub-query or an ASOF JOIN "
        "looks back from seal their keys and cutoffs for the other site, where their "
        "policies let them; its answers are exact.",
        is_operational=True,
    )
    sealed_partials: bool = setting(
        False,
        "Where rows of one key are in several shards of a LATERAL sub-query's table, "
        "at several sites, one of them is sealed what the others' rows add to its "
        "answers, such as their counts and sums, where their policies let them.",
    )
    task: str = setting(
        AUTO,
        '"regression", "classification", or "auto": classes of a label that is text, '
        "true or false, or a number of two distinct values; regression of all other "
        "numbers.",
        OneOf((AUTO, REGRESSION, CLASSIFICATION)),
    )
    tables: str = setting(
        "",
        'Absolute path of a tables file (TOML) that says where the tables are. "" = '
        "the built-in flights federation. A SuperNode's own "
        '--node-config tables="..." wins.',
        may_change=True,
    )
    max_joined_rows: int = setting(
        200_000_000,
        "A join of more rows than this is refused before it is built.",
        Range(1),
        is_operational=True,
    )
    memory: str = setting(
        "",
        "Memory that the server may take for joined rows. What more of them would take "
        'is kept in files, in the folder that TMPDIR names. "" = all is in memory.',
        Form('"", or a size such as "8 GB" or "500 MB"', _memory),
        is_operational=True,
    )
    sample: float = setting(
        1.0,
        "Share of the label table's rows to train on, for a quick try; 1 = all. The "
        "seed draws them before the join, as if the query had no others. It earns no "
        "privacy: epsilons are those of a run on all rows that take part.",
        Range(0, 1, includes_low=False, includes_high=True),
        _WITH_JOINED_ROWS,
    )
    test_fraction: float = setting(
        0.2,
        "Share of the label table's rows held out for testing, below 1; 0 = none. "
        "Of another `test-split`, the share of values, or of joined rows.",
        Range(0, 1),
    )
    test_split: str = setting(
        RANDOM,
        'What is held out: "random" rows of the label table, or "random(p)" of '
        'another; "group(f.day)", whole values of one or several columns of a table; '
        'or "time(f.time_hour)", the last joined rows by a column.',
        Form(RULES, _test_split),
        Readers(
            of_methods=True,
            refusal="{value!r} needs joined rows to hold out; strategy {strategy!r} "
            f"has none: leave it {RANDOM!r}",
        ),
    )
    validation_fraction: float | str = setting(
        AUTO,
        "Share of what is not held out for testing that validates, by the same split: "
        "the model of the epoch with the lowest validation loss is saved; 0 = none, "
        'the last model is; "auto": 0.1 for models other than linear without noise '
        "or coreset, else 0.",
        Form(_FRACTION, _validation_fraction, lambda value: value),
        Readers(
            of_methods=True,
            refusal="{value!r} needs epochs to choose from; strategy {strategy!r} has "
            "none over joined rows: leave it 0",
        ),
    )
    patience: int = setting(
        0,
        "Epochs without a validation loss 0.2 % lower, after which training ends; 0 = "
        'train on, or, with `validation-fraction = "auto"`, 10; for "boost" 2 to 5, '
        "the more the fewer trees it grows in an epoch.",
        Range(0),
    )
    row_weight: str = setting(
        JOINED,
        'Weight of a joined row: "joined" (1), "entity" (a row of the label table '
        'counts once, however often it is joined), or "entity(c)" (a row of table c '
        "counts once). A query may also select `<expression> AS weight`.",
        Form('"joined", "entity", "entity(ALIAS)"', _row_weight),
        _WITH_JOINED_ROWS,
    )
    max_categories: int = setting(
        256,
        'Categories kept per categorical column; the rarest share "(other)".',
        Range(2),
    )
    encoders: tuple[Entry, ...] = setting(
        (),
        "Encoders other than the defaults: "
        '"flights.month=cyclic(12); planes.model=one-hot(20) indicator". Encoders '
        "without statistics (range, categories, hash, cyclic) disclose nothing about "
        'any row: "flights.distance=range(0, 5000)". A table is named by its alias; '
        "docs/reference/encoders.md lists the encoders.",
        Form("<table>.<column>=<encoder>; ...", read_entries, render_entries),
    )
