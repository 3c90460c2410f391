"""Labels of the sites: numbers or classes, and the loss that trains on them."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from strategies.run.exchange import Part
from strategies.run.replies import refuse
from strategies.setup.extract import Extracted
from strategies.setup.row_weights import check_offset
from tp_flower.arrays import BoolArray, FloatArray, count_values
from tp_flower.errors import QueryError, SettingsError
from tp_flower.extraction.extracted import LabelColumn, check_no_null
from tp_flower.objectives import (
    EVENT,
    LABEL,
    LARGEST_LABEL,
    MAX_CLASSES,
    TIME,
    Objective,
    Target,
    family_named,
    fits,
    fitting_families,
    make_objective,
    takes_numbers,
    with_offset,
)
from tp_flower.privacy.label_mechanisms import LabelPlan
from tp_flower.protocol.setup_messages import ExtractedPart, LabelFacts
from tp_flower.query import BoundQuery
from tp_flower.settings import Settings
from tp_flower.settings.declare import AUTO
from tp_flower.settings.run import CLASSIFICATION, REGRESSION
from tp_flower.settings.settings import problems_of_loss
from tp_flower.terms.extraction import label_plan, needs_numbers

CLASS_KINDS: Final = frozenset({"boolean", "text"})
MOST_FEW: Final = 20  # distinct numbers that may have been meant as classes
FRACTION = re.compile(r"-?\d+[.,]\d+")
MOST_FRACTIONS = 50
"""Of so many classes at most the names are numbers with fractions."""


def keep_classes_of(labels: Target, rows: BoolArray) -> Target:
    """Return the labels of a run on ``rows`` (n,), with only their classes."""
    if rows.all() or not labels.classes or labels.noise or not labels.has_label:
        return labels
    present, codes = np.unique(labels.codes[rows], return_inverse=True)
    columns = np.full((len(rows), 1), np.nan)
    columns[rows, 0] = codes
    classes = tuple(labels.classes[k] for k in present.tolist())
    return replace(labels, stored=columns, classes=classes)


def gather_labels(
    extracted: Extracted, bound: BoundQuery, settings: Settings
) -> Target:
    """Combine the label columns of the label table's shards."""
    columns = extracted.label_columns(bound.label_table)
    values = [column for _, column in columns]
    if extracted.survival:
        return read_survival(values, extracted.survival, bound.label_sql)
    if plan := label_plan(settings):
        return read_private_labels(columns, plan)
    return read_labels(values, settings, bound.label_sql)


def read_private_labels(
    columns: Sequence[tuple[Part, LabelColumn]], plan: LabelPlan
) -> Target:
    """Concatenate the shards' noisy labels."""
    count = plan.class_count
    for part, column in columns:
        is_one = not count or np.isin(column.values, np.arange(count)).all()
        has_form = column.kind == plan.kind and column.categories == plan.classes
        if not (is_one and has_form and np.isfinite(column.values).all()):
            raise refuse(part, "labels without the noise that the run asks for")
    values = np.concatenate([column.values for _, column in columns])
    names = plan.classes or tuple(str(code) for code in range(count))
    return Target.of(values, names, plan.kind, plan.noise)


def read_labels(columns: Sequence[LabelColumn], settings: Settings, sql: str) -> Target:
    """Concatenate the shards' labels.

    With task "auto", booleans and texts make a classification, and so do numbers of
    which all shards together have two; see :func:`task_line`.
    """
    task = settings.task
    values = np.concatenate([column.values for column in columns])
    # a shard whose labels are all NULL has no type to compare
    check_no_null(columns, sql)
    kind = common_kind({column.kind for column in columns})
    is_classes = task == CLASSIFICATION
    if task == AUTO:
        is_classes = kind in CLASS_KINDS
        if kind == "number" and not needs_numbers(settings):
            is_classes = count_values(values, most=2) == 2
    check_kind(kind, settings.task)
    if is_classes:
        return _classes(columns, values, kind)
    _check_size(values)
    return Target.of(values)


def _check_size(values: FloatArray, name: str = LABEL) -> None:
    """Refuse labels that float32 has no room for."""
    largest = float(np.abs(values).max(initial=0.0))
    if largest > LARGEST_LABEL:
        raise QueryError(
            f"the {name} reaches {largest:.3g}, beyond {LARGEST_LABEL:g}: divide it in "
            "the query"
        )


def read_survival(
    columns: Sequence[LabelColumn], survival: Mapping[str, FloatArray], sql: str
) -> Target:
    """Concatenate the shards' times of events, beside what else rows have of them."""
    check_no_null(columns, sql, TIME)
    kinds = {column.kind for column in columns}
    if kinds - {"number"}:
        raise QueryError(
            f"the time is of type {', '.join(sorted(kinds))}: write a number, such as "
            "DATE_DIFF('day', t.first, t.last) AS time"
        )
    values = np.concatenate([column.values for column in columns])
    _check_size(values, TIME)
    return Target(
        np.column_stack([values, *survival.values()]), names=(TIME, *survival)
    )


def check_numbers(bound: BoundQuery, settings: Settings) -> None:
    """Refuse numbers of rows, besides the label, that the run cannot train by."""
    check_offset(bound, settings)
    _check_survival(bound, settings)


def _check_survival(bound: BoundQuery, settings: Settings) -> None:
    """Refuse times of events that the run cannot train by, or a label without them."""
    if not bound.names_event:
        # a clustering reads no loss
        loss = settings.loss if bound.label_sql else AUTO
        if loss != AUTO and TIME in family_named(loss).label_names:
            raise QueryError(_wrong_columns(loss, (LABEL,)))
        return
    name = fitting_loss((), settings.loss, (TIME, EVENT))
    problems = list(problems_of_loss(name, settings))
    if settings.task == CLASSIFICATION:
        problems.append(f"task: {CLASSIFICATION!r} is for classes, not for AS time")
    if problems:
        raise SettingsError("; ".join(problems))


class LabelClasses(NamedTuple):
    """The type of a label that stays at the sites, and its classes at all of them.

    Attributes:
        values: in ascending order; empty in a regression.
    """

    kind: str
    values: Sequence[str | float]

    @property
    def names(self) -> tuple[str, ...]:
        """The classes' names, in the order of the values."""
        return tuple(v if isinstance(v, str) else number_name(v) for v in self.values)


def read_classes(
    extracted: Extracted, parts: Sequence[Part], settings: Settings
) -> LabelClasses:
    """Return the label's type and its classes at all sites; none in a regression.

    With task "auto" a site sends numbers as classes if it has at most two, and its
    policy lets labels leave: they are classes if all sites have sent theirs, and have
    two between them.
    """
    kinds: set[str] = set()
    classes: set[str | float] = set()
    unclassed = []
    for part in parts:
        if not extracted.rows[part.number]:
            continue
        label = label_facts(extracted, part)
        kinds.add(label.kind)
        classes.update(label.classes or [])
        if label.classes is None:
            unclassed.append(part)
    kind = common_kind(kinds)
    check_kind(kind, settings.task)
    if settings.task == AUTO and kind == "number" and (unclassed or len(classes) != 2):
        return LabelClasses(kind, ())
    if classes and unclassed:
        # the task, or the type, makes the same of it at all sites
        raise refuse(unclassed[0], "no classes of its label, which others have sent")
    label_classes = LabelClasses(kind, sorted(classes))
    _check_classes(label_classes, settings.task)
    return label_classes


def _check_classes(classes: LabelClasses, task: str) -> None:
    """Refuse a label of one class, or of too many, and classification without any."""
    count = len(classes.values)
    if task == CLASSIFICATION and not count:
        raise QueryError("no site has sent the classes of its label")
    if count == 1:
        raise QueryError(
            f"the label is constant at all sites (one class: {classes.names[0]})"
        )
    if count > MAX_CLASSES:
        raise QueryError(
            f"the label has {count} distinct values; classification takes at most "
            f"{MAX_CLASSES}"
        )


def label_facts(extracted: Extracted, part: Part) -> LabelFacts:
    """Return a site's description of its label, checked."""
    label = extracted.replies.body(part, ExtractedPart).label
    if label is None:
        raise refuse(part, "no type of its label")
    if any(isinstance(v, str) != (label.kind == "text") for v in label.classes or []):
        raise refuse(part, f"classes that its {label.kind} label cannot have")
    return label


def task_line(labels: Target, settings: Settings) -> str:
    """Return the task that "auto" has become, with the reason, and how to choose the other.

    >>> task_line(Target.of(np.array([1.0, 0.0]), ("0", "1")), Settings())
    'classification, because the label has two values, 0 and 1; to train on the numbers set task = "regression"'
    """  # noqa: E501 - the line as it is printed
    if EVENT in labels.names:
        return "survival, by loss cox, because the query has AS time and AS event"
    if labels.classes and labels.kind == "number":
        values = " and ".join(labels.classes)
        reason = f"the label has two values, {values}"
        return (
            f"{CLASSIFICATION}, because {reason}; to train on the numbers set "
            f'task = "{REGRESSION}"'
        )
    if labels.classes and labels.noise:
        return f"{CLASSIFICATION}, because the noise on the label is for classes"
    if labels.classes:
        kind = "text"
        if labels.kind == "boolean":
            kind = "true or false"
        return f"{CLASSIFICATION}, because the label is {kind}"
    if setting := needs_numbers(settings):
        return f"{REGRESSION}, because {setting} is for numbers"
    reason = f"{REGRESSION}, because the label is a number"
    is_shown = labels.has_label and not labels.noise
    count = count_values(labels.numbers, most=MOST_FEW) if is_shown else 0
    if not 2 < count <= MOST_FEW:
        return reason
    low = labels.numbers.min()
    high = labels.numbers.max()
    return (
        f"{reason}: it has {count} values, from {low:g} to {high:g}; to train on them "
        "as classes "
        f'set task = "{CLASSIFICATION}"'
    )


def common_kind(kinds: Collection[str]) -> str:
    """Return the label's type in all shards; times are refused."""
    if len(kinds) > 1:
        raise QueryError(
            f"the label differs in type between the shards: {sorted(kinds)}"
        )
    kind = next(iter(kinds), "number")
    check_kind(kind)
    return kind


def check_kind(kind: str, task: str = AUTO) -> None:
    """Refuse a label of a type that no model, or none of the task, learns."""
    if kind == "time":
        raise QueryError(
            "the label is a date or time: write a number, such as EPOCH(t.column) or "
            "DATE_DIFF('day', DATE '2020-01-01', t.column), or a class: HOUR(t.column) "
            "< 12"
        )
    if kind == "text" and task == REGRESSION:
        raise QueryError(
            "the label is text, but the task is regression: CAST it to a number, or "
            "set types in the tables file (of texts such as '$1,000'); or set task = "
            '"classification"'
        )


def _classes(columns: Sequence[LabelColumn], values: FloatArray, kind: str) -> Target:
    """Number the classes of all shards together, in ascending order."""
    if kind == "text":
        listed = [name for column in columns for name in column.categories]
        names, position_of = np.unique(
            np.array(listed, dtype=object), return_inverse=True
        )
        sizes = [len(column.categories) for column in columns]
        starts = np.cumsum([0, *sizes[:-1]])
        rows = [len(column.values) for column in columns]
        codes = position_of[values.astype(np.intp) + np.repeat(starts, rows)]
        classes = tuple(map(str, names))
    else:
        distinct, codes = np.unique(values, return_inverse=True)
        classes = tuple(map(number_name, distinct.tolist()))
    if (count := len(classes)) > MAX_CLASSES:
        raise QueryError(
            f"the label has {count} distinct values; classification takes at most "
            f'{MAX_CLASSES}: set task = "regression" for numbers, or group them in the '
            "query"
        )
    if (count := sum(map(bool, map(FRACTION.fullmatch, classes)))) > MOST_FRACTIONS:
        raise QueryError(
            f"the label has {count} classes that are numbers with fractions: round it, "
            'or set task = "regression" (of a text, CAST(... AS DOUBLE) is a number)'
        )
    return Target.of(codes, classes, kind)


def _wrong_columns(loss: str, names: Sequence[str]) -> str:
    """Return why a loss does not fit a label of columns with other names."""
    if TIME in names:
        return (
            f"loss {loss!r} does not fit times of events: use cox, or write the value "
            "to predict AS label, without AS time and AS event"
        )
    return (
        f"loss {loss!r} needs two columns of the label's table: write when a row has "
        "its event, or is last seen, AS time, and whether it has one AS event, in "
        "place of AS label"
    )


def number_name(value: float) -> str:
    """Return the name of a class that is a number, which no other number has.

    >>> number_name(1.0), number_name(-0.0), number_name(0.1), number_name(0.1 + 0.2)
    ('1', '0', '0.1', '0.30000000000000004')
    """
    name = f"{value + 0.0:.15g}"
    return name if float(name) == value else repr(value)


def choose_objective(
    target: Target, is_trained: BoolArray, settings: Settings
) -> Objective:
    """Return the objective of the task on all joined rows, (N,).

    The labels of those to train on are checked.
    """
    trained = target.select(is_trained)
    if not len(trained):
        raise QueryError(
            "all joined rows are held out for testing: lower test-fraction "
            f"({settings.test_fraction:g}) or add rows"
        )
    objective = objective_of(target, settings.loss, settings)
    if why := objective.select(is_trained).refusal_to_train():
        raise QueryError(why)
    return objective


def objective_of(target: Target, loss: str, settings: Settings) -> Objective:
    """Return an objective, corrected for the labels' noise if that is asked for."""
    name = fitting_loss(target.classes, loss, target.names)
    if target.has_label and (why := family_named(name).refusal(target)):
        raise QueryError(why)
    is_corrected = settings.privacy.label_correction
    return make_objective(name, target, noise=target.noise if is_corrected else None)


def beside_offset(objective: Objective, offset: FloatArray | None) -> Objective:
    """Return an objective whose scores have the rows' offset (N,) added, if any."""
    if offset is None:
        return objective
    if objective.outputs > 1:
        raise QueryError(
            f"loss {objective.name!r} has a score for each class, and an offset is "
            "added to the only score of a row: leave 'AS offset' out, or use loss = "
            "'logistic' with a label of two classes"
        )
    return with_offset(objective, offset)


def fitting_loss(
    classes: Sequence[str], loss: str, names: Sequence[str] = (LABEL,)
) -> str:
    """Return the loss of labels in the clear; for "auto" the first that fits them.

    The label's columns have ``names``.
    """
    count = len(classes)
    losses = fitting_families(count, names)
    if count and not losses:
        raise QueryError(
            f"the label is {classes[0]!r} in all joined rows: classification compares "
            "two classes or more"
        )
    if loss != AUTO and not fits(family_named(loss), count, names):
        if TIME in (names[0], family_named(loss).label_names[0]):
            raise QueryError(_wrong_columns(loss, names))
        label = "of numbers"
        if count:
            label = f"with {count} classes"
        is_of_classes = not takes_numbers(loss)
        advice = ""
        if is_of_classes and not count:
            advice = f', or set task = "{CLASSIFICATION}"'
        raise QueryError(
            f"loss {loss!r} does not fit a label {label}: use "
            f"{', '.join(losses)}{advice}"
        )
    return losses[0] if loss == AUTO else loss
