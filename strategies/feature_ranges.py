"""Whether private statistics are possible: told before anything is sent to a site."""

from collections.abc import Mapping

from tp_flower.encoding.choice import TableChoice
from tp_flower.encoding.ranges import choose_ranges
from tp_flower.encoding.row_sums import feature_problems, no_private_statistics
from tp_flower.extraction.plan import feature_kinds
from tp_flower.query import BoundQuery
from tp_flower.settings import PrivacySettings


def check_ranges(
    bound: BoundQuery,
    schemas: Mapping[str, Mapping[str, str]],
    choices: Mapping[str, TableChoice],
    privacy: PrivacySettings,
) -> None:
    """Refuse a run whose declared ranges do not fit the query's features.

    Args:
        bound: the query over the sites' columns.
        schemas: table name -> column -> DuckDB type.
        choices: encoders of every table.
        privacy: of the run.

    Raises:
        SettingsError: a range is of no feature of the query; or statistics are to be
            private and a feature has no range, or an encoder that takes quantiles:
            lists all of them.
        SchemaError: an encoder does not fit its feature.
    """
    names = {table: list(own.choices) for table, own in choices.items()}
    ranges = choose_ranges(privacy.ranges, names)
    if not privacy.covers_statistics:
        return
    # names of tables are compared as DuckDB does: without case
    columns = {name.lower(): own for name, own in schemas.items()}
    problems = [
        problem
        for fragment in bound.fragments
        for problem in feature_problems(
            choices[fragment.table],
            feature_kinds(fragment, columns[fragment.name.lower()]),
            ranges[fragment.table],
        )
    ]
    if problems:
        # a table of a UNION has several fragments of the same features
        raise no_private_statistics(list(dict.fromkeys(problems)))
