"""Labels of the sites: numbers or classes, and the loss that trains on them."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from strategies.run.exchange import Part
from strategies.run.replies import refuse
from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.errors import QueryError, SettingsError
from tp_flower.extraction.extracted import LabelColumn, check_no_null
from tp_flower.learning import label_noise
from tp_flower.losses import LARGEST_LABEL, LOSSES, MAX_CLASSES, Loss, make_loss
from tp_flower.methods import LAPLACE
from tp_flower.settings import Settings
from tp_flower.settings.run import AUTO

FRACTION, MOST_FRACTIONS = re.compile(r"-?\d+[.,]\d+"), 50
"""Of so many classes at most the names are numbers with fractions."""


@dataclass(frozen=True)
class Labels:
    """The label of every row of the label table.

    Attributes:
        values: (n,), the number in regression, the class index in classification.
        classes: the classes' names; empty in regression.
        kind: the label's type at the sites, "number", "boolean" or "text".
        noise: the noise that the sites have added; None for labels in the clear.
    """

    values: FloatArray
    classes: tuple[str, ...] = ()
    kind: str = "number"
    noise: label_noise.LabelNoise | None = None

    def of_rows(self, rows: BoolArray) -> "Labels":
        """Return the labels of a run on some of the rows, (n,): classes are those they have."""
        if rows.all() or not self.classes or self.noise or self.values.ndim > 1:
            return self
        present, codes = np.unique(self.values[rows], return_inverse=True)
        values = np.full(len(rows), np.nan)
        values[rows] = codes
        return replace(self, values=values, classes=tuple(self.classes[int(k)] for k in present))


def label_plan(settings: Settings) -> label_noise.LabelPlan | None:
    """Return the noise that the sites add to labels, None for labels in the clear."""
    privacy, task = settings.privacy, settings.task
    if not privacy.covers_labels:
        return None
    limits, classes = privacy.label_range, privacy.label_classes
    if limits and (classes or task == "classification"):
        other = "privacy.label-classes" if classes else "task = 'classification'"
        raise SettingsError(f"privacy.label-range is for regression: not with {other}")
    if (limits or task == "regression") and privacy.labels != LAPLACE:
        raise SettingsError(f"privacy.labels: {privacy.labels!r} is for classes; use {LAPLACE!r}")
    if task == "regression" and (classes or not limits):
        state = "not privacy.label-classes" if classes else "it is not set"
        raise SettingsError(
            "private labels of a regression need privacy.label-range, the lowest and "
            f"highest value that labels are clipped to; {state}"
        )
    epsilon = privacy.label_epsilon or label_noise.epsilon_of_noise(privacy.label_noise, limits)
    return label_noise.LabelPlan(privacy.labels, epsilon, classes, limits)


def gather_labels(
    columns: Sequence[tuple[Part, LabelColumn]], settings: Settings, sql: str
) -> Labels:
    """Combine the label columns of the label table's shards; the query writes them as ``sql``."""
    if plan := label_plan(settings):
        return read_private_labels(columns, plan)
    return read_labels([column for _, column in columns], settings.task, sql)


def read_private_labels(
    columns: Sequence[tuple[Part, LabelColumn]], plan: label_noise.LabelPlan
) -> Labels:
    """Concatenate the shards' noisy labels."""
    expected = "number" if plan.limits else "text" if plan.classes else "boolean"
    count = plan.class_count
    for part, column in columns:
        is_one = not count or np.isin(column.values, np.arange(count)).all()
        has_form = column.kind == expected and column.categories == plan.classes
        if not (is_one and has_form and np.isfinite(column.values).all()):
            raise refuse(part, "labels without the noise that the run asks for")
    values = np.concatenate([column.values for _, column in columns])
    names = plan.classes or tuple(str(code) for code in range(count))
    return Labels(values, names, expected, plan.noise)


def read_labels(columns: Sequence[LabelColumn], task: str, sql: str) -> Labels:
    """Concatenate the shards' labels.

    With task "auto", booleans and texts make a classification.
    """
    values = np.concatenate([column.values for column in columns])
    # a shard whose labels are all NULL has no type to compare
    check_no_null(columns, sql)
    kind = common_kind({column.kind for column in columns})
    is_classes = task == "classification" or (task == "auto" and kind in {"boolean", "text"})
    if kind == "text" and not is_classes:
        raise QueryError(
            "the label is text, but the task is regression: CAST it to a number, or set types in "
            "the tables file (of texts such as '$1,000'); or set task = \"classification\""
        )
    if is_classes:
        return _classes(columns, values, kind)
    largest = float(np.abs(values).max(initial=0.0))
    if largest > LARGEST_LABEL:
        raise QueryError(
            f"the label reaches {largest:.3g}, beyond {LARGEST_LABEL:g}: divide it in the query"
        )
    return Labels(values)


def common_kind(kinds: Collection[str]) -> str:
    """Return the label's type in all shards; times are refused."""
    if len(kinds) > 1:
        raise QueryError(f"the label differs in type between the shards: {sorted(kinds)}")
    if "time" in kinds:
        raise QueryError(
            "the label is a date or time: write a number, such as EPOCH(t.column) or "
            "DATE_DIFF('day', DATE '2020-01-01', t.column), or a class: HOUR(t.column) < 12"
        )
    return next(iter(kinds), "number")


def _classes(columns: Sequence[LabelColumn], values: FloatArray, kind: str) -> Labels:
    """Number the classes of all shards together, in ascending order."""
    if kind == "text":
        listed = [name for column in columns for name in column.categories]
        names, place = np.unique(np.array(listed, dtype=object), return_inverse=True)
        sizes = [len(column.categories) for column in columns]
        starts = np.cumsum([0, *sizes[:-1]])
        rows = [len(column.values) for column in columns]
        codes = place[values.astype(np.intp) + np.repeat(starts, rows)]
        classes = tuple(map(str, names))
    else:
        distinct, codes = np.unique(values, return_inverse=True)
        classes = tuple(f"{value:.15g}" for value in distinct)
    if (count := len(classes)) > MAX_CLASSES:
        raise QueryError(
            f"the label has {count} distinct values; classification takes at most "
            f'{MAX_CLASSES}: set task = "regression" for numbers, or group them in the query'
        )
    if (count := sum(map(bool, map(FRACTION.fullmatch, classes)))) > MOST_FRACTIONS:
        raise QueryError(
            f"the label has {count} classes that are numbers with fractions: round it, or set "
            'task = "regression" (of a text, CAST(... AS DOUBLE) is a number)'
        )
    return Labels(codes.astype(np.float64), classes, kind)


def choose_loss(labels: Labels, joined: FloatArray, settings: Settings) -> Loss:
    """Return the loss of the task, after checking the training labels."""
    if not len(joined):
        raise QueryError(
            "all joined rows are held out for testing: lower test-fraction "
            f"({settings.test_fraction:g}) or add rows"
        )
    values = np.unique(joined)
    if len(values) < 2:
        name = labels.classes[int(values[0])] if labels.classes else f"{values[0]:g}"
        raise QueryError(
            f"the label is constant in the {len(joined)} joined training rows "
            f"({'one class' if labels.classes else 'one value'}: {name})"
        )
    return loss_of(labels, settings.loss, settings)


def loss_of(labels: Labels, wanted: str, settings: Settings) -> Loss:
    """Return a loss, corrected for the labels' noise if that is asked for."""
    uncorrected = plain_loss(labels.classes, wanted)
    if labels.noise is None or not settings.privacy.label_correction:
        return uncorrected
    return label_noise.corrected(uncorrected, labels.noise)


def plain_loss(classes: Sequence[str], wanted: str) -> Loss:
    """Return a loss for labels in the clear; for "auto" the first that fits them."""
    count = len(classes)
    fitting = [name for name, loss in LOSSES.items() if count in loss.class_counts]
    if wanted not in (AUTO, *fitting):
        label = f"with {count} classes" if count else "of numbers"
        raise QueryError(f"loss {wanted!r} does not fit a label {label}: use {', '.join(fitting)}")
    return make_loss(fitting[0] if wanted == AUTO else wanted, count)
