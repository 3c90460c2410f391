"""The names of a part's encoded columns: made of its rows, shown at the end."""

from typing import Final

from client_apps.data.run_store import Entry
from client_apps.privacy import ledger_entries
from client_apps.rounds.site import Site
from tp_flower.arrays import IntArray
from tp_flower.extraction.extracted import ExtractedShard
from tp_flower.features.columns import FeatureColumn
from tp_flower.features.encoder import SiteEncoder
from tp_flower.features.names import UNNAMED, name_columns
from tp_flower.privacy import plan
from tp_flower.sources.policy import CATEGORIES

_ENTRY: Final = "column-names-{}"
_DECLARED: Final = "declared"
_OF_VALUES: Final = "of-values"


def keep_names(
    site: Site,
    number: int,
    encoder: SiteEncoder,
    extracted: ExtractedShard,
    trained: IntArray,
) -> None:
    """Keep the names that a part's columns may be shown by, until the run ends.

    Args:
        site: where the names stay, if its policy hides the coefficients.
        number: of the part.
        encoder: of its table, which another shard may have fitted.
        extracted: its rows, which are gone once they are encoded.
        trained: positions of those that train, of which categories need some.
    """
    source = site.source(number)
    if not source.policy.coefficients:
        return
    least_rows = None
    if source.policy.lets_leave(CATEGORIES):
        # a unit has several rows
        least_rows = source.min_count * source.policy.rows_per_unit

    def rows_of(feature: str) -> FeatureColumn:
        return extracted.column(feature).take(trained)

    names = name_columns(encoder, rows_of, least_rows)
    meta = {_DECLARED: names.declared, _OF_VALUES: names.of_values}
    site.store.save(_ENTRY.format(number), Entry({}, meta))


def show_names(
    site: Site, number: int, columns: int
) -> tuple[list[str] | None, list[str] | None]:
    """Return the names of a part's columns, declared ones and those made of values.

    The latter are noted, and None if no column has such a name. Of more ``columns``
    than are encoded, the last ones are other tables' regions.
    """
    entry = _ENTRY.format(number)
    if not site.store.has(entry):
        return None, None
    meta = site.store.load(entry).meta
    declared, of_values = (
        [*meta[name], *[UNNAMED] * (columns - len(meta[name]))]
        for name in (_DECLARED, _OF_VALUES)
    )
    if not any(of_values):
        return declared, None
    ledger_entries.note(site, number, plan.CATEGORIES)
    return declared, of_values
