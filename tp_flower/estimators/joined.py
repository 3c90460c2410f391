"""What the estimators share: parameters, the run that fit is, and rows in X's order.

An estimator's parameters are the query, the other sites, and any setting of a run.
``__init__`` only stores them; :meth:`JoinedEstimator.fit` is one
:func:`tp_flower.fit`, whose model predicts and scores.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import check_consistent_length, estimator_html_repr
from sklearn.utils.validation import assert_all_finite, check_is_fitted, column_or_1d

from tp_flower import api
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import MappingError, ModelError, QueryError, SettingsError
from tp_flower.estimators.row_table import OtherSites, RowTable, read_rows
from tp_flower.reports.predictions import ROW_HASH
from tp_flower.reports.results import Predictions

if TYPE_CHECKING:
    import pandas as pd

    from tp_flower.query import Query

INTERCEPT: Final = "(intercept)"
NAMED_ROWS: Final = 5
"""Of X, at most, in a message."""


class JoinedEstimator(BaseEstimator):  # type: ignore[misc]
    """Trains on the rows of X, joined with the tables of other sites.

    Attributes:
        model_: the :class:`~tp_flower.FittedModel`, with the report of the run.
        n_features_in_, feature_names_in_: the columns of X, be they features, keys or
            others. An array has no names.
    """

    _task: ClassVar[str] = "auto"
    # the score is the first of these that the model's loss has
    _metrics: ClassVar[tuple[str, ...]]
    _takes_target: ClassVar[bool] = True

    def __init__(
        self, query: "str | Query", sites: OtherSites | None = None, **settings: Any
    ) -> None:
        self.query = query
        self.sites = sites
        self._settings = settings

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the query, the sites, and the settings that were given, by name."""
        return {**super().get_params(deep=deep), **self._settings}

    def set_params(self, **params: Any) -> Self:
        """Set parameters; fit refuses a name that no setting has."""
        for name, value in params.items():
            if name in self._get_param_names():
                setattr(self, name, value)
            else:
                self._settings = {**self._settings, name: value}
        return self

    def fit(self, X: Any, y: Any = None) -> Self:
        """Train on the rows of X (n, m), joined with the tables of the sites.

        Args:
            X: a data frame, or an array of numbers, whose columns are x0, x1, ...
            y: (n,), in place of the column of the label; None takes the label from X.

        Raises:
            SettingsError: a setting is unknown or refused; it names the closest one.
            TPFlowerError: the query, a table or a site ends the run.
        """
        if "task" in self._settings:
            raise SettingsError(
                f"task: it is {self._task!r} of {type(self).__name__}: leave it out"
            )
        table = RowTable.of(self.query, self._others)
        self._check_query(table.query)
        frame = read_rows(X, self)
        query, rows = table.labelled(frame, self._target(frame, y))
        settings = {"test_fraction": 0.0, "task": self._task, **self._settings}
        sites = table.beside(rows, self._others)
        self.model_ = api.fit(query, sites, **settings)
        self._table = replace(table, query=query)
        self.n_features_in_ = frame.shape[1]
        if hasattr(X, "columns"):
            self.feature_names_in_ = np.array([*map(str, frame.columns)], dtype=object)
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        self._derive()
        return self

    def _derive(self) -> None:
        """Keep what an estimator has besides its model, once it is trained."""

    def score(self, X: Any, y: Any = None) -> float:
        """Return how good the model is on the joined rows of X; more is better.

        It is the accuracy of classes, the concordance of times (Harrell's C), R2 of
        numbers, or D2 where the loss has no R2. Each joined row counts, however many a
        row of X has. Arguments and errors are those of :meth:`fit`.
        """
        frame = self._read_rows(X)
        _, rows = self._table.labelled(frame, self._target(frame, y))
        sites = self._table.beside(rows, self._others)
        metrics = self.model_.evaluate(sites).metrics
        return float(next(metrics[name] for name in self._metrics if name in metrics))

    @property
    def coef_(self) -> "pd.Series[float] | pd.DataFrame":
        """The coefficients of the encoded features of linear models.

        A series by table and column. Tables whose policies hide theirs have none.
        """
        rows = self._coefficients("coefficient")
        return _by_feature(rows[rows["column"] != INTERCEPT], "coefficient")

    @property
    def feature_importances_(self) -> "pd.Series[float]":
        """The features' shares of the gains of boosted trees, by table and column."""
        gains: pd.Series[float] = _by_feature(self._coefficients("gain"), "gain")
        return gains / gains.sum()

    def _predicted(self, X: Any, **settings: Any) -> "pd.DataFrame":
        """Return the predictions of the rows of X, one for each, in their order.

        Raises:
            MappingError: a row of X has no joined row, or several.
            TPFlowerError: a column is missing, or a site ends the run.
        """
        frame = self._read_rows(X)
        rows = self._table.unlabelled(frame)
        sites = self._table.beside(rows, self._others)
        predictions = self.model_.predict(sites, **settings)
        _check_single(predictions, len(rows))
        return predictions.frame

    def _read_rows(self, X: Any) -> "pd.DataFrame":
        """Return X as a data frame, of as many columns as in training if an array."""
        check_is_fitted(self, "model_")
        frame = read_rows(X, self)
        if not hasattr(X, "columns") and frame.shape[1] != self.n_features_in_:
            raise ValueError(
                f"X has {frame.shape[1]} features, but {type(self).__name__} is "
                f"expecting {self.n_features_in_} features as input"
            )
        return frame

    def _target(self, rows: "pd.DataFrame", y: Any) -> AnyArray | None:
        """Return y as an array with a value for each row, (n,); None for None."""
        if y is None:
            return None
        if not self._takes_target:
            raise QueryError(
                "y: the query names the time and the event of each row of X: leave y "
                "out"
            )
        target = self._read_target(y)
        check_consistent_length(rows, target)
        return target

    def _read_target(self, y: Any) -> AnyArray:
        """Return y as an array (n,) of the values that the estimator predicts."""
        target: AnyArray = column_or_1d(y, warn=True)
        assert_all_finite(target, input_name="y")
        return target

    def _check_query(self, query: "Query") -> None:
        """Refuse a query whose label is that of another estimator."""
        if query.names_event:
            raise QueryError(
                "the query has a time and an event: use SurvivalRegressor, or give "
                "the query a label"
            )

    def _coefficients(self, name: str) -> "pd.DataFrame":
        """Return the coefficients of the model's report, which have a column ``name``.

        Raises:
            AttributeError: there are none, and why: hasattr asks.
        """
        check_is_fitted(self, "model_")
        try:
            rows = self.model_.coefficients
        except ModelError as error:
            raise AttributeError(str(error)) from None
        if name not in rows:
            raise AttributeError(f"the model has no {name} of its features")
        return rows

    def _intercepts(self) -> FloatArray:
        """Return the scores (d_c,) of rows whose encoded features are all 0."""
        rows = self._coefficients("coefficient")
        rows = rows[rows["column"] == INTERCEPT]
        constant: FloatArray = np.array(self.model_.manifest["base-score"])
        by_table: FloatArray = rows["coefficient"].to_numpy().reshape(-1, len(constant))
        total: FloatArray = constant + by_table.sum(axis=0)
        return total

    @property
    def _others(self) -> OtherSites:
        """The sites that X is joined with, by name.

        Raises:
            SettingsError: they are not in this process.
        """
        sites = self.sites or {}
        if not isinstance(sites, Mapping):
            raise SettingsError(
                f"sites: expected a dictionary of site to tables, not "
                f"{type(sites).__name__}: X is joined in this process; for a tables "
                "file or a federation use tp_flower.fit"
            )
        return sites

    def __sklearn_clone__(self) -> Self:
        """Return an estimator of the same parameters, for clone.

        Sites are shared: they are only read, and a search makes many clones.
        """
        return type(self)(**self.get_params(deep=False))

    def __repr__(self, N_CHAR_MAX: int = 700) -> str:
        """Return the call that makes the estimator, with the names of the tables."""
        parameters = {**self.get_params(deep=False), "sites": _without_rows(self.sites)}
        arguments = ", ".join(f"{name}={parameters[name]!r}" for name in parameters)
        return f"{type(self).__name__}({arguments})"[:N_CHAR_MAX]

    def _repr_html_(self) -> str:
        """Return the head of the report's page; before fit scikit-learn's diagram."""
        if hasattr(self, "model_"):
            return self.model_._repr_html_()
        diagram: str = estimator_html_repr(self)
        return diagram

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self._repr_html_()}


def tags_of_joined(tags: Any) -> Any:
    """Return scikit-learn's tags of an estimator whose y may be a column of X.

    Its mixins set that y is required after those of the estimators are made.
    """
    tags.target_tags.required = False
    tags.input_tags.allow_nan = True
    return tags


def _without_rows(sites: Any) -> Any:
    """Return the names of the tables by site; as it is what is no such dictionary."""
    if not isinstance(sites, Mapping):
        return sites
    return {site: [*sites[site]] for site in sites if isinstance(sites[site], Mapping)}


def _by_feature(rows: "pd.DataFrame", name: str) -> Any:
    """Return a number of each feature, by table and column, and by class if there are.

    Tables and columns are in the order of the report.
    """
    keys = ["table", "column"]
    if "output" not in rows:
        return rows.set_index(keys)[name]
    by_class = rows.set_index([*keys, "output"])[name].unstack(sort=False)
    return by_class.rename_axis(columns=None)


def _check_single(predictions: Predictions, rows: int) -> None:
    """Refuse predictions that are not one for each of the rows of X.

    Raises:
        MappingError: which rows of X have none, or several, and what to write.
    """
    read = predictions.report["label-rows"]["rows"]
    if read < rows:
        raise MappingError(
            f"WHERE leaves out {rows - read} of the {rows} rows of X, which have no "
            "prediction: leave them out of X"
        )
    counts = np.bincount(predictions.frame[ROW_HASH], minlength=rows)
    if not counts.all():
        raise MappingError(
            f"{_listed(counts == 0)} have no joined row, and no prediction: write LEFT "
            "JOIN, or leave them out of X"
        )
    if (counts > 1).any():
        raise MappingError(
            f"{_listed(counts > 1)} have several joined rows, with a prediction for "
            "each: aggregate the table that repeats them, JOIN (SELECT k, ... FROM t "
            "GROUP BY k) AS a, or use model_.predict, which returns them all"
        )


def _listed(are_meant: AnyArray) -> str:
    """Return how many rows of X are meant, with the positions of the first ones.

    >>> _listed(np.array([False, True, True]))
    '2 of the 3 rows of X (at 1, 2)'
    """
    rows = np.flatnonzero(are_meant)
    positions = ", ".join(map(str, rows[:NAMED_ROWS]))
    more = ", ..." if len(rows) > NAMED_ROWS else ""
    return f"{len(rows)} of the {len(are_meant)} rows of X (at {positions}{more})"
