"""The settings of a run that describes its joined rows."""

from collections.abc import Iterator, Mapping
from typing import Final

from strategies.run.sites import Inventory
from strategies.setup.columns import Bind, bind_columns
from strategies.setup.declared_types import declared_pairs, declared_plan
from strategies.setup.encoding import TableEncoding
from strategies.setup.joined_rows import encoder_choices
from tp_flower.errors import QueryError
from tp_flower.methods.moments.describe import queries
from tp_flower.methods.moments.describe.encoders import describing_encoder
from tp_flower.methods.moments.describe.queries import NamedColumn
from tp_flower.methods.moments.describe.settings import KAPLAN_MEIER, DescribeSettings
from tp_flower.query import BoundQuery
from tp_flower.settings import Settings
from tp_flower.settings.run import REGRESSION
from tp_flower.sources.tables_file import ShardSource

MOST_GROUPS: Final = 32


def describing_settings(
    bind: Bind, settings: Settings, inventory: Inventory
) -> Settings:
    """Return the settings of a run that describes, with the encoders of all features.

    They are proposed: so sites know them, and the server knows what each column is.
    """
    values = settings.of(DescribeSettings)
    bound, columns = bind_columns(bind, inventory)
    group = queries.group_column(bound, values.group_by)
    if values.describe == KAPLAN_MEIER:
        settings = _of_group(settings, group)
    texts = {
        NamedColumn(table, name): text
        for table, choice in encoder_choices(bound, settings).items()
        for name, text in choice.specs.items()
    }
    schemas = {name.lower(): schema for name, schema in columns.schemas.items()}
    entries = []
    for column, kind in _kinds(bound, schemas):
        text = texts[column]
        if values.describe == KAPLAN_MEIER and column != group:
            text = queries.interval_categories(values.curve_times)
        spec = describing_encoder(str(column), kind, text, is_group=column == group)
        entries.append((*column, str(spec)))
    return settings.with_fields(encoders=tuple(entries), task=REGRESSION)


def _of_group(settings: Settings, group: NamedColumn | None) -> Settings:
    """Return the settings with the groups' encoder: curves read no other column."""
    named = str(group).lower()
    entries = [
        entry for entry in settings.encoders if ".".join(entry[:2]).lower() == named
    ]
    return settings.with_fields(encoders=tuple(entries))


def check_groups(
    bound: BoundQuery, settings: Settings, encoders: Mapping[str, TableEncoding]
) -> None:
    """Refuse a column of more groups than a table has room for, before sums leave.

    Raises:
        QueryError: `group-by` has more than `MOST_GROUPS` categories.
    """
    group = queries.group_column(bound, settings.of(DescribeSettings).group_by)
    if group is None:
        return
    # the last column is that of a value
    count = encoders[group.table].columns.features[group.name] - 1
    if count > MOST_GROUPS:
        raise QueryError(
            f"group-by: {group} has {count} categories, and at most {MOST_GROUPS} "
            f"groups are described: encoders = '{group}=categories(<a>, <b>)' names "
            "some, and the rest is one group"
        )


def _kinds(
    bound: BoundQuery, schemas: Mapping[str, Mapping[str, str]]
) -> Iterator[tuple[NamedColumn, str]]:
    """Yield every feature with the kind of its values, by the columns' types."""
    for table in bound.tables:
        fragment = bound.fragments_of(table)[0]
        pairs = declared_pairs(bound, fragment, schemas)
        source = ShardSource(fragment.name, "", 0)
        plan = declared_plan(source, fragment, schemas[fragment.name.lower()], pairs)
        for feature, typed in zip(fragment.features, plan.features, strict=True):
            yield NamedColumn(table, feature.name), typed.kind
