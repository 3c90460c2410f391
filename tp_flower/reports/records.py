"""Records of a run, and `report.json`, which is a pure function of a `RunReport`.

Schema of `report.json` (`schema` 1; every number is finite or null)::

    schema, mode ("train"; "explain" writes what `strategies.explain.explanation` says)
    status ("completed" or why it failed), started (ISO 8601, UTC), seconds
    output-dir, query (SQL)
    settings  {run-config key: value}        chosen {key: what 0 or "auto" became}
    tables    [{table, name, rows, features, shards, sites: [..], dropped: [..],
                multiplicity: {min, mean, max}, of all its rows,
                encoding: [{column, type, encoder, columns, missing, categories, kept,
                other}]}]   `TableReport`, in order of FROM; missing and other are whole
                percents of the joined rows, rounded up; null where a policy hides them
    joined-rows {train, test}
    warnings  [text]   what a user should know about the result
    ledger-ends {site: checksum}   of the last line that the ledger of each real site
                had before its last answer: an owner's ledger must have that line ever
                after
    split     {name, validation-rows}   of the rows not trained on
    join-steps  [{table, rows, on, is-outer, rows-before, fan-out-min, fan-out-median,
                fan-out-max, unmatched-before, unmatched-rows, lost-label-rows,
                keyless-before, lost-keyless-rows, advice,
                repeated-keys: [{table, keys, repeated, most, more-rows}]}]
                `JoinStep`, in order
    label-rows  {rows, joined, lost: [{step, rows, keyless, advice}]}   `label_rows`;
                the last two where they say something
    history   [{round, epoch, phase, train: {metric: value}, test: {metric: value},
                bytes-up: {table: n}, bytes-down: {table: n}, overhead-bytes,
                server-seconds, client-seconds, wait-seconds,
                residuals: {primal, dual} or {gradient}, validation: {metric: value},
                site-seconds: {site: s}, rounds}]   `RoundReport`
    totals    {bytes-up: {table: n}, bytes-down: {table: n}, overhead-bytes,
               server-seconds, client-seconds, wait-seconds}
    verdict   whether training has converged, and what to do if not
    epochs, rounds, bytes_up, bytes_down      of the whole run; without overhead
    final     {train: {metric: value}, test: {metric: value}}
    model     name@version that the models were kept under; "" if they were not
    contributions  {table: {share, mean-score: [value per output]}}   see
              `tp_flower.heads`; share is null where scores are no sum
    coefficients   {table: [{feature, output, value}]}   of linear models, or
              gains of trees, as far as the policies of the sites allow, which also
              decide whether a feature is called by its category's text; strategy
              "moments", and `standard-errors`, add {standard-error, t or z, p, low,
              high}, of several classes all of differences from the first; moments with
              noise {noise}, and {unshrunk}, whose errors they are
    baseline  {train: {metric: value}, test: ..}   of the mean of the training labels,
              or of the frequencies of their classes. Left out where labels have noise:
    classes   {class: {train: rows, test: rows}}
    confusion {class: {class: test rows of the first, predicted as the second}}
    deciles   [{rows, predicted, actual}]   means of test rows, by prediction; of two
              classes the probability and the share of the second, with {low, high},
              the share's interval of 95 %
    calibration {brier, slope, intercept}   of two classes: the mean square of
              probability less label, and the line of the test rows' labels on their
              scores, 1 and 0 of probabilities that hold
    curve     [{rows, probability, share, recall, false_alarms, precision}]   of two
              classes: which test rows are taken, and which of the second class are
              among them, if all above a threshold are; see
              `tp_flower.objectives.comparison.threshold_curve`
    survival  [{stratum, times, hazards, survival}]   of times to an event: the
              cumulative hazard and the survival of a score of 0, where training ended
              with the model that was saved; no stratum where the query names none
    dispersion  {taken, likeliest}   of negative-binomial counts: that of the loss, and
              that of largest likelihood at the model's means
    personal  of strategy "personalised" alone: see
              `strategies.methods.personalised.strategy`
    moments   of strategy "moments" alone: see `strategies.methods.moments.section`
    inference  with `standard-errors` alone: see
              `strategies.methods.moments.errors`
    privacy   {adversary, delta, messages, ledger, totals, readings}   see
              `strategies.disclosures`, of readings `strategies.score_readings`

Metrics: `loss`, and `rmse`, `mae`, `r2` (regression), `auc`, `accuracy`, `log_loss`
(classification) or `concordance`, `log_likelihood`, and of test rows
`integrated_brier` (survival). Up is from the sites to
the server. `overhead-bytes` is what messages carry besides the arrays of the tables,
both ways.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tp_flower.files import write_file
from tp_flower.joins.joining import JoinStep, label_rows

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1
REPORT_FILE = "report.json"
REPORT_LINE = "Report: "
COMPLETED = "completed"
SEVERAL_NAMES = " + "  # between the names of a table that is a UNION ALL

FLOWER_SECONDS = 5.0  # of a round of Flower's messages, whatever it carries
SESSION_SECONDS = 0.003  # of one in a session; both by scripts/bench_deploy.py

Metrics = Mapping[str, float]
_TABLE_BYTES = ("bytes_up", "bytes_down")
_SECONDS = ("server_seconds", "client_seconds", "wait_seconds")


@dataclass(frozen=True)
class TableReport:
    """One table of the query: its rows and features, and how its rows are joined.

    Attributes:
        rows: number of rows of all shards, after the table's own filters.
        features: columns after encoding; ``dropped`` ones are constant.
        multiplicity: number of joined rows, trained on or held out, that each of the
            rows is in (:func:`min_mean_max`).
    """

    table: str
    name: str
    rows: int
    features: int
    shards: int
    sites: tuple[str, ...]
    dropped: tuple[str, ...]
    multiplicity: Mapping[str, float]
    encoding: Sequence[Mapping[str, object]] = ()


@dataclass(frozen=True)
class RoundReport:
    """The bytes, seconds and metrics of one round, or of several of one phase.

    Attributes:
        round: the number of the last of the rounds, from 1.
        epoch: the epoch of the round, from 1; 0 is set-up.
        client_seconds: computing time of the slowest site.
        wait_seconds: the rest: transfer, queues, start of processes.
        site_seconds: computing time of each site, by name; sites of one SuperNode
            together.
    """

    round: int
    epoch: int
    phase: str
    train: Metrics = field(default_factory=dict)
    test: Metrics = field(default_factory=dict)
    bytes_up: Mapping[str, int] = field(default_factory=dict)
    bytes_down: Mapping[str, int] = field(default_factory=dict)
    overhead_bytes: int = 0
    server_seconds: float = 0.0
    client_seconds: float = 0.0
    wait_seconds: float = 0.0
    residuals: Mapping[str, float] = field(default_factory=dict)
    site_seconds: Mapping[str, float] = field(default_factory=dict)
    validation: Metrics = field(default_factory=dict)
    rounds: int = 1


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record of a run of any mode; see the schema of `report.json`."""

    started: str
    seconds: float
    output_dir: str
    query: str
    settings: Mapping[str, object]
    join_steps: Sequence[JoinStep]
    history: Sequence[RoundReport]
    warnings: Sequence[str] = ()
    ledger_ends: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes_up(self) -> int:
        """Array bytes from the sites to the server, over all tables and rounds."""
        return sum(sum_by_table(item.bytes_up for item in self.history).values())

    @property
    def bytes_down(self) -> int:
        """Array bytes from the server to the sites, over all tables and rounds."""
        return sum(sum_by_table(item.bytes_down for item in self.history).values())

    def content(self, mode: str, status: str = COMPLETED) -> dict[str, object]:
        """Return the entries of `report.json` that a run of any mode has."""
        names = [entry.name for entry in fields(RunRecord)]
        content = {name.replace("_", "-"): getattr(self, name) for name in names}
        # a run that failed before its join has none
        content["label-rows"] = label_rows(self.join_steps) if self.join_steps else {}
        return {"schema": SCHEMA_VERSION, "mode": mode, "status": status, **content}

    def traffic(self) -> dict[str, object]:
        """Return the entries of `report.json` about all rounds together."""
        total = merge_rounds(self.history or [RoundReport(0, 0, "", rounds=0)])
        names = (*_TABLE_BYTES, "overhead_bytes", *_SECONDS)
        return {
            "totals": {name.replace("_", "-"): getattr(total, name) for name in names},
            "rounds": total.rounds,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
        }


@dataclass(frozen=True, kw_only=True)
class RunReport(RunRecord):
    """A run of training; see the schema of `report.json`."""

    chosen: Mapping[str, object]
    tables: Sequence[TableReport]
    joined_rows_train: int
    joined_rows_test: int
    final_train: Metrics
    final_test: Metrics
    split: Mapping[str, object] = field(default_factory=dict)
    privacy: Mapping[str, object]
    status: str = COMPLETED
    model: str = ""
    verdict: str = ""
    contributions: Mapping[str, object] = field(default_factory=dict)
    coefficients: Mapping[str, object] = field(default_factory=dict)
    sections: Mapping[str, object] = field(default_factory=dict)
    outcomes: Mapping[str, object] = field(default_factory=dict)

    @property
    def epochs(self) -> int:
        """The number of epochs."""
        return max((item.epoch for item in self.history), default=0)


@dataclass(frozen=True)
class CompletedRun:
    """The results of a run of any mode that has completed.

    Attributes:
        report: the content of `report.json`.
        folder: the folder of the report and its page.
        next_steps: the commands to continue with, and the path of the page.
        model: name@version of the model that the run has trained, or "".
        predictions: the rows that mode "predict" has scored, or None.
    """

    report: Mapping[str, Any]
    folder: Path
    next_steps: str = ""
    model: str = ""
    predictions: "pa.Table | None" = None


def waiting_seconds(rounds: float) -> dict[str, float]:
    """Return the seconds by channel that rounds wait, besides computing and network."""
    return {
        "session": FLOWER_SECONDS + rounds * SESSION_SECONDS,
        "flower": rounds * FLOWER_SECONDS,
    }


def merge_rounds(rounds: Sequence[RoundReport]) -> RoundReport:
    """Return the sums of the rounds of one phase, with the metrics of the last one.

    >>> rounds = [RoundReport(7, 1, "sgd"), RoundReport(8, 1, "sgd", {"loss": 0.5})]
    >>> merge_rounds(rounds).train
    {'loss': 0.5}
    """
    values = {
        name: [getattr(item, name) for item in rounds] for name in vars(rounds[-1])
    }
    sums: dict[str, Any] = {
        name: sum_by_table(values[name]) for name in (*_TABLE_BYTES, "site_seconds")
    }
    sums |= {name: math.fsum(values[name]) for name in _SECONDS}
    sums |= {name: sum(values[name]) for name in ("overhead_bytes", "rounds")}
    return replace(rounds[-1], **sums)


def merge_last_epoch(history: list[RoundReport]) -> None:
    """Merge the rounds of the last epoch by phase, in order of their last rounds."""
    epoch = history[-1].epoch
    phases: dict[str, list[RoundReport]] = {}
    while history and history[-1].epoch == epoch:
        last = history.pop()
        phases.setdefault(last.phase, []).append(last)
    history.extend(merge_rounds(rounds[::-1]) for rounds in reversed(phases.values()))


def sum_by_table(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sum of counts by table.

    >>> sum_by_table([{"f": 1, "p": 2}, {"f": 3}])
    {'f': 4, 'p': 2}
    """
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def report_dict(report: RunReport) -> dict[str, object]:
    """Return the content of `report.json`: JSON types only, no NaN or infinity."""
    content = {
        **report.content("train", report.status),
        **report.traffic(),
        "chosen": report.chosen,
        "tables": report.tables,
        "joined-rows": {
            "train": report.joined_rows_train,
            "test": report.joined_rows_test,
        },
        "split": report.split,
        "verdict": report.verdict,
        "epochs": report.epochs,
        "final": {"train": report.final_train, "test": report.final_test},
        "model": report.model,
        "contributions": report.contributions,
        "coefficients": report.coefficients,
        **report.outcomes,
        **report.sections,
        "privacy": report.privacy,
    }
    return {key: plain(value) for key, value in content.items()}


def write_json(content: Mapping[str, object], folder: Path) -> Path:
    """Write `report.json` into a folder, made if missing, and return its path."""
    return write_whole(
        folder / REPORT_FILE, json.dumps(content, indent=2, allow_nan=False) + "\n"
    )


def write_whole(path: Path, text: str) -> Path:
    """Write a file whole, into a folder made if missing, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # a report is as readable as its folder
    write_file(path, [text.encode("utf-8")], is_durable=False, mode=0o644)
    return path


def report_line(path: Path) -> str:
    """Return the line that tells a user, and the scripts, where the report is."""
    return f"{REPORT_LINE}{path}"


def min_mean_max(counts: npt.NDArray[np.integer]) -> dict[str, float]:
    """Return the minimum, mean and maximum of some counts; 0 without any.

    >>> min_mean_max(np.array([1, 4, 4]))
    {'min': 1, 'mean': 3.0, 'max': 4}
    """
    if not len(counts):
        return {"min": 0, "mean": 0.0, "max": 0}
    return {
        "min": int(counts.min()),
        "mean": float(counts.mean()),
        "max": int(counts.max()),
    }


def plain(value: object) -> object:
    """Return a value in JSON types, with dashes in names, and None for NaN and inf."""
    if is_dataclass(value):
        items = vars(value).items()
        return {name.replace("_", "-"): plain(item) for name, item in items}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    # a numpy scalar is not a JSON number; item() is its Python twin
    scalar = value.item() if hasattr(value, "item") else value
    if isinstance(scalar, float) and not math.isfinite(scalar):
        return None
    if scalar is None or isinstance(scalar, bool | int | float | str):
        return scalar
    raise TypeError(
        f"{value!r} of type {type(value).__name__} cannot be written to a report"
    )
