"""The section of a report's page about a coreset: its size, and who drew it."""

from tp_flower.reports import blocks, console

DRAWS = {"importance": "by importance", "uniform": "uniformly"}
GAMMA = "gamma (Assumption 4.1): 1 where the tables' columns are orthogonal"


def sections(report: blocks.Record) -> blocks.Blocks:
    """Yield the coreset that was trained on, if there is one, and who drew it."""
    coreset = report.at("chosen").at("coreset")
    if not coreset:
        return
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
