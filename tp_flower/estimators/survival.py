"""Cox's proportional-hazards model on a join, as an estimator of scikit-learn."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from tp_flower.arrays import FloatArray
from tp_flower.errors import QueryError
from tp_flower.estimators.joined import JoinedEstimator

if TYPE_CHECKING:
    import pandas as pd

    from tp_flower.query import Query

SURVIVAL: Final = "survival."


class SurvivalRegressor(JoinedEstimator):
    """Predicts the hazard of each row of X, from columns of X and of joined tables.

    Args:
        query: SQL. The columns ``AS time`` and ``AS event`` are of the table that X
            stands for.
        sites: by site its tables, as :func:`tp_flower.fit` takes them, without the one
            table that X stands for. None: the query reads X alone.
        settings: of the run, with underscores. ``test_fraction`` is 0 by default:
            whoever divides X holds rows out.

    Times and events are columns of X, so that there is no ``y``.

    >>> import pandas as pd
    >>> stays = pd.DataFrame({"patient": [0, 1, 2, 3, 4], "days": [5, 4, 3, 2, 1]})
    >>> patients = pd.DataFrame({"id": range(5), "age": [30, 50, 40, 60, 70]})
    >>> model = SurvivalRegressor(
    ...     "SELECT s.days AS time, s.days < 5 AS event, p.age FROM stays AS s "
    ...     "JOIN patients AS p ON s.patient = p.id",
    ...     {"registry": {"patients": patients}},
    ... ).fit(stays)
    >>> model.score(stays)
    0.9
    """

    _metrics: ClassVar[tuple[str, ...]] = ("concordance",)
    _takes_target: ClassVar[bool] = False

    def predict(self, X: Any) -> FloatArray:
        """Return the log hazard ratio of each row of X to a score of 0, (n,).

        Rows are in the order of X, and need no time and no event.

        Raises:
            MappingError: a row of X has no joined row, or several.
            TPFlowerError: a column is missing, or a site ends the run.
        """
        values: FloatArray = self._predicted(X)["prediction"].to_numpy()
        return values

    def predict_survival(self, X: Any, times: Sequence[float] = ()) -> "pd.DataFrame":
        """Return the probability of no event up to some times, for each row of X.

        The columns are the times, by default the quartiles of the times of events in
        training. Errors are those of :meth:`predict`.
        """
        frame = self._predicted(X, survival_times=", ".join(map(str, times)))
        survival = frame.filter(regex=rf"^{SURVIVAL}")
        return survival.rename(columns=lambda name: float(name.removeprefix(SURVIVAL)))

    def _check_query(self, query: "Query") -> None:
        if not query.names_event:
            raise QueryError(
                "SurvivalRegressor needs the time and the event of each row: write "
                "<column> AS time, <condition> AS event in place of the label"
            )
