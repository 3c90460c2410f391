"""Who learns what when a saved model predicts or is evaluated, message by message."""

from tp_flower.explain.explanation import NOTHING, SERVER, SITES, Release
from tp_flower.explain.releases import Audience, sealed
from tp_flower.protocol import Action


def prediction_releases(
    audience: Audience, *, is_evaluated: bool, has_row_key: bool, at_site: bool
) -> list[Release]:
    """Return what every message tells whom, in the order of the messages.

    Args:
        audience: what decides it.
        is_evaluated: whether the label leaves.
        has_row_key: whether a keyed hash of what names a row leaves.
        at_site: whether the label table's sites are sent the predictions.
    """
    table, hashed = audience.label_table, audience.hashes
    asked = [
        ("describe", SERVER, _DESCRIBED, NOTHING),
        ("extract", SITES, "the query's expressions", NOTHING),
        ("extract", SERVER, _KEYS, hashed),
        ("extract", SERVER, _ORDER, NOTHING),
    ]
    if is_evaluated:
        label = f"the label of every row of {table}"
        asked.append(("extract", SERVER, label, audience.labels))
    if audience.weight:
        weight = f"the weight of every row of {audience.weight}"
        asked.append(("extract", SERVER, weight, NOTHING))
    if has_row_key:
        asked.append(("extract", SERVER, f"what names each row of {table}", hashed))
    if audience.grouped:
        groups = f"group keys of {', '.join(audience.grouped)}"
        asked.append(("extract", SERVER, groups, hashed))
    asked += [
        ("score", SITES, "which own rows are joined", NOTHING),
        ("score", SERVER, _SCORES, audience.scores),
    ]
    if at_site:
        asked.append(("deliver", SITES, _DELIVERED.format(table), audience.scores))
    asked.append(("finish", SITES, "that the run is over", NOTHING))
    found = [
        Release(str(Action[action.upper()]), to, carries, protection)
        for action, to, carries, protection in asked
    ]
    return [found[0], *sealed(audience.keys), *found[1:]]


_DESCRIBED = "names of the hosted tables; columns, types and rows of the query's"
_KEYS = "join keys: which rows share one, how often, and across tables"
_ORDER = "the order of every shard's rows: by it go keys and scores"
_SCORES = "a score per row that is joined, which reads the row's features; once"
_DELIVERED = (
    "to the sites of {} only: the summed score of each joined row, and which own row "
    "is behind it"
)
