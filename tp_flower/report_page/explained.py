"""What `explain` adds to a page: what training would cost."""

from collections.abc import Mapping
from typing import Any

from tp_flower.console import format_bytes, format_count, format_seconds
from tp_flower.explain.cost import NETWORKS
from tp_flower.report_page.bar_plot import Bar, Measure, bar_figure
from tp_flower.report_page.blocks import Block, Section, Table
from tp_flower.report_page.reading import Report, amount, mapping, records, text, total


def predicted_costs(report: Report) -> Section:
    """Return the costs of every strategy on the networks."""
    found = records(report.get("strategies"))
    blocks = [_table(found), _bytes(found)] if found else []
    title = "What training would cost"
    return Section("predicted", title, [own for own in blocks if own])


def _table(found: list[Mapping[str, Any]]) -> Block:
    rows = []
    for own in found:
        run = mapping(own.get("run"))
        seconds = mapping(run.get("seconds"))
        rows.append(
            (
                _name(own),
                format_count(int(amount(own.get("epochs")))),
                format_count(int(amount(run.get("rounds")))),
                format_bytes(total(run.get("bytes-up"))),
                format_bytes(total(run.get("bytes-down"))),
                *(format_seconds(amount(seconds.get(net.name))) for net in NETWORKS),
                format_bytes(amount(own.get("server-bytes"))),
            )
        )
    networks = (f"on {network.name}" for network in NETWORKS)
    head = ("strategy", "epochs", "rounds", "up", "down", *networks, "server memory")
    note = "Time is latency of the rounds plus bytes over bandwidth, without computing."
    return Table("A whole run, by strategy", head, rows, note=note)


def _bytes(found: list[Mapping[str, Any]]) -> Block | None:
    bars = []
    for own in found:
        run = mapping(own.get("run"))
        sent = total(run.get("bytes-up")), total(run.get("bytes-down"))
        bars.append(Bar(_name(own), sent))
    measure = Measure(
        "MB", ("up, to the server", "down, to the sites"), format_bytes, 1e6
    )
    return bar_figure("Bytes of a whole run, by strategy", measure, bars)


def _name(strategy: Mapping[str, Any]) -> str:
    chosen = " (chosen)" if strategy.get("is-chosen") else ""
    return f"{text(strategy.get('name'))}{chosen}"
