"""scikit-learn's own checks of estimators, on a query over X alone."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from sklearn.utils.estimator_checks import estimator_checks_generator

from tp_flower.errors import QueryError
from tp_flower.estimators import TablePuppetClassifier, TablePuppetRegressor

QUERY = "SELECT * FROM x"
REFUSED = {
    "check_fit2d_1sample": "the label is (constant|'1') in (the 1|all) joined",
    "check_classifiers_one_label": "classification compares two classes or more",
}
"""Checks that do not apply, and our refusal, which they want to be a ValueError."""
NOT_HERE = "check_array_api_input"  # asks for a setting of SciPy's
LONGEST = (
    *("check_fit_score_takes_y", "check_methods", "check_regressors", "check_dtype"),
    *("check_estimators_dtypes", "check_estimators_pickle", "check_supervised_y_2d"),
    *("check_regressor_data", "check_pipeline", "check_fit_idempotent"),
)
"""Of the regressor's checks, those that are run with --whole alone."""


def checks() -> Iterator[Any]:
    for kind in (TablePuppetRegressor, TablePuppetClassifier):
        for _, check in estimator_checks_generator(kind(QUERY)):
            name = check.func.__name__
            if name != NOT_HERE:
                options = "-".join(map(str, check.keywords.values()))
                yield pytest.param(
                    kind(QUERY), check, id=f"{kind.__name__}-{name}{options}"
                )


CHECKS = list(checks())
OFTEN = [
    case.id
    for case in CHECKS
    if case.id.startswith("TablePuppetRegressor-")
    and not case.id.partition("-")[2].startswith(LONGEST)
]
OFTEN += [
    f"TablePuppetClassifier-{name}"
    for name in ("check_classifiers_one_label", "check_estimators_unfitted")
]


@pytest.mark.cases(*OFTEN)
@pytest.mark.parametrize(("estimator", "check"), CHECKS)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.DataConversionWarning")
def test_scikit_learn_accepts_the_estimators(estimator, check):
    if not (says := REFUSED.get(check.func.__name__)):
        check(estimator)
        return
    with pytest.raises((AssertionError, QueryError)) as caught:
        check(estimator)
    refusals = caught.value, caught.value.__cause__
    assert [each for each in refusals if isinstance(each, QueryError)]
    assert re.search(says, "\n".join(map(str, refusals)))
