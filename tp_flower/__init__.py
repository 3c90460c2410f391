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
    from tp_flower.tuning.search import SearchResult, search

__all__ = [
    "Evaluation",
    "Explanation",
    "Federation",
    "FittedModel",
    "JoinAnswers",
    "Predictions",
    "SearchResult",
    "explain",
    "fit",
    "kaplan_meier",
    "load",
    "moments",
    "search",
    "table_one",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from tp_flower import api, descriptions
        from tp_flower.tuning import search

        modules = (api, descriptions, search)
        return next(vars(each)[name] for each in modules if name in vars(each))
