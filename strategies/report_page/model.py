"""The model: the tables' contributions, the coreset, the models of single sites."""

from strategies.report_page.convergence import TEST, metric_name
from strategies.report_page.plots import bar_figure
from tp_flower.reports import blocks, console

MOST_BARS = 20
SITE_METRICS = ("log_loss", "rmse", "auc")
DRAWS = {"importance": "by importance", "uniform": "uniformly"}
GAMMA = "gamma (Assumption 4.1): 1 where the tables' columns are orthogonal"


def model(report: blocks.Record) -> blocks.Blocks:
    """Yield the coreset, the models of single sites, and what the tables add."""
    if coreset := report.at("chosen").at("coreset"):
        yield from _coreset(report, coreset)
    personal = report.at("personal")
    if sites := personal.records("sites"):
        yield _site_metrics(personal, sites)
        yield _graph(personal.at("graph"), sites)
    yield _shares(report)
    coefficients = report.at("coefficients")
    for alias, title in blocks.table_titles(report, coefficients.content).items():
        yield _coefficients(title, coefficients.records(alias))


def _shares(report: blocks.Record) -> blocks.Block | None:
    tables = report.at("contributions")
    shares = {
        alias: share
        for alias in tables.content
        if (share := tables.at(alias).number("share")) is not None
    }
    return bar_figure(
        "Share of the scores' variance, by table",
        [
            (title, [shares[alias]])
            for alias, title in blocks.table_titles(report, shares).items()
        ],
        _per_cent,
        ("share",),
        blocks.NOTES["shares"],
    )


def _per_cent(share: float) -> str:
    """Return a share in per cent.

    >>> _per_cent(0.123), _per_cent(0.0004)
    ('12.3 %', '0.04 %')
    """
    return f"{100 * share:.2g} %" if 0 < abs(share) < 0.001 else f"{100 * share:.1f} %"


def _coefficients(table: str, entries: list[blocks.Record]) -> blocks.Block | None:
    bars = [
        (_feature(entry), [value])
        for entry in entries
        if (value := entry.number("value")) is not None
    ]
    largest = sorted(bars, key=lambda bar: -abs(bar[1][0]))[:MOST_BARS]
    note = ""
    if len(largest) < len(bars):
        note = f"The {len(largest)} largest of {len(bars)}. "
    has_trees = any(entry.text("output") == "gain" for entry in entries)
    meaning = blocks.NOTES["gain" if has_trees else "coefficients"]
    return bar_figure(
        f"{'Gain by feature' if has_trees else 'Coefficients'} of {table}",
        largest,
        console.value_format(bar[1][0] for bar in largest),
        note=f"{note}{meaning} Its sites allow them to be shown.",
    )


def _feature(entry: blocks.Record) -> str:
    output = entry.get("output")
    suffix = "" if output in (None, "", "score", "gain") else f", output {output}"
    return f"{entry.text('feature') or '?'}{suffix}"


def _coreset(report: blocks.Record, coreset: blocks.Record) -> blocks.Blocks:
    kind = coreset.text("kind")
    largest = coreset.number("largest-weight")
    gamma = coreset.number("gamma")
    rows = [
        ("joined rows to draw from", coreset.count("joined-rows")),
        (f"drawn {DRAWS.get(kind, kind)}", coreset.count("size")),
        ("distinct", coreset.count("distinct-rows")),
        ("equivalent rows of equal weight", coreset.count("effective-rows")),
        ("largest weight over the mean", console.format_value(largest)),
        *([(GAMMA, console.format_value(gamma))] if gamma is not None else []),
    ]
    yield blocks.Table("The coreset that was trained on", ("", "rows"), rows)
    shares = coreset.at("shares")
    totals = coreset.at("totals")
    show = console.value_format(totals.amount(alias) for alias in shares.content)
    draws = [
        (title, show(totals.amount(alias)), f"{shares.amount(alias):.1%}")
        for alias, title in blocks.table_titles(report, shares.content).items()
    ]
    if draws:
        uniform = f"{coreset.amount('uniform-share'):.1%}"
        draws.append(("drawn uniformly", show(float(len(draws))), uniform))
        note = "A table's share of the draws is that of its sensitivities in all."
        head = ("table", "sum of sensitivities", "share of draws")
        yield blocks.Table("Who draws", head, draws, note=note)
    for words in coreset.texts("capped"):
        yield blocks.Prose(f"A total was lowered to what it can be: {words}.")


def _site_metrics(
    personal: blocks.Record, sites: list[blocks.Record]
) -> blocks.Block | None:
    models = [
        name for name in console.OWN_MODELS if any(site.at(name) for site in sites)
    ]
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
        *(console.OWN_MODELS[name] for name in models),
    )
    note = "Sites of a cluster have the same model."
    return blocks.Table(
        f"Test {metric_name(metrics[0])}, by site", head, rows, note=note
    )


def _cluster(site: blocks.Record) -> int:
    return int(site.amount("cluster"))


def _graph(graph: blocks.Record, sites: list[blocks.Record]) -> blocks.Block:
    names = [site.text("site") or "?" for site in sites]
    clusters = {_cluster(site) for site in sites}
    edges = [pair for pair in graph.items("edges") if _is_edge(pair, len(sites))]
    groups = int(graph.amount("components"))
    summary = (
        f"{len(names)} sites, {len(edges)} edges, {len(clusters)} clusters of "
        f"equal models, {blocks.counted(groups, 'connected group')}"
    )
    lost = ". Sites of different groups share nothing but what is not personal"
    pairs = [(names[left], names[right]) for left, right in edges]
    note = f"Made of: {graph.text('kind')}. {summary}{lost if groups > 1 else ''}."
    return blocks.Table(
        "The similarity graph", ("site", "site"), pairs, blocks.TWO_TEXTS, note=note
    )


def _is_edge(pair: object, count: int) -> bool:
    return (
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(type(node) is int and 0 <= node < count for node in pair)
    )
