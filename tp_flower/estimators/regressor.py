"""Regression on a join, as an estimator of scikit-learn."""

from typing import Any, ClassVar

import numpy as np
from sklearn.base import RegressorMixin

from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.estimators.joined import JoinedEstimator, tags_of_joined


class TablePuppetRegressor(RegressorMixin, JoinedEstimator):  # type: ignore[misc]
    """Predicts a number of each row of X, from columns of X and of joined tables.

    Args:
        query: SQL. The column ``AS label`` is of the table that X stands for; a query
            without one takes the label as ``y``.
        sites: by site its tables, as :func:`tp_flower.fit` takes them, without the one
            table that X stands for. None: the query reads X alone.
        settings: of the run, with underscores. ``test_fraction`` is 0 by default:
            whoever divides X holds rows out.

    >>> import pandas as pd
    >>> from sklearn.model_selection import cross_val_score
    >>> orders = pd.DataFrame({"customer": [0, 1, 2, 3] * 3, "paid": [1, 3, 5, 7] * 3})
    >>> customers = pd.DataFrame({"id": [0, 1, 2, 3], "income": [0.0, 1.0, 2.0, 3.0]})
    >>> model = TablePuppetRegressor(
    ...     "SELECT o.paid AS label, c.income FROM orders AS o "
    ...     "JOIN customers AS c ON o.customer = c.id",
    ...     {"bank": {"customers": customers}},
    ...     l2=0.0,
    ... )
    >>> cross_val_score(model, orders, cv=2).round(3).tolist()
    [1.0, 1.0]
    >>> model.fit(orders).predict(orders[["customer"]].head(3)).round(2).tolist()
    [1.0, 3.0, 5.0]
    """

    _task: ClassVar[str] = "regression"
    _metrics: ClassVar[tuple[str, ...]] = ("r2", "d2")
    # the mixin's needs y
    score = JoinedEstimator.score

    def predict(self, X: Any) -> FloatArray:
        """Return a number for each row of X, (n,), in the order of X.

        X needs no label.

        Raises:
            MappingError: a row of X has no joined row, or several.
            TPFlowerError: a column is missing, or a site ends the run.
        """
        values: FloatArray = self._predicted(X)["prediction"].to_numpy()
        return values

    @property
    def intercept_(self) -> float:
        """The score of a row whose encoded features are all 0."""
        return float(self._intercepts()[0])

    def __sklearn_tags__(self) -> Any:
        """Return what scikit-learn may do with the estimator."""
        return tags_of_joined(super().__sklearn_tags__())

    def _read_target(self, y: Any) -> AnyArray:
        return super()._read_target(y).astype(np.float64)
