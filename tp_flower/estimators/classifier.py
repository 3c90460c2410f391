"""Classification on a join, as an estimator of scikit-learn."""

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets

from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.estimators.joined import JoinedEstimator, tags_of_joined
from tp_flower.objectives import response_of
from tp_flower.objectives.classes import PROBABILITY
from tp_flower.reports.predictions import class_values

if TYPE_CHECKING:
    import pandas as pd


class TablePuppetClassifier(ClassifierMixin, JoinedEstimator):  # type: ignore[misc]
    """Predicts the class of each row of X, from columns of X and of joined tables.

    Args:
        query: SQL. The column ``AS label`` is of the table that X stands for; a query
            without one takes the label as ``y``.
        sites: by site its tables, as :func:`tp_flower.fit` takes them, without the one
            table that X stands for. None: the query reads X alone.
        settings: of the run, with underscores. ``test_fraction`` is 0 by default:
            whoever divides X holds rows out.

    Attributes:
        classes_: (k,), ascending: texts, whole numbers, numbers, or False and True.

    >>> import pandas as pd
    >>> orders = pd.DataFrame({"customer": [0, 1, 2, 3]})
    >>> customers = pd.DataFrame({"id": [0, 1, 2, 3], "income": [0.0, 1.0, 2.0, 3.0]})
    >>> model = TablePuppetClassifier(
    ...     "SELECT c.income FROM orders AS o JOIN customers AS c ON o.customer = c.id",
    ...     {"bank": {"customers": customers}},
    ... ).fit(orders, ["no", "no", "yes", "yes"])
    >>> model.predict(orders.tail(2)).tolist(), model.classes_.tolist()
    (['yes', 'yes'], ['no', 'yes'])
    """

    _task: ClassVar[str] = "classification"
    _metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    # the mixin's needs y
    score = JoinedEstimator.score

    def _derive(self) -> None:
        """Keep the classes, and the order in which the model has them."""
        manifest = self.model_.manifest
        names = tuple(manifest["classes"])
        response = response_of(manifest["loss"], names, manifest["label-kind"])
        classes = np.asarray(class_values(response).to_pylist())
        # declared classes of noisy labels are in any order
        self._order = np.argsort(classes)
        self._names = [names[k] for k in self._order]
        self.classes_ = classes[self._order]

    def predict(self, X: Any) -> AnyArray:
        """Return the likeliest class of each row of X, (n,), in the order of X.

        X needs no label.

        Raises:
            MappingError: a row of X has no joined row, or several.
            TPFlowerError: a column is missing, or a site ends the run.
        """
        classes: AnyArray = self._predicted(X)["prediction"].to_numpy()
        return classes.astype(self.classes_.dtype)

    def predict_proba(self, X: Any) -> FloatArray:
        """Return the probability of each class for each row of X, (n, k).

        Classes are in the order of ``classes_``. Errors are those of :meth:`predict`.
        """
        frame = self._predicted(X)
        columns = [f"{PROBABILITY}.{name}" for name in self._names]
        shares: FloatArray = frame[columns].to_numpy()
        return shares

    @property
    def coef_(self) -> "pd.Series[float] | pd.DataFrame":
        """The coefficients of the encoded features of linear models.

        A series by table and column; of three classes or more a data frame, with a
        column for each of ``classes_``. Tables whose policies hide theirs have none.
        """
        slopes = super().coef_
        if slopes.ndim == 1:
            return slopes
        return slopes[self._names].set_axis(self.classes_, axis=1)

    @property
    def intercept_(self) -> FloatArray:
        """The scores of a row whose encoded features are all 0.

        (1,) of two classes, else one for each of ``classes_``.
        """
        scores = self._intercepts()
        return scores if len(scores) == 1 else scores[self._order]

    def __sklearn_tags__(self) -> Any:
        """Return what scikit-learn may do with the estimator."""
        return tags_of_joined(super().__sklearn_tags__())

    def _read_target(self, y: Any) -> AnyArray:
        target = super()._read_target(y)
        check_classification_targets(target)
        return target
