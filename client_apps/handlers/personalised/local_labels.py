"""Labels that stay at their site: what leaves of them, and what they become there.

Where every site trains a model of its own, the server needs no label. It is told the
label's type, and in a classification which classes there are; it puts the sites'
classes together and sends them back, and the site turns its labels into their numbers.
"""

from typing import Any, Final

import numpy as np

from tp_flower.arrays import FloatArray
from tp_flower.errors import QueryError, SiteError
from tp_flower.extraction.extracted import LabelColumn
from tp_flower.protocol import LabelFacts
from tp_flower.sources.policy import LABELS
from tp_flower.sources.shards import ShardSource

MOST_CLASSES: Final = 1000
LARGEST_LABEL: Final = 1e18


def kept_label_facts(source: ShardSource, label: LabelColumn, task: str) -> LabelFacts:
    """Return what the server may know of labels that stay.

    Args:
        source: their shard.
        label: of its rows.
        task: of the run; "auto" is classification for booleans and texts.

    Raises:
        QueryError: labels are missing, too large or of too many classes.
        PolicyError: the names of its classes may not leave.
    """
    missing = int(np.isnan(label.values).sum())
    if missing:
        raise QueryError(
            f"the label is NULL in {missing} rows: add a filter (WHERE ... IS NOT NULL)"
        )
    is_classes = task == "classification" or (
        task == "auto" and label.kind in ("boolean", "text")
    )
    if not is_classes:
        if np.abs(label.values).max(initial=0.0) > LARGEST_LABEL:
            raise QueryError(f"a label is beyond {LARGEST_LABEL:g}: divide it")
        return LabelFacts(label.kind)
    found: list[Any] = np.unique(label.values).tolist()
    if label.kind == "text":
        found = list(label.categories)
    if label.kind != "boolean":
        # the name of a class is the value of a label
        source.policy.check_release(LABELS, is_private=False)
    if len(found) > MOST_CLASSES:
        raise QueryError(
            f"the label has {len(found)} distinct values; classification takes at most "
            f'{MOST_CLASSES}: set task = "regression", or group them in the query'
        )
    return LabelFacts(label.kind, classes=found)


def label_numbers(label: LabelColumn, classes: list[Any] | None) -> FloatArray:
    """Return the labels as numbers (n,): their classes' positions, if there are any.

    Args:
        label: of the rows.
        classes: of all sites, ascending: texts, or numbers; None in a regression.

    Raises:
        SiteError: a label is none of the classes.
    """
    if classes is None:
        return label.values
    own: FloatArray = label.values
    if label.kind == "text":
        places = {name: float(code) for code, name in enumerate(classes)}
        known = [places.get(name, np.nan) for name in label.categories]
        numbers = np.array([*known, np.nan])[label.codes]
    else:
        values = np.array([v for v in classes if type(v) in (int, float)], np.float64)
        if len(values) != len(classes) or not len(values):
            raise SiteError("malformed request: 'classes' must be a list of numbers")
        numbers = np.searchsorted(values, own).astype(np.float64)
        near = values[np.minimum(numbers, len(values) - 1).astype(np.intp)]
        numbers = np.where(near == own, numbers, np.nan)
    if np.isnan(numbers).any():
        raise SiteError("malformed request: 'classes' lacks one of the site's")
    return numbers


def label_sums(labels: FloatArray, classes: int) -> list[float]:
    """Return how many labels each class has; of numbers their count, sum and squares.

    >>> label_sums(np.array([1.0, 3.0]), 0)
    [2.0, 4.0, 10.0]
    >>> label_sums(np.array([1.0, 0.0, 1.0]), 2)
    [1.0, 2.0]
    """
    if classes:
        counts = np.bincount(labels.astype(np.intp), minlength=classes)
        return [float(count) for count in counts]
    return [float(len(labels)), float(labels.sum()), float(labels @ labels)]
