"""Models of the sites' own: what each is worth at its site, and who is like whom."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from tp_flower.console import OWN_MODELS, format_bytes, format_count, format_value
from tp_flower.report_page.blocks import Block, Figure, Section, Table
from tp_flower.report_page.reading import (
    Report,
    amount,
    items,
    mapping,
    number,
    records,
    text,
)
from tp_flower.report_page.svg import shorten, tag

METRICS = ("log_loss", "rmse", "auc")
COLOURS = 8
WIDTH, HEIGHT, RADIUS = 380.0, 340.0, 120.0
NAME_WIDTH = 56.0


def personal(report: Report) -> Section:
    """Return the metrics by site, the graph and the bytes of the updates."""
    found = mapping(report.get("personal"))
    sites = records(found.get("sites"))
    blocks: list[Block | None] = [
        _metrics(found, sites),
        _graph(mapping(found.get("graph")), sites),
    ]
    return Section("personal", "A model for every site", [own for own in blocks if own])


def _metrics(
    found: Mapping[str, Any], sites: Sequence[Mapping[str, Any]]
) -> Table | None:
    models = [name for name in OWN_MODELS if any(name in own for own in sites)]
    metric = next(
        (name for name in METRICS if any(_has(own, name) for own in sites)), None
    )
    if metric is None:
        return None
    rows = [
        (
            text(own.get("site")),
            format_count(int(amount(own.get("rows")))),
            str(int(amount(own.get("cluster"))) + 1),
            *(format_value(_value(own, name, metric)) for name in models),
        )
        for own in sites
    ]
    means = mapping(found.get("means"))
    total = format_count(int(sum(amount(own.get("rows")) for own in sites)))
    mean = [format_value(_value(means, name, metric)) for name in models]
    rows.append(("mean of the sites", total, "", *mean))
    shown = metric.replace("_", " ")
    head = ("site", "rows, train", "cluster", *(OWN_MODELS[name] for name in models))
    sent = mapping(found.get("bytes"))
    note = f"Test {shown} at each site. Sites of a cluster have the same model."
    if number(sent.get("updates")):
        note += (
            f" The updates of the sites' own models took "
            f"{format_bytes(amount(sent.get('updates')))}; in float32 "
            f"{format_bytes(amount(sent.get('updates-float32')))}."
        )
    return Table(f"Test {shown}, by site", head, rows, note=note)


def _has(site: Mapping[str, Any], metric: str) -> bool:
    return _value(site, "personal", metric) is not None


def _value(own: Mapping[str, Any], model: str, metric: str) -> float | None:
    return number(mapping(mapping(own.get(model)).get("test")).get(metric))


def _graph(
    graph: Mapping[str, Any],
    sites: Sequence[Mapping[str, Any]],
) -> Figure | None:
    if not sites:
        return None
    names = [text(own.get("site")) or "?" for own in sites]
    clusters = [int(amount(own.get("cluster"))) for own in sites]
    edges = [
        (int(pair[0]), int(pair[1]))
        for pair in items(graph.get("edges"))
        if _is_edge(pair, len(sites))
    ]
    groups = int(amount(graph.get("components")))
    summary = (
        f"{len(names)} sites, {len(edges)} edges, {len(set(clusters))} clusters of "
        f"equal models, {groups} connected group{'s' if groups != 1 else ''}"
    )
    rows = [(names[left], names[right]) for left, right in edges]
    lost = ". Sites of different groups share nothing but what is not personal"
    return Figure(
        "The similarity graph",
        _drawing(summary, names, clusters, edges),
        summary,
        Table("Edges", ("site", "site"), rows, words=frozenset({0, 1}), is_folded=True),
        note=f"Made of: {text(graph.get('kind'))}. {summary}"
        f"{lost if groups > 1 else ''}. Clusters of several sites have a colour.",
    )


def _is_edge(pair: object, count: int) -> bool:
    return (
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(type(place) is int and 0 <= place < count for place in pair)
    )


def _drawing(
    summary: str,
    names: Sequence[str],
    clusters: Sequence[int],
    edges: Sequence[tuple[int, int]],
) -> Markup:
    """Return the sites on a circle, those of a cluster beside each other."""
    order = sorted(range(len(names)), key=lambda k: (clusters[k], names[k]))
    places = {k: _place(n, len(order)) for n, k in enumerate(order)}
    several = sorted(own for own, count in Counter(clusters).items() if count > 1)
    colours = {own: f"s{n % COLOURS + 1}" for n, own in enumerate(several)}
    lines = [
        tag(
            "line",
            class_="base",
            x1=places[left][0],
            y1=places[left][1],
            x2=places[right][0],
            y2=places[right][1],
        )
        for left, right in edges
    ]
    nodes = [
        _node(names[k], colours.get(clusters[k], "alone"), *places[k]) for k in order
    ]
    return tag(
        "svg",
        tag("desc", summary),
        *lines,
        *nodes,
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        class_="plot",
        role="img",
        aria_label=f"The similarity graph. {summary}",
    )


def _place(position: int, count: int) -> tuple[float, float]:
    angle = 2.0 * math.pi * position / count - math.pi / 2.0
    return (
        WIDTH / 2.0 + RADIUS * math.cos(angle),
        HEIGHT / 2.0 + RADIUS * math.sin(angle),
    )


def _node(name: str, colour: str, x: float, y: float) -> Markup:
    """Return a site: a dot of its cluster's class, its name outside the circle."""
    right = x >= WIDTH / 2.0 - 1.0
    dot = tag("circle", class_=f"dot {colour}", cx=x, cy=y, r=6.0)
    out = 1.0 + 14.0 / RADIUS
    label = tag(
        "text",
        shorten(name, NAME_WIDTH),
        class_="name" if right else "name end",
        x=WIDTH / 2.0 + (x - WIDTH / 2.0) * out,
        y=HEIGHT / 2.0 + (y - HEIGHT / 2.0) * out + 4.0,
    )
    return tag("g", dot, label)
