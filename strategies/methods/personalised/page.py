"""The section of a report's page about the models of single sites."""

from strategies.report_page.convergence import TEST, metric_name
from tp_flower.methods.personalised.messages import OWN_MODELS
from tp_flower.reports import blocks, console

SITE_METRICS = ("log_loss", "rmse", "auc")


def sections(report: blocks.Record) -> blocks.Blocks:
    """Yield each site's metrics and the similarity graph of a personalised run."""
    personal = report.at("personal")
    if sites := personal.records("sites"):
        yield _site_metrics(personal, sites)
        yield _graph(personal.at("graph"), sites)


def _site_metrics(
    personal: blocks.Record, sites: list[blocks.Record]
) -> blocks.Block | None:
    """Return every site's metrics, beside those of other models."""
    models = [name for name in OWN_MODELS if any(site.at(name) for site in sites)]
    measured = [site.at("personal").at(TEST).numbers() for site in sites]
    metrics = [
        key for key in SITE_METRICS if any(key in numbers for numbers in measured)
    ]
    if not metrics:
        return None

    def values(site: blocks.Record) -> list[float | None]:
        return [site.at(name).at(TEST).number(metrics[0]) for name in models]

    show = console.value_format(value for site in sites for value in values(site))

    rows = [
        (
            site.text("site"),
            site.count("rows"),
            str(_cluster(site) + 1),
            *map(show, values(site)),
        )
        for site in sites
    ]
    total = console.format_count(int(sum(site.amount("rows") for site in sites)))
    rows.append(
        ("mean of the sites", total, "", *map(show, values(personal.at("means"))))
    )
    head = (
        "site",
        "rows, train",
        "cluster",
        *(OWN_MODELS[name] for name in models),
    )
    note = "Sites of a cluster have the same model."
    return blocks.Table(
        f"Test {metric_name(metrics[0])}, by site", head, rows, note=note
    )


def _cluster(site: blocks.Record) -> int:
    return int(site.amount("cluster"))


def _graph(graph: blocks.Record, sites: list[blocks.Record]) -> blocks.Block:
    """Return the similarity graph as a list of edges."""
    names = [site.text("site") or "?" for site in sites]
    clusters = {_cluster(site) for site in sites}
    edges = [pair for pair in graph.items("edges") if _is_edge(pair, len(sites))]
    groups = int(graph.amount("components"))
    summary = (
        f"{len(names)} sites, {len(edges)} edges, {len(clusters)} clusters of "
        f"equal models, {blocks.count_text(groups, 'connected group')}"
    )
    lost = ". Sites of different groups share nothing but what is not personal"
    pairs = [(names[left], names[right]) for left, right in edges]
    note = f"Made of: {graph.text('kind')}. {summary}{lost if groups > 1 else ''}."
    return blocks.Table(
        "The similarity graph", ("site", "site"), pairs, blocks.TWO_TEXTS, note=note
    )


def _is_edge(pair: object, count: int) -> bool:
    """Return whether a value of the report is an edge between its sites."""
    return (
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(type(node) is int and 0 <= node < count for node in pair)
    )
