"""Federated learning over relational tables, on Flower.

``tp_flower.fit``, ``explain``, ``load`` and the rest of :mod:`tp_flower.api` are
imported when they are first used: every site's process imports this package.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tp_flower.api import (
        Federation,
        FittedModel,
        explain,
        fit,
        load,
        moments,
    )
    from tp_flower.descriptions import kaplan_meier, table_one
    from tp_flower.reports.moments import JoinAnswers
    from tp_flower.reports.results import Evaluation, Explanation, Predictions

__all__ = [
    "Evaluation",
    "Explanation",
    "Federation",
    "FittedModel",
    "JoinAnswers",
    "Predictions",
    "explain",
    "fit",
    "kaplan_meier",
    "load",
    "moments",
    "table_one",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from tp_flower import api, descriptions

        return getattr(api, name, None) or getattr(descriptions, name)
