"""The head of the page, with the main figures, and the result of the run."""

from collections.abc import Iterator
from datetime import datetime

from strategies.report_page.blocks import Blocks, Prose, Table, tabulate
from strategies.report_page.convergence import (
    METRIC_NAMES,
    TEST,
    TRAIN,
    final_metrics,
    main_metric,
    metric_name,
)
from strategies.report_page.reading import Record, count_column, counted, text_column
from strategies.report_page.tables import label_of
from tp_flower.reports.console import (
    format_bytes,
    format_count,
    format_seconds,
    format_value,
)
from tp_flower.reports.records import COMPLETED

ACRONYMS = frozenset({"admm", "sgd", "vfl-admm", "vfl-sgd", "gd"})
VERBS = {
    "train": "learned from",
    "explain": "to be learned from",
    "predict": "predicted from",
    "evaluate": "evaluated on",
}
SCORED = {
    "joined": "joined rows",
    "label-table": "rows of the label table that they come from",
    "partial": "joined rows in which a mean stands for a table's score",
}

Fact = tuple[str, str, str]  # name, figure, what belongs to it


def head_of(report: Record) -> dict[str, object]:
    """Return what the template shows at the top of a report's page."""
    status = report.text("status") or "unknown"
    tables = report.records("tables")
    sites = {site for table in tables for site in table.texts("sites")}
    verb = VERBS.get(report.text("mode"), "over")
    counts = f"{counted(len(tables), 'table')} at {counted(len(sites), 'site')}"
    return {
        "label": label_of(report.text("query")),
        "subject": f"{verb} {counts}",
        "result": _outcome(report),
        "failure": "" if status == COMPLETED else status,
        "about": " · ".join(filter(None, _about(report))),
        "facts": list(_facts(report)),
    }


def result(report: Record) -> Blocks:
    """Yield all metrics, and what was scored with a saved model."""
    metrics = {part: final_metrics(report, part) for part in (TEST, TRAIN)}
    parts = [part for part in metrics if metrics[part]]
    names = {name for part in parts for name in metrics[part]}
    order = [name for name in METRIC_NAMES if name in names]
    rows = [
        (metric_name(name), *(format_value(metrics[part].get(name)) for part in parts))
        for name in dict.fromkeys((*order, *sorted(names)))
    ]
    head = ("", *(_rows_of(report, part) for part in parts))
    yield Table("Metrics of the model", head, rows) if rows else None
    counts = report.at("rows")
    scored = [(SCORED[k], counts.count(k)) for k in SCORED if k in counts.numbers()]
    yield Table("Scored with a saved model", ("", "rows"), scored) if scored else None
    yield from _predictions(report.at("predictions"))
    columns = [text_column("table", "table"), text_column("sites", "sites")]
    title = "Sites of the model that were not there"
    yield tabulate(title, report.records("missing"), columns)


def _predictions(predictions: Record) -> Blocks:
    columns = [
        text_column("site", "site"),
        text_column("file below its state folder", "file"),
        count_column("rows", "rows"),
    ]
    title = "Predictions at the label table's sites"
    yield tabulate(title, predictions.records("files"), columns)
    if file := predictions.text("file"):
        names = ", ".join(predictions.texts("columns"))
        yield Prose(f"The predictions are in {file}, with {names}.")


def _rows_of(report: Record, part: str) -> str:
    """Return the rows that metrics are of."""
    rows = "held-out rows" if part == TEST else "training rows"
    return "all rows" if report.at("metrics") else rows


def _outcome(report: Record) -> str:
    choice = main_metric(report)
    if not choice:
        return ""
    part, first = choice
    metrics = final_metrics(report, part)
    values = ", ".join(
        f"{metric_name(name)} {format_value(metrics[name])}"
        for name in dict.fromkeys((first, "log_loss", "r2"))
        if name in metrics
    )
    epochs = report.amount("epochs")
    after = f" after {counted(epochs, 'epoch')}" if epochs else ""
    return f"{values} on {_rows_of(report, part)}{after}"


def _about(report: Record) -> Iterator[str]:
    """Yield how and when; a run with a saved model has its model's loss."""
    saved, settings = report.at("model"), report.at("settings")
    if not saved:
        strategy, model = settings.text("strategy"), settings.text("model")
        yield strategy.upper() if strategy in ACRONYMS else strategy
        yield f"{model} models" if model else ""
    losses = (part.text("loss") for part in (saved, report.at("chosen"), report))
    loss = next(filter(None, losses), "")
    yield f"{loss} loss" if loss else ""
    names = filter(None, (saved.text("name"), saved.text("version")))
    yield "@".join(names) or report.text("model")
    yield _moment(report.text("started"))


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


def _facts(report: Record) -> Iterator[Fact]:
    if choice := main_metric(report):
        yield _metric_fact(report, *choice)
    scored, rows = report.at("rows"), report.at("joined-rows")
    if "joined" in scored.numbers():
        yield "joined rows", scored.count("joined"), "scored"
    elif rows.numbers():
        train, test = int(rows.amount(TRAIN)), int(rows.amount(TEST))
        more = f"{format_count(test)} held out" if test else "none held out"
        yield "joined rows", format_count(train + test), more
    epochs = report.amount("epochs")
    if rounds := int(report.amount("rounds")) or len(report.records("history")):
        more = counted(epochs, "epoch") if epochs else ""
        yield "rounds", format_count(rounds), more
    up, down = report.amount("bytes_up"), report.amount("bytes_down")
    if up + down:
        more = f"{format_bytes(up)} up, {format_bytes(down)} down"
        yield "sent", format_bytes(up + down), more
    if report.number("seconds") is not None:
        yield "time", format_seconds(report.amount("seconds")), ""


def _metric_fact(report: Record, part: str, metric: str) -> Fact:
    value = format_value(final_metrics(report, part)[metric])
    train = final_metrics(report, TRAIN).get(metric)
    has_both = part == TEST and train is not None
    rows = "" if report.at("metrics") else f"{part} "
    more = f"train {format_value(train)}" if has_both else ""
    return f"{rows}{metric_name(metric)}", value, more
