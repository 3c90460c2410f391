"""What an inspection has found, as data frames: importances, and metrics by group."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from tp_flower.errors import ModelError

if TYPE_CHECKING:
    import pandas as pd

IMPORTANCES: Final = "importances"
GROUPS: Final = "groups"
_OF_FEATURE: Final = ("table", "feature", "site")
_RISING: Final = frozenset({"auc", "accuracy", "r2", "d2"})


def rises(metric: str) -> bool:
    """Return whether a metric is higher for a better model.

    >>> rises("auc"), rises("log_loss")
    (True, False)
    """
    return metric in _RISING


def importances_of(report: Mapping[str, Any]) -> "pd.DataFrame":
    """Return the importances of a report, a row for each table and each feature.

    Its columns are ``table``; ``feature``, "" for the table; ``site``, of a table in
    several shards; ``share``; and, by metric, by how much it is worse with the values
    permuted, and the deviation over the repetitions, as ``auc`` and ``auc_deviation``.

    Raises:
        ModelError: the report has none, and which setting brings them.
    """
    import pandas as pd

    rows = []
    for item in _items(report):
        row = {name: item[name] for name in (*_OF_FEATURE, "share")}
        for metric, (mean, deviation) in item["falls"].items():
            row |= {metric: mean, f"{metric}_deviation": deviation}
        rows.append(row)
    return pd.DataFrame(rows)


def dependence_of(report: Mapping[str, Any]) -> "pd.DataFrame":
    """Return the partial dependence of a report, a row for each value of a feature.

    Raises:
        ModelError: the report has none, and which setting brings them.
    """
    import pandas as pd

    rows = [
        {**{name: item[name] for name in _OF_FEATURE}, **point}
        for item in _items(report)
        for point in item["curve"]
    ]
    return pd.DataFrame(rows, columns=[*_OF_FEATURE, "value", "score"])


def _items(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the tables and features that were inspected."""
    entry = report.get(IMPORTANCES)
    if not entry:
        raise ModelError("nothing was permuted: evaluate with importances = 5, say")
    items: list[Mapping[str, Any]] = entry["items"]
    return items


def groups_of(report: Mapping[str, Any]) -> "pd.DataFrame":
    """Return the metrics by group of a report, a row for each.

    Raises:
        ModelError: the report has none, and which setting brings them.
    """
    import pandas as pd

    entry = report.get(GROUPS)
    if not entry:
        raise ModelError('there are no groups: evaluate with metrics-by = "c.region"')
    return pd.DataFrame(entry["items"])
