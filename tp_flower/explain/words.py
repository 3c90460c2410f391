"""A fragment of the query in words: what the sites of one table run."""

from collections.abc import Sequence

from tp_flower.query.fragment import Feature, Fragment
from tp_flower.sources.sql_text import quote_name


def describe_work(fragments: Sequence[Fragment]) -> tuple[str, ...]:
    r"""Return what the sites of a table run, a line each.

    Args:
        fragments: of one table; several for the SELECTs of a UNION ALL.

    >>> day = Feature("weekday", 'DAYOFWEEK("day")')
    >>> own = Fragment("f", "flights", (Feature("hour", '"hour"'), day),
    ...                (('"plane"',),), '"delay" > 15', ('"delay" IS NOT NULL',))
    >>> print(*describe_work([own]), sep="\n")
    rows of flights WHERE "delay" IS NOT NULL
    features: hour, weekday = DAYOFWEEK("day")
    join keys: ("plane")
    label: "delay" > 15
    """
    first = fragments[0]
    lines = [_rows(fragment) for fragment in fragments]
    lines.append(f"features: {', '.join(map(_feature, first.features)) or 'none'}")
    if first.keys:
        keys = ", ".join(f"({', '.join(parts)})" for parts in first.keys)
        lines.append(f"join keys: {keys}")
    if first.label is not None:
        lines.append(f"label: {first.label}")
    return tuple(lines)


def _rows(fragment: Fragment) -> str:
    where = f" WHERE {' AND '.join(fragment.filters)}" if fragment.filters else ""
    if fragment.subquery is None:
        return f"rows of {fragment.name}{where}"
    return f"rows of ({fragment.subquery.to_sql(fragment.name)}){where}"


def _feature(feature: Feature) -> str:
    if feature.sql in (feature.name, quote_name(feature.name)):
        return feature.name
    return f"{feature.name} = {feature.sql}"
