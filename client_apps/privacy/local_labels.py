"""Labels that stay at their site: the server learns their type, and classes if any.

Of numbers whose moments several shards add up it learns the magnitude, too.
"""

import math
from typing import Any

import numpy as np

from client_apps.rounds.site import Site
from tp_flower.arrays import FloatArray
from tp_flower.errors import QueryError
from tp_flower.extraction.extracted import LabelColumn, check_no_null
from tp_flower.objectives import LARGEST_LABEL, MAX_CLASSES
from tp_flower.protocol.setup_messages import LabelFacts
from tp_flower.sources.policy import LABELS
from tp_flower.sources.shards import ShardSource


def is_label_covered(site: Site, number: int) -> bool:
    """Return whether noise covers the labels of a part that stay at the site."""
    settings = site.terms.settings
    table = site.terms.proposal.parts[number].table
    return settings.rules.covers_values(settings, table)


def local_label_facts(
    source: ShardSource,
    label: LabelColumn,
    task: str,
    sql: str,
    *,
    is_covered: bool = False,
) -> LabelFacts:
    """Return the type of labels that stay at the site, and their classes, if any.

    ``sql`` is the label's expression, for messages. With task "auto", booleans and
    texts make a classification; so may numbers, if the site has at most two: it sends
    them where its policy lets labels leave, and otherwise says nothing of them.

    Where noise covers labels, no value of one is refused, and booleans are always two
    classes: either would be an answer about a row.
    """
    if not is_covered:
        check_no_null([label], sql, are_private=True)
    is_classes = task == "classification" or (
        task == "auto" and label.kind in ("boolean", "text")
    )
    present = label.values[~np.isnan(label.values)]
    distinct, rows = np.unique(present, return_counts=True)
    if task == "auto" and label.kind == "number":
        is_shown = source.policy.lets_leave(LABELS) and bool(
            (rows >= source.min_count).all()
        )
        is_classes = len(distinct) <= 2 and is_shown
    if not is_classes:
        # those that noise covers are clipped to a declared range
        if not is_covered and np.abs(present).max(initial=0.0) > LARGEST_LABEL:
            raise QueryError(f"a label is beyond {LARGEST_LABEL:g}: divide it")
        return LabelFacts(label.kind)
    classes: list[Any] = distinct.tolist()
    if label.kind == "boolean" and is_covered:
        classes = [0.0, 1.0]
    classes = list(label.categories) or classes
    if label.kind != "boolean":
        # a class is named by the value of its label
        source.policy.check_release(LABELS, is_private=False)
    if len(classes) > MAX_CLASSES:
        raise QueryError(
            f"the label has {len(classes)} distinct values; classification takes at "
            f'most {MAX_CLASSES}: set task = "regression", or group them in the query'
        )
    return LabelFacts(label.kind, classes=classes)


def label_sums(labels: FloatArray, classes: int) -> list[float]:
    """Return the number of labels per class, or the count, sum and squares of numbers.

    >>> label_sums(np.array([1.0, 3.0]), 0)
    [2.0, 4.0, 10.0]
    >>> label_sums(np.array([1.0, 0.0, 1.0]), 2)
    [1.0, 2.0]
    """
    if classes:
        return [
            float(count)
            for count in np.bincount(labels.astype(np.intp), minlength=classes)
        ]
    return [float(len(labels)), float(labels.sum()), float(labels @ labels)]


def magnitude_of(labels: FloatArray) -> int:
    """Return the power of two above the labels' root mean square, of none 0.

    >>> magnitude_of(np.array([3.0, 5.0])), magnitude_of(np.array([0.0]))
    (3, 0)
    """
    mean_square = float(np.mean(labels**2)) if len(labels) else 0.0
    return math.ceil(math.log2(mean_square) / 2.0) if mean_square else 0
