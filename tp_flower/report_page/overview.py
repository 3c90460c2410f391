"""The head of the page: what was done, the result in one line, the main figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tp_flower.console import (
    format_bytes,
    format_count,
    format_seconds,
    format_value,
)
from tp_flower.report import COMPLETED
from tp_flower.report_page.blocks import Section, Table
from tp_flower.report_page.curves import (
    METRIC_NAMES,
    TEST,
    TRAIN,
    final_metrics,
    main_metric,
    metric_name,
)
from tp_flower.report_page.model_run import model_name
from tp_flower.report_page.reading import (
    Report,
    amount,
    mapping,
    number,
    records,
    text,
    texts,
)
from tp_flower.report_page.sql import label_of

_METHODS = {
    "admm": "ADMM",
    "sgd": "SGD",
    "vfl-admm": "VFL-ADMM",
    "vfl-sgd": "VFL-SGD",
    "gd": "gradient descent",
    "personalised": "personalised",
}
_VERBS = {
    "train": "learned from",
    "explain": "to be learned from",
    "predict": "predicted from",
    "evaluate": "evaluated on",
}


@dataclass(frozen=True)
class Fact:
    """One figure of the run: its name, the figure, and what belongs to it."""

    name: str
    value: str
    more: str = ""


@dataclass(frozen=True)
class Head:
    """The top of the page.

    Attributes:
        label: what is predicted, in SQL.
        subject: from what, in words.
        result: the outcome in one line.
        failure: why the run failed; "" if it did not.
        about: how and when.
        facts: the main figures.
    """

    label: str
    subject: str
    result: str
    failure: str
    about: str
    facts: tuple[Fact, ...]

    @property
    def title(self) -> str:
        """The page's title."""
        return f"{self.label} {self.subject}".strip()


def head_of(report: Report) -> Head:
    """Return the top of a report's page."""
    status = text(report.get("status")) or "unknown"
    return Head(
        label=label_of(text(report.get("query"))),
        subject=_subject(report),
        result=_result(report),
        failure="" if status == COMPLETED else status,
        about=_about(report),
        facts=tuple(_facts(report)),
    )


def result(report: Report) -> Section:
    """Return all metrics of the final model."""
    found = {part: final_metrics(report, part) for part in (TEST, TRAIN)}
    parts = [part for part, own in found.items() if own]
    names = {name for own in found.values() for name in own}
    known = [name for name in METRIC_NAMES if name in names]
    rows = [
        (metric_name(name), *(format_value(found[part].get(name)) for part in parts))
        for name in (*known, *sorted(names - set(known)))
    ]
    head = ("", *(_rows_of(report, part) for part in parts))
    table = Table("Metrics of the model", head, rows)
    return Section("result", "Result", [table] if rows else [])


def _rows_of(report: Report, part: str) -> str:
    """Return the rows that metrics are of."""
    if mapping(report.get("metrics")):
        return "all rows"
    return {TEST: "held-out rows", TRAIN: "training rows"}[part]


def _subject(report: Report) -> str:
    tables = records(report.get("tables"))
    sites = {site for own in tables for site in texts(own.get("sites"))}
    verb = _VERBS.get(text(report.get("mode")), "over")
    return f"{verb} {_counted(len(tables), 'table')} at {_counted(len(sites), 'site')}"


def _counted(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> _counted(1, "table"), _counted(1200, "site")
    ('1 table', '1,200 sites')
    """
    return f"{format_count(count)} {noun}{'' if count == 1 else 's'}"


def _result(report: Report) -> str:
    found = main_metric(report)
    if not found:
        return ""
    part, first = found
    metrics = final_metrics(report, part)
    shown = [name for name in (first, "log_loss", "r2") if name in metrics]
    values = ", ".join(
        f"{metric_name(name)} {format_value(metrics[name])}"
        for name in dict.fromkeys(shown)
    )
    epochs = int(amount(report.get("epochs")))
    after = f" after {_counted(epochs, 'epoch')}" if epochs else ""
    return f"{values} on {_rows_of(report, part)}{after}"


def _about(report: Report) -> str:
    """Return how and when; a run with a saved model has its model's loss."""
    saved = mapping(report.get("model"))
    loss = text(saved.get("loss")) or text(mapping(report.get("chosen")).get("loss"))
    loss = loss or text(report.get("loss"))
    parts = [
        *([] if saved else _method(mapping(report.get("settings")))),
        f"{loss} loss" if loss else "",
        model_name(report),
        _moment(text(report.get("started"))),
    ]
    return " · ".join(part for part in parts if part)


def _method(settings: Mapping[str, Any]) -> list[str]:
    strategy, model = text(settings.get("strategy")), text(settings.get("model"))
    return [_METHODS.get(strategy, strategy), f"{model} models" if model else ""]


def _moment(started: str) -> str:
    """Return a time for people.

    >>> _moment("2026-11-20T08:00:00+00:00")
    '20 November 2026, 08:00 UTC'
    """
    try:
        moment = datetime.fromisoformat(started)
    except ValueError:
        return started
    return f"{moment.day} {moment:%B %Y, %H:%M} UTC"


def _facts(report: Report) -> list[Fact]:
    return [
        fact
        for fact in (
            _metric_fact(report),
            _rows_fact(report),
            _rounds_fact(report),
            _bytes_fact(report),
            _time_fact(report),
        )
        if fact
    ]


def _metric_fact(report: Report) -> Fact | None:
    found = main_metric(report)
    if not found:
        return None
    part, name = found
    own = final_metrics(report, part)[name]
    train = final_metrics(report, TRAIN).get(name)
    more = f"train {format_value(train)}" if part == TEST and train is not None else ""
    rows = "" if mapping(report.get("metrics")) else f"{part} "
    return Fact(f"{rows}{metric_name(name)}", format_value(own), more)


def _rows_fact(report: Report) -> Fact | None:
    rows = mapping(report.get("joined-rows"))
    scored = number(mapping(report.get("rows")).get("joined"))
    if scored is not None:
        return Fact("joined rows", format_count(int(scored)), "scored")
    train, test = number(rows.get(TRAIN)), number(rows.get(TEST))
    if train is None and test is None:
        return None
    counts = int(amount(train)), int(amount(test))
    more = f"{format_count(counts[1])} held out" if counts[1] else "none held out"
    return Fact("joined rows", format_count(sum(counts)), more)


def _rounds_fact(report: Report) -> Fact | None:
    rounds = int(amount(report.get("rounds"))) or len(records(report.get("history")))
    epochs = int(amount(report.get("epochs")))
    more = _counted(epochs, "epoch") if epochs else ""
    return Fact("rounds", format_count(rounds), more) if rounds else None


def _bytes_fact(report: Report) -> Fact | None:
    up, down = (amount(report.get(f"bytes_{way}")) for way in ("up", "down"))
    more = f"{format_bytes(up)} up, {format_bytes(down)} down"
    return Fact("sent", format_bytes(up + down), more) if up + down else None


def _time_fact(report: Report) -> Fact | None:
    seconds = number(report.get("seconds"))
    return None if seconds is None else Fact("time", format_seconds(max(seconds, 0.0)))
