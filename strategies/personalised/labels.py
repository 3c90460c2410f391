"""Labels that stay at their sites: what the server makes of what it is told of them."""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from strategies.run.exchange import Part, Replies
from strategies.run.reply_checks import refuse
from strategies.setup.extract import Extracted
from strategies.setup.joined_rows import Alignment
from strategies.setup.labels import LARGEST_LABEL, MAX_CLASSES, Labels
from tp_flower.arrays import FloatArray
from tp_flower.errors import QueryError
from tp_flower.protocol import ExtractedPart, LabelFacts, PersonalisedPart
from tp_flower.settings import Settings

LARGEST_SUM: Final = 1e60
"""Of squares of labels."""


def class_names(extracted: Extracted, parts: Sequence[Part]) -> tuple[str, ...]:
    """Return the names of the classes of all sites; none in a regression.

    Raises:
        QueryError: the sites' labels differ in type.
        ReplyError: what a site says of its label is not usable.
    """
    told = {
        part: _label(extracted.replies, part)
        for part in parts
        if extracted.rows[part.number]
    }
    kinds = {label.kind for label in told.values()}
    if len(kinds) > 1:
        raise QueryError(
            f"the label differs in type between the shards: {sorted(kinds)}"
        )
    listed = [
        _listed(part, label.kind, label.classes)
        for part, label in told.items()
        if label.classes is not None
    ]
    if not listed:
        return ()
    if len(listed) != len(told):
        raise QueryError("only some sites take the label for a class: set task")
    found = sorted({value for own in listed for value in own})
    if len(found) > MAX_CLASSES:
        raise QueryError(
            f"the label has {len(found)} distinct values; classification takes at most "
            f"{MAX_CLASSES}"
        )
    return tuple(value if isinstance(value, str) else repr(value) for value in found)


def _label(replies: Replies, part: Part) -> LabelFacts:
    label = replies.body(part, ExtractedPart).label
    if label is None:
        raise refuse(part, "nothing of its label")
    return label


def _listed(part: Part, kind: str, classes: list[Any]) -> list[Any]:
    """Return the classes of one site: texts, or finite numbers."""
    kinds = (str,) if kind == "text" else (int, float)
    is_listed = all(type(value) in kinds for value in classes)
    if not is_listed or not all(
        isinstance(value, str) or abs(value) <= LARGEST_LABEL for value in classes
    ):
        raise refuse(part, "classes of its label that are none")
    return classes


def check_task(labels: Labels, settings: Settings) -> None:
    """Refuse classes that nothing can be learned of.

    Raises:
        QueryError: there is one class, or none where the task asks for them.
    """
    if labels.classes and len(labels.classes) < 2:
        raise QueryError(
            f"the label is constant at all sites (one class: {labels.classes[0]})"
        )
    if settings.task == "classification" and not labels.classes:
        raise QueryError("no site has told the classes of its label")


def class_values(aligned: Alignment) -> list[Any]:
    """Return the classes as the sites have told them."""
    (table,) = aligned.bound.tables
    kinds = {
        _label(aligned.extracted.replies, part).kind
        for part in aligned.extracted.parts[table]
        if aligned.extracted.rows[part.number]
    }
    names = aligned.labels.classes
    return list(names) if kinds == {"text"} else [float(name) for name in names]


def base_score_of(
    aligned: Alignment, replies: Replies, parts: Sequence[Part]
) -> FloatArray:
    """Return the best constant score of all sites' rows together.

    Raises:
        ReplyError: a site's sums are none.
        QueryError: the label is constant in the training rows.
    """
    loss, classes = aligned.loss, len(aligned.labels.classes)
    told = np.array([_sums(replies, part, classes or 3) for part in parts])
    sums: FloatArray = told.sum(axis=0)
    if not classes:
        count, total, squares = sums.tolist()
        mean = total / max(count, 1.0)
        if count and squares - count * mean**2 <= 1e-12 * abs(squares):
            raise QueryError(f"the label is constant in the training rows ({mean:g})")
        return np.array([mean])
    if np.count_nonzero(sums) < 2:
        raise QueryError("the label is constant in the training rows (one class)")
    labels = np.arange(classes, dtype=np.float64)
    # a class that only held-out rows have, has the least score that is finite
    weights = np.maximum(sums, 1e-3)
    return loss.base_score(labels, weights)


def label_scale_of(
    aligned: Alignment, replies: Replies, parts: Sequence[Part]
) -> float:
    """Return the deviation of all sites' training labels; of classes 1."""
    if aligned.labels.classes:
        return 1.0
    told = np.array([_sums(replies, part, 3) for part in parts])
    count, total, squares = told.sum(axis=0).tolist()
    variance = squares / max(count, 1.0) - (total / max(count, 1.0)) ** 2
    return math.sqrt(max(variance, 0.0)) or 1.0


def _sums(replies: Replies, part: Part, count: int) -> list[float]:
    sums = replies.body(part, PersonalisedPart).label_sums
    if len(sums) != count or not all(abs(total) < LARGEST_SUM for total in sums):
        raise refuse(part, "sums of labels that are none")
    return sums
