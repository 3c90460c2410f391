"""The head of the page, with the main figures, and the result of the run."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime

from strategies import registry
from strategies.report_page import convergence, curves
from strategies.report_page.readings import reading_columns, readings_note
from tp_flower.errors import QueryError
from tp_flower.query.parsing import is_label, parse_statement
from tp_flower.reports import blocks, console
from tp_flower.reports.records import COMPLETED, SEVERAL_NAMES
from tp_flower.settings.run_config import changed_settings


def settings(report: blocks.Record) -> blocks.Blocks:
    """Yield the settings that differ from their defaults, the chosen ones, and all."""
    values = report.at("settings").content
    # the query is shown elsewhere
    changed = {
        key: value for key, value in changed_settings(values).items() if key != "sql"
    }
    yield _values("Set for this run", changed)
    yield _values("Chosen by the program", report.at("chosen").content)
    yield _values("All settings", values, is_folded=True)


def _values(
    title: str, values: Mapping[str, object], is_folded: bool = False
) -> blocks.Table:
    """Return a table of settings and their values."""
    rows = [(str(key), format_setting(value)) for key, value in values.items()]
    return blocks.Table(
        title, ("setting", "value"), rows, blocks.TWO_TEXTS, "", is_folded
    )


def format_setting(value: object) -> str:
    """Return a setting's value as readable text.

    >>> format_setting(0.25), format_setting({"f": "gram", "p": True})
    ('0.25', 'f: gram, p: true')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(
            f"{key}: {format_setting(item)}" for key, item in value.items()
        )
    if isinstance(value, list | tuple):
        return ", ".join(map(format_setting, value))
    return str(value)


MOST_ROWS = 16  # of the table of classes: of confusion matrices all
FAN_OUT = ("min", "median", "mean", "max")
CLAUSE = re.compile(
    r"(?<!LEFT) (?=(?:FROM|(?:LEFT )?JOIN|WHERE|GROUP BY|HAVING|UNION ALL) )"
)


def tables(report: blocks.Record) -> blocks.Blocks:
    """Yield the query, the tables and the joins."""
    if query := report.text("query"):
        yield blocks.Code("The query", CLAUSE.split(query))
    tables = report.records("tables")
    yield list_tables(tables)
    yield list_features(tables)
    if steps := report.records("join-steps"):
        yield _steps(steps)
        yield label_rows(report)
    lines = [
        (item.text("table"), line) for item in tables for line in item.texts("work")
    ]
    title = "What the sites of each table run"
    yield blocks.Table(
        title, ("table", "work"), lines, blocks.TWO_TEXTS, is_folded=True
    )
    columns = [
        blocks.text_column("join", "on"),
        blocks.Column("left", lambda join: _key_side(join, "left"), is_text=True),
        blocks.Column("right", lambda join: _key_side(join, "right"), is_text=True),
    ]
    title = "Join keys (rows whose key the other table lacks; of them NULL)"
    yield blocks.tabulate(title, report.records("joins"), columns)
    yield from _numbers_of_rows(report)
    if saving := report.at("saving"):
        rows = report.at("joined-rows")
        joined = saving.amount("joined-values")
        yield blocks.Prose(
            f"{saving.count('joined-rows')} joined rows ({rows.count('train')} to "
            f"train on, {rows.count('test')} held out) from "
            f"{saving.count('rows-held')} rows held."
        )
        values_held = saving.amount("values-held")
        times = "; no values are"
        if values_held:
            times = f", {joined / values_held:.2f} times as many as"
        yield blocks.Prose(
            f"{saving.count('joined-values')} values in the joined table, which is "
            f"never built{times} the {saving.count('values-held')} held."
        )


def _numbers_of_rows(report: blocks.Record) -> blocks.Blocks:
    """Yield the weights, the offset and the events of joined rows."""
    if weights := report.at("row-weight"):
        yield blocks.Prose(" ".join(_weights(weights)))
    if offset := report.at("offset"):
        low, high = (console.format_value(offset.number(end)) for end in ("min", "max"))
        yield blocks.Prose(
            f"Scores of joined rows have the offset {offset.text('column')} added, "
            f"from {low} to {high}."
        )
    if events := report.at("events"):
        yield blocks.Prose(
            f"{events.count('total')} joined rows have an event, "
            f"{events.count('train')} of them to train on."
        )


def _key_side(join: blocks.Record, side: str) -> str:
    null = ""
    if join.amount(f"{side}-null"):
        null = f", {join.count(f'{side}-null')} NULL"
    unmatched = join.count(f"{side}-unmatched")
    rows = join.count(f"{side}-rows")
    return f"{join.text(side)}: {unmatched} of {rows}{null}"


def _weights(weights: blocks.Record) -> Iterator[str]:
    """Yield sentences about the weights of joined rows."""
    if column := weights.text("column"):
        yield f"Joined rows have the weight of {column}."
    if entity := weights.text("entity"):
        yield f"Each row of {entity} counts once."
    low = console.format_value(weights.number("min"))
    high = console.format_value(weights.number("max"))
    yield f"Weights range from {low} to {high} (mean 1):"
    yield f"equivalent to {weights.count('effective-rows')} rows of equal weight."
    if weights.amount("left-out"):
        yield f"{weights.count('left-out')} joined rows of weight 0 take no part."


def list_tables(
    tables: list[blocks.Record],
    fan_out: Iterable[str] = FAN_OUT,
    readings: Sequence[blocks.Record] = (),
) -> blocks.Table:
    """Return the query's tables, how their rows join, and the score readings."""
    multiplicities = [item.at("multiplicity").content for item in tables]
    names = [name for name in fan_out if any(name in item for item in multiplicities)]
    dropped = [
        f"{item.text('table')}.{name}"
        for item in tables
        for name in item.texts("dropped")
    ]
    note = (
        "joined: how many rows of the join, trained on or held out, a row of the table "
        "is in."
    )
    constant = f"Left out because they are constant: {', '.join(dropped)}."
    notes = [note] * bool(names) + [constant] * bool(dropped)
    notes += filter(None, [readings_note(readings)])
    columns = [
        blocks.text_column("alias", "table"),
        # `explain` lists a name per shard
        blocks.text_column("table", "name", "names"),
        blocks.Column("rows", _rows),
        blocks.count_column("features", "features"),
        blocks.Column("shards", _shards),
        blocks.text_column("sites", "sites"),
        *(
            _times_column(f"joined, {name}", name, tables, "multiplicity")
            for name in names
        ),
        *reading_columns(readings),
    ]
    return blocks.tabulate("Tables", tables, columns, " ".join(notes))


def list_features(tables: list[blocks.Record]) -> blocks.Table:
    """Return the type and encoder of each feature, and the values left out."""
    rows = [
        blocks.Record(
            {**row.content, "column": f"{table.text('table')}.{row.text('column')}"}
        )
        for table in tables
        for row in table.records("encoding")
    ]
    heads = {"columns": "columns", "missing, %": "missing", "categories": "categories"}
    heads |= {"kept": "kept", "in (other), %": "other"}
    texts = [
        blocks.text_column(key, key, empty="-") for key in ("column", "type", "encoder")
    ]
    columns = [*texts, *(blocks.count_column(head, key) for head, key in heads.items())]
    undescribed = dict.fromkeys(
        table.text("table")
        for table in tables
        if {row.get("type") for row in table.records("encoding")} == {None}
    )
    title = "Features"
    if undescribed:
        title = f"Features ({UNTOLD.format(', '.join(undescribed))})"
    return blocks.tabulate(title, rows, columns, is_folded=True)


def _rows(table: blocks.Record) -> str:
    """Return the rows of a table; `explain` lists them by shard."""
    shards = {str(n): rows for n, rows in enumerate(table.items("rows"))}
    rows = sum(blocks.Record(shards).numbers().values()) or table.amount("rows")
    return console.format_count(int(rows))


def _shards(table: blocks.Record) -> str:
    return console.format_count(
        int(table.amount("shards")) or len(table.texts("sites"))
    )


def _times_column(
    head: str, key: str, items: Iterable[blocks.Record], inside: str = ""
) -> blocks.Column:
    """Return the column of join multiplicities, with decimals if any needs them."""

    def times(item: blocks.Record) -> float | None:
        record = item.at(inside) if inside else item
        return record.number(key)

    values = [value for item in items if (value := times(item)) is not None]
    is_whole = all(value == int(value) for value in values)
    form = "{:,.0f}" if is_whole else "{:,.2f}"

    def text(item: blocks.Record) -> str:
        value = times(item)
        if value is None:
            return "-"
        return form.format(value)

    return blocks.Column(head, text)


def _steps(steps: list[blocks.Record]) -> blocks.Table:
    """Return the table of joins, in order, with the rows before and after each."""
    fan_outs = {"matches, min": "min", "median": "median", "max": "max"}

    def join(step: blocks.Record) -> str:
        kind = "LEFT JOIN" if step.get("is-outer") else "JOIN"
        return f"{kind} {step.text('table')}"

    columns = [
        blocks.Column("step", join, is_text=True),
        blocks.text_column("on", "on"),
        blocks.count_column("rows before", "rows-before"),
        blocks.count_column("rows after", "rows"),
        *(
            _times_column(head, f"fan-out-{name}", steps)
            for head, name in fan_outs.items()
        ),
        blocks.count_column("rows without a match", "unmatched-before"),
        *(
            [blocks.count_column("of them, without a key", "keyless-before")]
            if any(step.amount("keyless-before") for step in steps)
            else []
        ),
        blocks.count_column("of the table, without", "unmatched-rows"),
    ]
    title = f"The join, step by step, from {steps[0].text('table')}"
    note = "matches: rows of the table that a row of the join so far finds."
    return blocks.tabulate(title, steps[1:], columns, note)


def label_of(query: str) -> str:
    """Return the label's expression, or "" if there is none.

    >>> label_of("SELECT a.x > 3 AS label, a.y FROM a"), label_of("not ( SQL")
    ('a.x > 3', '')
    """
    try:
        statement = parse_statement(query, needs_label=False)
    except QueryError:
        return ""
    return next((item.sql for item in statement.items if is_label(item)), "")


UNTOLD = (
    "of {}, the sites tell numbers of columns alone: with a budget, declared encoders, "
    "or fewer than 500 rows under a policy"
)
VERBS = {
    "train": "learned from",
    "explain": "to be learned from",
    "predict": "predicted from",
    "evaluate": "evaluated on",
    "serve": "served from",
}
SCORED = {
    "joined": "joined rows",
    "label-table": "rows of the label table that they come from",
    "partial": "joined rows in which a mean stands for a table's score",
}

Fact = tuple[str, str, str]  # name, figure, what belongs to it


def head_of(report: blocks.Record) -> dict[str, object]:
    """Return the template's values for the top of a report's page."""
    status = report.text("status") or "unknown"
    tables = report.records("tables")
    sites = {site for table in tables for site in table.texts("sites")}
    # a table may have several aliases, and an alias several tables
    names = {name.lower() for table in tables for name in _hosted_names(table)}
    verb = VERBS.get(report.text("mode"), "over")
    table_count = blocks.count_text(len(names), "table")
    site_count = blocks.count_text(len(sites), "site")
    return {
        "label": label_of(report.text("query")),
        "subject": f"{verb} {table_count} at {site_count}",
        "failure": "" if status == COMPLETED else status,
        "about": " · ".join(filter(None, _run_facts(report))),
        "facts": list(facts(report)),
    }


def _hosted_names(table: blocks.Record) -> list[str]:
    """Return the sites' names of the tables behind an alias: several for UNION ALL."""
    return table.texts("names") or table.text("name").split(SEVERAL_NAMES)


def result(report: blocks.Record) -> blocks.Blocks:
    """Yield the outcome, and the rows that a saved model scored."""
    yield _metrics(report)
    yield _classes(report)
    yield curves.tenths(report)
    yield from warnings(report)
    held_out = report.at("model").text("tested")
    if report.at("metrics") and held_out:
        yield blocks.Prose(blocks.NOTES["evaluated"].format(held_out))
    counts = report.at("rows")
    scored = [(SCORED[k], counts.count(k)) for k in SCORED if k in counts.numbers()]
    # means are mentioned only if a score used one
    scored = [
        row for row in scored if row[0] != SCORED["partial"] or counts.amount("partial")
    ]
    yield blocks.Table("Scored with a saved model", ("", "rows"), scored)
    predictions = report.at("predictions")
    if file := predictions.text("file"):
        listed = ", ".join(predictions.texts("columns"))
        yield blocks.Prose(f"The predictions are in {file}, with {listed}.")
    columns = [
        blocks.text_column("table", "table"),
        blocks.text_column("sites", "sites"),
    ]
    title = "Sites of the model that were not there"
    yield blocks.tabulate(title, report.records("missing"), columns)


def _metrics(report: blocks.Record) -> blocks.Table:
    """Return the metrics of the model and of a constant, each in one format."""
    rows: dict[str, dict[str, float]] = {}
    for part in (convergence.TEST, convergence.TRAIN):
        constant = report.at("baseline").at(part).numbers()
        final = convergence.final_metrics(report, part)
        for suffix, metrics in (("", final), (": constant", constant)):
            if metrics:
                rows[f"{_rows_of(report, part)}{suffix}"] = metrics
    names = {name for metrics in rows.values() for name in metrics}
    if "log_loss" in names:
        names.discard("loss")
    order = [
        *(n for n in convergence.METRIC_NAMES if n in names),
        *sorted(names - convergence.METRIC_NAMES.keys()),
    ]
    columns = [[metrics.get(name) for metrics in rows.values()] for name in order]
    texts = (map(console.value_format(column), column) for column in columns)
    cells = zip(rows, *texts, strict=True)
    head = ("", *(convergence.metric_name(name, report) for name in order))
    note = ""
    if report.at("baseline"):
        note = blocks.NOTES["constant"]
    return blocks.Table("Metrics of the model", head, list(cells), note=note)


def _classes(report: blocks.Record) -> blocks.Table:
    """Return the number of rows of each class, and the classes predicted for them."""
    counts = report.at("classes")
    confusion = report.at("confusion")
    parts = {"train": "training rows", "test": "held-out rows"} if counts else {}
    rows = [
        (
            name,
            *(counts.at(name).count(part) for part in parts),
            *(confusion.at(name).count(other) for other in confusion.content),
        )
        for name in list(confusion.content or counts.content)[:MOST_ROWS]
    ]
    head = ("class", *parts.values(), *(f"as {name}" for name in confusion.content))
    note = ""
    if confusion:
        note = blocks.NOTES["classes" if counts else "evaluated-classes"]
    return blocks.Table("Classes", head, rows, note=note)


def warnings(report: blocks.Record) -> blocks.Blocks:
    """Yield the warnings about the result."""
    for warning in report.texts("warnings"):
        yield blocks.Prose(f"Warning: {warning}.")


def label_rows(report: blocks.Record) -> blocks.Prose:
    """Return the task, how many label rows join, and which steps lost the others."""
    rows = report.at("label-rows")
    lost = [
        f"{loss.count('rows')} have no match in {loss.text('step')}"
        f"{_keyless(loss, 'rows', 'keyless')}"
        for loss in rows.records("lost")
    ]
    sample = report.at("settings").number("sample") or 1.0
    head = "Label rows"
    if sample < 1.0:
        head = f"Label rows (sample = {sample:g})"
    joined = f"{head}: {rows.count('joined')} of {rows.count('rows')} are joined"
    task = f"Task: {task}. " if (task := report.at("chosen").text("task")) else ""
    # rows of LEFT JOINs stay, with nothing from the other table
    alone = [
        f"{step.count('unmatched-before')} of {step.count('rows-before')} rows have "
        f"no match in {step.text('table')}"
        f"{_keyless(step, 'unmatched-before', 'keyless-before')}"
        for step in report.records("join-steps")
        if step.get("is-outer") and step.amount("unmatched-before")
    ]
    sentence = "; ".join([joined, *lost, *alone])
    return blocks.Prose(f"{task}{sentence}.{_trees(report.at('chosen'))}")


def _keyless(counts: blocks.Record, rows: str, keyless: str) -> str:
    """Return how many of some rows have no key, if not all, and why others may lack."""
    without = ""
    if 0 < counts.amount(keyless) < counts.amount(rows):
        without = f", {counts.count(keyless)} of them without a key"
    if advice := counts.text("advice"):
        without += f" ({advice})"
    return without


def _trees(chosen: blocks.Record) -> str:
    """Return how trees grow and when they end; "" for models without trees.

    Their growth follows from the rows or from the settings.
    """
    if "trees-per-round" not in chosen.numbers():
        return ""
    trees = chosen.count("trees-per-round")
    leaves = chosen.count("leaves")
    patience = int(chosen.amount("patience"))
    end = ""
    if patience:
        end = f", until {blocks.count_text(patience, 'epoch')} have not helped"
    return (
        f" Trees: {trees} of each table in an epoch, of at most {leaves} leaves{end}."
    )


def _rows_of(report: blocks.Record, part: str) -> str:
    split = report.at("split").text("name")
    held_out = "held-out rows"
    if split:
        held_out = f"held-out rows ({split})"
    rows = "training rows"
    if part == convergence.TEST:
        rows = held_out
    if report.at("metrics"):
        return "all rows"
    return rows


def _run_facts(report: blocks.Record) -> Iterator[str]:
    """Yield the method, loss, saved model and start of the run."""
    saved = report.at("model")
    settings = report.at("settings")
    if saved:
        yield saved.text("strategy")
    else:
        strategy = settings.text("strategy")
        yield registry.title_of(strategy)
        yield _models(settings)
    loss = convergence.loss_of(report)
    yield f"{loss} loss" if loss else ""
    names = filter(None, (saved.text("name"), saved.text("version")))
    yield "@".join(names) or report.text("model")
    yield _moment(report.text("started"))


def _models(settings: blocks.Record) -> str:
    """Return the models that a run trains; "" if the settings do not name them.

    >>> settings = {"strategy": "", "model": "linear", "models": "f=mlp"}
    >>> _models(blocks.Record(settings))
    'linear models (f=mlp)'
    """
    if text := registry.models_text(settings.text("strategy"), settings.content):
        return text
    model = settings.text("model")
    if not model:
        return ""
    exceptions = settings.text("models")
    suffix = f" ({exceptions})" if exceptions else ""
    return f"{model} models{suffix}"


def _moment(started: str) -> str:
    """Return a time as readable text.

    >>> _moment("2026-11-20T08:00:00+00:00")
    '20 November 2026, 08:00 UTC'
    """
    try:
        moment = datetime.fromisoformat(started)
    except ValueError:
        return started
    return f"{moment.day} {moment:%B %Y, %H:%M} UTC"


def facts(report: blocks.Record) -> Iterator[Fact]:
    """Yield the main figures: metric, rows, rounds, bytes and time."""
    yield from _metric_fact(report)
    yield from _rows_fact(report)
    epochs = report.amount("epochs")
    if rounds := int(report.amount("rounds")) or len(report.records("history")):
        details = (
            blocks.count_text(epochs, "epoch") if epochs else "",
            report.text("verdict"),
        )
        yield "rounds", console.format_count(rounds), ", ".join(filter(None, details))
    up = report.amount("bytes_up")
    down = report.amount("bytes_down")
    if up + down:
        detail = f"{console.format_bytes(up)} up, {console.format_bytes(down)} down"
        yield "sent", console.format_bytes(up + down), detail
    if report.number("seconds") is not None:
        yield "time", console.format_seconds(report.amount("seconds")), ""


def _metric_fact(report: blocks.Record) -> Iterator[Fact]:
    """Yield the main metric, on test rows if there are any."""
    if choice := convergence.main_metric(report):
        part, metric = choice
        train = convergence.final_metrics(report, convergence.TRAIN).get(metric)
        rows_of = "" if report.at("metrics") else f"{part} "
        has_both = part == convergence.TEST and train is not None
        split = ""
        if part == convergence.TEST:
            split = report.at("split").text("name")
        detail = ""
        if has_both:
            detail = f"train {console.format_value(train)}"
        detail = ", ".join(filter(None, (split, detail)))
        value = console.format_value(convergence.final_metrics(report, part)[metric])
        yield f"{rows_of}{convergence.metric_name(metric, report)}", value, detail
    elif report.at("final").at(convergence.TRAIN).content:
        yield "metrics", console.UNKNOWN, "noise hides them"


def _rows_fact(report: blocks.Record) -> Iterator[Fact]:
    """Yield how many joined rows were scored, or trained on and held out."""
    scored = report.at("rows")
    rows = report.at("joined-rows")
    if "joined" in scored.numbers():
        yield "joined rows", scored.count("joined"), "scored"
    elif rows.numbers():
        train = int(rows.amount(convergence.TRAIN))
        test = int(rows.amount(convergence.TEST))
        detail = "none held out"
        if test:
            detail = f"{console.format_count(test)} held out"
        if validation := int(report.at("split").amount("validation-rows")):
            detail += f", {console.format_count(validation)} validate"
        yield "joined rows", console.format_count(train + test + validation), detail
