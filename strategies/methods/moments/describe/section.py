"""What a run that describes its joined rows reports.

Entry ``moments`` of `report.json`, beside what is there of other runs; null is what is
hidden, or has no value::

    describe   "table-one" or "kaplan-meier"
    group-by   the column, "" without groups
    min-cell   of how many rows or events nothing less is shown
    groups     [{name, rows}]   of a table; where there are groups, all rows first
    variables  [{variable, kind: "number", "category" or "rate", test, statistic,
               freedom: [..], p, rows: [{category, cells: [{..}]}]}]   a cell for each
               group: {count, mean, deviation, missing} of a number, {count, share,
               low, high, missing} of a category, {events, time, rate, low, high} of a
               rate
    curves     [{group, rows, events, points: [{time, at-risk, events, survival,
               error, low, high}]}]   events are those since the last point
    log-rank   {test, statistic, freedom: [..], p, groups: [{group, observed,
               expected}]}
    notes      [text]
"""

from collections.abc import Mapping

from strategies.methods.moments.describe.groups import DescribedRows
from strategies.methods.moments.describe.sheet import CurveSheet
from strategies.methods.moments.describe.table import TableOne, event_category
from tp_flower.features.spec import EncoderSpec
from tp_flower.methods.moments import questions
from tp_flower.methods.moments.describe.encoders import NUMBERS
from tp_flower.methods.moments.describe.queries import group_column
from tp_flower.methods.moments.describe.settings import KAPLAN_MEIER, DescribeSettings
from tp_flower.methods.moments.solve import JoinedMoments
from tp_flower.query import BoundQuery
from tp_flower.query.parsing import EVENT, TIME
from tp_flower.settings import Settings


def description(
    moments: JoinedMoments,
    columns: questions.FeatureColumns,
    bound: BoundQuery,
    settings: Settings,
    sharded: frozenset[str],
) -> dict[str, object]:
    """Return the entries about joined rows with these moments.

    Args:
        moments: of all joined rows.
        columns: the features' among the moments.
        bound: the query that is described.
        settings: with the encoders of all features.
        sharded: the tables in several shards.
    """
    values = settings.of(DescribeSettings)
    group = group_column(bound, values.group_by)
    rows = DescribedRows(
        moments,
        {name: moments.features[at] for name, at in columns.by_feature.items()},
        {
            f"{table}.{name}": EncoderSpec.parse(text)
            for table, name, text in settings.encoders
        },
        "" if group is None else str(group),
    )
    entries: Mapping[str, object]
    if values.describe == KAPLAN_MEIER:
        entries = CurveSheet(rows, values.curve_times, values.min_cell).entry()
    else:
        times = times_of(rows)
        entries = TableOne(rows, values.min_cell, sharded, times).entry()
    return {
        "describe": values.describe,
        "group-by": values.group_by,
        "min-cell": values.min_cell,
        **entries,
    }


def times_of(rows: DescribedRows) -> tuple[str, str] | None:
    """Return the features of the time and of the event, if the query names both.

    And if they are a number, and a number or a category that says whether there is one.
    """
    named = {feature.rpartition(".")[2].lower(): feature for feature in rows.specs}
    if TIME not in named or EVENT not in named:
        return None
    times = named[TIME], named[EVENT]
    time, event = (rows.specs[feature] for feature in times)
    is_counted = event.kind in NUMBERS or event_category(event) is not None
    return times if time.kind in NUMBERS and is_counted else None
