"""A fragment of the query in words: what the sites of one table run."""

from collections.abc import Sequence
from dataclasses import dataclass

from tp_flower.duckdb_engine import quote_name
from tp_flower.query.fragment import Feature, Fragment
from tp_flower.sources.tables_file import DUCKDB


@dataclass(frozen=True)
class SiteWork:
    """Where a shard's fragment runs.

    Attributes:
        engine: the kind of database that holds the rows.
        pushed: the filters that it applies, in words; DuckDB computes the rest at the
            site.
    """

    engine: str
    pushed: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Say it on one line."""
        if self.engine == DUCKDB:
            return "all in DuckDB at the site"
        pushed = "; ".join(self.pushed) or "the columns only"
        return f"in {self.engine}: {pushed}. All else in DuckDB at the site"


def describe_places(shards: Sequence[tuple[str, SiteWork]]) -> tuple[str, ...]:
    """Return where the work of a table is done, a line for all sites that do alike.

    Args:
        shards: of one table: the site and its work.

    >>> describe_places([("us", SiteWork("duckdb")), ("uk", SiteWork("duckdb"))])
    ('us, uk: all in DuckDB at the site',)
    """
    sites: dict[SiteWork, list[str]] = {}
    for site, work in shards:
        sites.setdefault(work, []).append(site)
    return tuple(
        f"{', '.join(dict.fromkeys(own))}: {work}" for work, own in sites.items()
    )


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
    if first.weight is not None:
        lines.append(f"weight of a joined row: {first.weight}")
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
