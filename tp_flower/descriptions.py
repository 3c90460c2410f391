"""Describe a join that is never built, from Python: tables and survival curves.

Like everything else, it is a run (:mod:`tp_flower.api`), which trains no model.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tp_flower.api import FilePath, Sites, fit
from tp_flower.errors import SettingsError
from tp_flower.methods.moments.describe.settings import KAPLAN_MEIER, TABLE_ONE
from tp_flower.reports.description import curve_frame, table_frame
from tp_flower.reports.moments import METHOD

if TYPE_CHECKING:
    import pandas as pd

    from tp_flower.query import Query


def table_one(
    query: "str | Query",
    sites: Sites,
    by: str = "",
    *,
    home: FilePath | None = None,
    **settings: Any,
) -> "pd.DataFrame":
    """Describe the joined rows of a query, by group: a biostatistician's "Table 1".

    It needs no label; every selected column is described, from the second moments of
    the joined rows, which leave the sites once, as by :func:`~tp_flower.moments`.

    Args:
        query: SQL; with ``AS time`` and ``AS event`` also crude rates of events.
        sites: see :func:`~tp_flower.fit`.
        by: the column of categories that makes the groups, ``"c.segment"``, of any
            table; "" describes all rows together.
        home: see :func:`~tp_flower.fit`.
        settings: see :func:`~tp_flower.fit`; ``min_cell=10`` is how many rows a cell
            that is shown has at least.

    Returns:
        A row for each ``variable``, ``category`` and ``group``, "all" among them, with
        ``count`` and ``missing`` rows, ``mean`` and ``deviation`` of numbers, ``share``
        of categories, of events by time ``events``, ``time`` and ``rate``; ``low`` and
        ``high``, the ends of the interval of 95 % of a share or rate; ``test``,
        ``statistic`` and ``p``. NaN is hidden, or nothing.
        ``attrs["notes"]`` has what is to be said of them.

    Raises:
        SettingsError: a setting is refused, or a column that nothing describes.
        TPFlowerError: the query, a table or a site ends the run.

    >>> import pandas as pd
    >>> visits = pd.DataFrame({"patient": [0, 0, 1, 2], "dose": [1.0, 3.0, 2.0, 4.0]})
    >>> patients = pd.DataFrame({"id": [0, 1, 2], "sex": ["f", "m", "m"]})
    >>> frame = table_one(
    ...     "SELECT v.dose, p.sex FROM visits v JOIN patients p ON v.patient = p.id",
    ...     {"clinic": {"visits": visits}, "registry": {"patients": patients}},
    ...     by="p.sex",
    ...     encoders="p.sex=categories(f, m)",
    ...     min_cell=1,
    ... )
    >>> frame.query("variable == 'v.dose'")[["group", "count", "mean"]].to_dict("list")
    {'group': ['all', 'f', 'm'], 'count': [4.0, 2.0, 2.0], 'mean': [2.5, 2.0, 3.0]}
    """
    values = {"describe": TABLE_ONE, "group_by": by, **settings}
    return table_frame(_describe(query, sites, home, values))


def kaplan_meier(
    query: "str | Query",
    sites: Sites,
    by: str = "",
    *,
    times: Sequence[float],
    home: FilePath | None = None,
    **settings: Any,
) -> "pd.DataFrame":
    """Return Kaplan-Meier curves of the joined rows of a query, by group.

    Args:
        query: SQL with ``AS time`` and ``AS event``; other columns are not read.
        sites: see :func:`~tp_flower.fit`.
        by: the column of categories that makes the groups; see :func:`table_one`.
        times: the grid, ascending. A time counts as the next of these.
        home: see :func:`~tp_flower.fit`.
        settings: see :func:`table_one`.

    Returns:
        A row for each ``group`` and ``time`` that is shown, with ``at_risk``, ``events``
        since the row before, ``survival``, its Greenwood ``error``, and ``low`` and
        ``high``, the ends of the interval of 95 %. ``attrs`` has the ``log_rank`` test,
        the ``groups`` with their rows and events, and ``notes``.

    Raises:
        SettingsError: a setting is refused.
        TPFlowerError: the query, a table or a site ends the run.

    >>> import pandas as pd
    >>> stays = pd.DataFrame({"days": [1, 2, 3, 4], "died": [True, False, True, True]})
    >>> curve = kaplan_meier(
    ...     "SELECT s.days AS time, s.died AS event FROM stays s",
    ...     {"clinic": {"stays": stays}},
    ...     times=[1, 2, 3],
    ...     min_cell=1,
    ... )
    >>> curve[["at_risk", "events", "survival"]].to_dict("list")
    {'at_risk': [4.0, 3.0, 2.0], 'events': [1.0, 0.0, 1.0], 'survival': [0.75, 0.75, 0.375]}
    """  # noqa: E501 - the dictionary as it is printed
    values = {
        "describe": KAPLAN_MEIER,
        "group_by": by,
        "curve_times": tuple(times),
        **settings,
    }
    return curve_frame(_describe(query, sites, home, values))


def _describe(
    query: "str | Query",
    sites: Sites,
    home: FilePath | None,
    settings: Mapping[str, Any],
) -> Mapping[str, Any]:
    """Return the report of a run that describes all joined rows."""
    if "strategy" in settings:
        raise SettingsError(f"strategy: {METHOD!r} describes a join; leave it out")
    values = {"test_fraction": 0.0, **settings}
    return fit(query, sites, home=home, strategy=METHOD, **values).report
