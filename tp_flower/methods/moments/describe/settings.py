"""What descriptive statistics of the joined rows read of a run's settings."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Final

from tp_flower.errors import PolicyError
from tp_flower.settings.declare import Form, OneOf, Range, Readers, list_of, setting
from tp_flower.settings.run import JOINED
from tp_flower.settings.settings import Settings
from tp_flower.settings.training import NONE

TABLE_ONE: Final = "table-one"
KAPLAN_MEIER: Final = "kaplan-meier"
MOST_TIMES: Final = 200
MIN_CELL: Final = 10
_ADVICE: Final = {
    TABLE_ONE: "leave it out, or filter these rows; of missing values, let them count "
    "as the mean, missing=mean, of a category as one, missing=category",
    KAPLAN_MEIER: "take curve-times that are farther apart",
}
_TIMES: Final = list_of(
    lambda time: float(str(time)),
    f"a list of at most {MOST_TIMES} ascending times above 0, such as '30, 60, 90'",
    lambda times: (
        len(times) <= MOST_TIMES
        and all(0.0 < time < math.inf for time in times)
        and all(before < after for before, after in pairwise(times))
    ),
)


@dataclass(frozen=True)
class DescribeSettings:
    """Strategy "moments": descriptive statistics in place of a model."""

    readers = Readers(
        of_methods=True, refusal="is for strategy 'moments' only, not {strategy!r}"
    )

    describe: str = setting(
        NONE,
        'Descriptive statistics in place of a model: "table-one" (means, deviations '
        'and shares of every column, by group), "kaplan-meier" (survival curves on a '
        "grid of times, by group). `tp-flower table-one` and `tp-flower kaplan-meier` "
        "set it.",
        OneOf((NONE, TABLE_ONE, KAPLAN_MEIER)),
    )
    group_by: str = setting(
        "",
        "The column of categories whose groups are described, of any table of the "
        'query, "c.segment"; "" = all rows together.',
    )
    curve_times: tuple[float, ...] = setting(
        (),
        'The grid of "kaplan-meier", "30, 60, 90": a time counts as the next of these.',
        Form("times, comma separated", _TIMES),
    )
    min_cell: int = setting(
        MIN_CELL,
        "What is described of fewer joined rows, or events, is not shown. A table's "
        "policy refuses less than its min-cell or its min-count.",
        Range(1, 1 << 31),
    )


def described(settings: Settings) -> str:
    """Return what a run describes: a table or curves; "" if it trains a model."""
    if "describe" not in settings.rules.reads:
        return ""
    kind = settings.of(DescribeSettings).describe
    return "" if kind == NONE else kind


def check_cells(settings: Settings, min_count: int, min_cell: int) -> None:
    """Refuse to show less than a table's policy lets a category, or a cell, have.

    Raises:
        PolicyError: the setting `min-cell` is less than ``min_count``, or than the
            policy's ``min_cell``.
    """
    if not described(settings):
        return
    least = settings.of(DescribeSettings).min_cell
    rule, required = max(
        ("min-count", min_count), ("min-cell", min_cell), key=itemgetter(1)
    )
    if least < required:
        raise PolicyError(
            f"the table's policy ({rule} = {required}) refuses: a description of "
            f"{least} rows; set min-cell = {required}, or more"
        )


def column_advice(settings: Settings) -> str:
    """Return what to do about a column that is the same in nearly all rows.

    "" where nothing is described.
    """
    return _ADVICE.get(described(settings), "")


def tells_of_groups(settings: Settings) -> str:
    """Return what a description tells the server of a table; "" without one."""
    kind = described(settings)
    if not kind:
        return ""
    group = settings.of(DescribeSettings).group_by
    of_groups = f", in every group of {group}" if group else ""
    return (
        f"by its encoders, for {kind}: sums and sums of squares of the numbers, and "
        f"counts of the categories and of missing values{of_groups}; min-cell hides "
        "some from whoever reads the report, none from the server"
    )


def describe_conflicts(settings: Settings) -> Iterator[str]:
    """Yield the settings that descriptive statistics do not go with."""
    values = settings.of(DescribeSettings)
    kind = values.describe
    if kind == NONE:
        if values.group_by or values.curve_times:
            name = "group-by" if values.group_by else "curve-times"
            yield f"{name}: it is set, but describe is {NONE!r}: set describe"
        return
    asked = f"describe: {kind!r}"
    if settings.test_fraction or settings.validation_share:
        yield (
            f"{asked} is of all joined rows: set test-fraction = 0, and leave "
            "validation-fraction"
        )
    if settings.is_sampled or settings.sample < 1.0:
        yield f"{asked} is of all joined rows, not of a sample: leave it out"
    if settings.row_weight != JOINED:
        yield f"{asked} counts every joined row once: leave row-weight {JOINED!r}"
    if settings.privacy.covers_features:
        yield f"{asked} has no noise: leave privacy.features 'clear'"
    if (kind == KAPLAN_MEIER) != bool(values.curve_times):
        needs = "needs" if kind == KAPLAN_MEIER else "takes no"
        yield f"{asked} {needs} curve-times, the grid of its curves"
