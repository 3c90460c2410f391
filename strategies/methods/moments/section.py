"""What a report says of a run by second moments, besides its metrics.

Entry ``moments`` of `report.json`, in which a column is ``table.feature``, with a
number in brackets where a feature has several::

    path      [{l1, l2, nonzero, train, validation, test}]   the losses of least squares
              under a path of penalties, without the penalty, the strongest first, and
              the number of features with a coefficient
    errors    what the standard errors of the coefficients are, or why there are none
    noise     {train, validation, test: {metric: [low, high]}}   where 95 % of the
              metrics are if the noise on the moments is drawn once more; {} without.
              Metrics of a subset, here, above and in ``final``, are null where the ends
              of its loss are a factor of 2 or more apart: the noise drowns them
    undetermined  [column]   those without an error, as they are combinations of others
    tables    [{table, alone: {train, validation, test}, without: {train, ..}}]   the R2
              of the table's features, and of all others', by least squares with l2
    inflation [{feature, columns, factor, scaled}]   generalised VIF, by degrees of
              freedom, and its root of twice these; null where others determine it
    correlations  [{first, second, correlation}]   of columns of two features, or of the
              label, the strongest first; not all of many
    components  [{share, loadings: {column: x}}]   of the variance of the standardised
              columns, the largest first
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from strategies.methods.moments.noise import Interval, NoiseEffect
from strategies.setup.problem import PreparedRun, TrainingProblem
from tp_flower.arrays import FloatArray, IndexArray
from tp_flower.methods.moments import questions
from tp_flower.methods.moments.inference import Inference
from tp_flower.methods.moments.penalties import Fit
from tp_flower.methods.moments.solve import JoinedMoments
from tp_flower.methods.moments.terms import TRAINED
from tp_flower.splits import TEST, TRAIN, VALIDATION

MOST_CORRELATIONS: Final = 2_000  # all of 63 columns
ERRORS: Final = (
    "Standard errors for independent joined rows, with {:,.0f} degrees of freedom."
)
CONDITIONAL: Final = (
    "They are conditional on l2: the spread of the penalised estimate around its own "
    "mean, which l2 has drawn towards 0."
)
REPEATED: Final = (
    "But up to {} joined rows have the label of one row: they are not independent, and "
    "the errors are too small."
)
NO_ERRORS: Final = {
    "classes": "No standard errors: a discriminant is no least-squares estimate.",
    "lasso": "No standard errors: a lasso chooses its columns by the same labels.",
    "rows": "No standard errors: the rows leave no degree of freedom.",
    "weights": "No standard errors: what a weight says of a row's variance is unknown.",
    "noise": "No standard errors: noise hides how some columns vary beside the others. "
    "One category less of each feature, or a higher privacy.epsilon, may leave some.",
}
NO_NAMES: Final[Mapping[str, Sequence[str]]] = {}
NOISE_ALONE: Final = (
    "The deviation beside each coefficient is what noise alone gives it, around a mean "
    "that the ridge against noise has drawn towards 0."
)
NOISY: Final = (
    "Standard errors and intervals count both the joined rows, as independent ones, "
    "and the noise. They are those of 'unshrunk', the coefficients without the ridge "
    "against noise that draws the model's own towards 0, and of rows and labels as "
    "they are clipped."
)
PASSES: Final = {TRAIN: "train", VALIDATION: "validation", TEST: "test"}


def path_entry(
    path: Iterable[Fit], effect: NoiseEffect | None
) -> list[dict[str, float]]:
    """Return the losses of every fit of a path, NaN for those that noise drowns."""
    return [
        {
            **fit.penalty._asdict(),
            "nonzero": fit.nonzero,
            **_by_name(fit.losses, effect),
        }
        for fit in path
    ]


def noise_entry(effect: NoiseEffect | None) -> dict[str, Mapping[str, Interval]]:
    """Return where noise may have moved the metrics from; {} without noise."""
    if effect is None:
        return {}
    return {PASSES[number]: metrics for number, metrics in effect.metrics.items()}


def errors_note(
    problem: PreparedRun,
    fit: Fit,
    inference: Inference | None,
    repeats: int,
    *,
    is_noisy: bool,
    is_weighted: bool,
) -> str:
    """Return what is said of the standard errors of a fit.

    Args:
        problem: for whether there are classes.
        fit: under the penalty that was chosen.
        inference: None where it has no errors.
        repeats: joined rows, at most, that have one row of the label's table.
        is_noisy: whether the moments have noise.
        is_weighted: whether joined rows have weights.
    """
    reason = ""
    if is_weighted:
        reason = "weights"
    elif problem.classes:
        reason = "classes"
    elif inference is None:
        reason = "noise" if is_noisy else "lasso"
    elif inference.freedom <= 0.0:
        reason = "rows"
    if reason or inference is None:
        return NO_ERRORS[reason] + (f" {NOISE_ALONE}" if is_noisy else "")
    notes = [f"{NOISY} {NOISE_ALONE}" if is_noisy else ERRORS.format(inference.freedom)]
    if fit.penalty.l2:
        notes.append(CONDITIONAL)
    if repeats > 1:
        notes.append(REPEATED.format(repeats))
    return " ".join(notes)


def feature_columns(
    problem: TrainingProblem, shown: Mapping[str, Sequence[str]] = NO_NAMES
) -> questions.FeatureColumns:
    """Return the columns of the features, in the order of the tables.

    ``shown`` are the names of those that sites show, by table.
    """
    return questions.FeatureColumns(
        {name: problem.encoders[name] for name in problem.tables}, shown
    )


def rows_by_table(problem: TrainingProblem, rows: FloatArray) -> dict[str, FloatArray]:
    """Return the rows (d + 1, m) of every table's features, (d_t [+ 1], m).

    The intercept's is the last, and the last one of its table.
    """
    blocks = {}
    for name, positions in feature_columns(problem).by_table.items():
        blocks[name] = rows[positions]
        if problem.tables[name].has_intercept:
            blocks[name] = np.vstack([blocks[name], rows[-1]])
    return blocks


def statistics_by_table(
    problem: TrainingProblem, inference: Inference, estimates: FloatArray
) -> dict[str, dict[str, FloatArray]]:
    """Return those of estimates (d + 1, k), (d_t [+ 1], k) by table and name."""
    of_outputs = [
        inference.of_output(number).statistics(column)
        for number, column in enumerate(estimates.T)
    ]
    by_table: dict[str, dict[str, FloatArray]] = {name: {} for name in problem.tables}
    for name, values in zip(inference.names, np.stack(of_outputs).T, strict=True):
        for table, block in rows_by_table(problem, values).items():
            by_table[table][name] = block
    return by_table


def undetermined(
    columns: questions.FeatureColumns, inference: Inference | None
) -> list[str]:
    """Return the columns without an error, where others have one."""
    if inference is None or inference.freedom <= 0.0:
        return []
    return [
        columns.names[position] for position in np.flatnonzero(~inference.has_error)
    ]


def answers(
    passes: Mapping[int, JoinedMoments],
    columns: questions.FeatureColumns,
    labels: Sequence[str],
    l2: float,
    effect: NoiseEffect | None,
) -> dict[str, object]:
    """Return the entries about tables, features and columns."""
    trained = passes[TRAINED]
    features = columns.by_feature
    pairs = questions.strongest_pairs(
        trained, list(features.values()), MOST_CORRELATIONS
    )
    names = [*columns.names, *labels]
    explained = questions.explained(passes, TRAINED, columns.by_table, l2)
    shares, loadings = questions.components(trained)
    return {
        "tables": [
            {
                "table": name,
                "alone": _by_name(alone, effect),
                "without": _by_name(without, effect),
            }
            for name, (alone, without) in explained.items()
        ],
        "inflation": inflation_entries(trained.covariance, features),
        "correlations": [
            {"first": names[first], "second": names[second], "correlation": value}
            for first, second, value in pairs
        ],
        "components": [
            {"share": share, "loadings": dict(zip(columns.names, loading, strict=True))}
            for share, loading in zip(shares, loadings.T, strict=True)
        ],
    }


def inflation_entries(
    covariance: FloatArray, features: Mapping[str, IndexArray]
) -> list[dict[str, object]]:
    """Return the generalised VIF of each feature, by the columns' covariance (d, d)."""
    inflations = questions.inflations(covariance, list(features.values()))
    return [
        {"feature": name, **each._asdict(), "scaled": each.scaled}
        for name, each in zip(features, inflations, strict=True)
    ]


def _by_name(
    values: Mapping[int, float], effect: NoiseEffect | None
) -> dict[str, float]:
    drowned = effect.drowned if effect else ()
    return {
        PASSES[number]: math.nan if number in drowned else value
        for number, value in values.items()
    }


def label_names(classes: Sequence[str], columns: int) -> list[str]:
    """Return the names of the label's columns, the indicators of the last classes.

    >>> label_names((), 1), label_names(("no", "yes"), 1)
    (['label'], ['label = yes'])
    """
    if not classes:
        return ["label"]
    return [f"label = {name}" for name in classes[-columns:]]
