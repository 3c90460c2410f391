"""The tables that `explain` prints."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from strategies.explain.cost import RunCost
from strategies.explain.explanation import (
    Explanation,
    JoinExplanation,
    KeySide,
    TableExplanation,
)
from tp_flower.joins.joining import JoinStep
from tp_flower.reports.console import format_bytes, format_count, name_table, new_table

INDENT = 2


def explanation_view(explanation: Explanation) -> RenderableType:
    """Return everything that `explain` prints."""
    return Group(
        *_section("The query as understood", Text(explanation.query)),
        *_section(
            "What the sites of each table run, in their database or in DuckDB",
            *_work(explanation.tables),
        ),
        _tables(explanation.tables),
        _steps(explanation.join_steps),
        _joins(explanation.joins),
        *_weights(explanation.row_weight),
        *_section("What is saved", *map(Text, _saving(explanation))),
        _cost(explanation.cost),
        _disclosures(explanation),
    )


def _section(title: str, *content: RenderableType) -> Iterable[RenderableType]:
    yield Text(f"\n{title}", style="italic")
    for item in content:
        yield Padding(item, (0, 0, 0, INDENT))


def _work(tables: Sequence[TableExplanation]) -> Iterable[RenderableType]:
    for table in tables:
        sites = ", ".join(dict.fromkeys(table.sites))
        yield Text(f"{table.table} at {sites}", style="bold")
        for line in table.work:
            yield Padding(Text(line), (0, 0, 0, INDENT))


def _tables(tables: Sequence[TableExplanation]) -> Table:
    view = new_table(
        "Tables (joined rows per row: min, median, max)",
        ("table",),
        ("shards", "rows", "in no joined row", "features", "joined rows per row"),
    )
    for item in tables:
        # names come from the query: markup in them is text
        name = name_table(item.table, " + ".join(item.names))
        if item.dropped:
            name += f"\n  constant, dropped: {', '.join(item.dropped)}"
        counts = (len(item.rows), item.total_rows, item.unused_rows, item.features)
        spread = _spread(*(item.multiplicity[key] for key in ("min", "median", "max")))
        view.add_row(Text(name), *map(format_count, counts), spread)
    return view


def _spread(low: float, middle: float, high: float) -> str:
    return " .. ".join(f"{number:,g}" for number in (low, middle, high))


def _steps(steps: Sequence[JoinStep]) -> Table:
    view = new_table(
        "Joining, step by step (fan-out: min, median, max)",
        ("table", "on"),
        ("rows before", "without match", "fan-out", "rows after"),
    )
    for step in steps:
        kind = "LEFT " if step.is_outer else ""
        if not step.on:
            view.add_row(Text(step.table), "", "", "", "", format_count(step.rows))
            continue
        view.add_row(
            Text(kind + step.table),
            Text(step.on),
            format_count(step.rows_before),
            format_count(step.unmatched_before),
            _spread(step.fan_out_min, step.fan_out_median, step.fan_out_max),
            format_count(step.rows),
        )
    return view


def _joins(joins: Sequence[JoinExplanation]) -> RenderableType:
    if not joins:
        return Text("")
    view = new_table(
        "Join keys (rows whose key the other table lacks; of them NULL)",
        ("join", "left", "right"),
        ("keys confirmed",),
    )
    for join in joins:
        view.add_row(
            Text(join.on),
            Text(_side(join.left)),
            Text(_side(join.right)),
            format_count(join.checked_keys),
        )
    return view


def _side(side: KeySide) -> str:
    unmatched, rows = format_count(side.unmatched), format_count(side.rows)
    null = f", {format_count(side.null)} NULL" if side.null else ""
    return f"{side.table}: {unmatched} of {rows}{null}"


def _weights(weights: Mapping[str, object] | None) -> Iterable[RenderableType]:
    """Yield the weights of joined rows, if there are any."""
    if weights is None:
        return ()
    made_of = [f"weight of {weights['column']}"] if weights["column"] else []
    if weights["entity"]:
        made_of.append(f"each row of {weights['entity']} counts once")
    spread = f"from {weights['min']:.4g} to {weights['max']:.4g} (mean 1)"
    sure = f"as sure as {weights['effective-rows']:,.0f} rows of equal weight"
    lines = ["; ".join(made_of), f"{spread}; {sure}"]
    if weights["left-out"]:
        lines.append(f"{weights['left-out']:,} joined rows of weight 0 take no part")
    return _section("What a joined row weighs", *map(Text, lines))


def _saving(explanation: Explanation) -> Iterable[str]:
    rows, held = explanation.joined_rows, explanation.rows_held
    values, values_held = explanation.joined_values, explanation.values_held
    train, test = explanation.joined_rows_train, explanation.joined_rows_test
    yield (
        f"{format_count(rows)} joined rows ({format_count(train)} to train on, "
        f"{format_count(test)} held out) from {format_count(held)} rows held"
    )
    yield (
        f"{format_count(values)} values in the joined table, "
        f"{format_count(values_held)} held: {_times(values, values_held)}"
    )


def _times(joined: int, held: int) -> str:
    if not held:
        return "no features"
    return f"the join, which is never built, has {joined / held:.2f} times as many"


def _cost(cost: RunCost) -> Table:
    """Rounds and bytes of set-up, one epoch and the whole run."""
    title = f"Training by {cost.strategy}, without the round that finds the sites"
    view = new_table(title, ("",), ("rounds", "up", "down"))
    whole = f"the whole run, epochs: {cost.epochs}"
    parts = {"set-up": cost.set_up, "one epoch": cost.epoch, whole: cost.run}
    for name, traffic in parts.items():
        directions = map(format_bytes, (traffic.bytes_up, traffic.bytes_down))
        view.add_row(name, format_count(traffic.rounds), *directions)
    return view


def _disclosures(explanation: Explanation) -> Table:
    view = new_table(
        "Who will learn what", ("message", "to", "what it carries", "covered by"), ()
    )
    last = ""
    for item in explanation.disclosures:
        message = "" if item.message == last else item.message
        last = item.message
        cells = (message, item.to, item.carries, item.protection)
        view.add_row(*map(Text, cells))
    return view
