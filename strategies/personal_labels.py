"""Labels that stay at their sites: what the server makes of what it is told of them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from strategies.alignment import Alignment
from strategies.exchange import Part, Replies
from strategies.extraction import Extracted
from strategies.labels import LARGEST_LABEL, MAX_CLASSES, Labels
from strategies.received import fact_of, refuse
from tp_flower.errors import QueryError
from tp_flower.learning.losses import FloatArray
from tp_flower.settings import Settings

LABEL_SUMS: Final = "label-sums"
LARGEST_SUM: Final = 1e60
"""Of squares of labels."""


def class_names(extracted: Extracted, parts: Sequence[Part]) -> tuple[str, ...]:
    """Return the names of the classes of all sites; none in a regression.

    Raises:
        QueryError: the sites' labels differ in type.
        ReplyError: what a site says of its label is not usable.
    """
    facts = extracted.replies.facts()
    told = {
        part: fact_of(facts, part, "label", dict)
        for part in parts
        if extracted.rows[part.number]
    }
    kinds = {str(own.get("kind")) for own in told.values()}
    if len(kinds) > 1:
        raise QueryError(
            f"the label differs in type between the shards: {sorted(kinds)}"
        )
    listed = [_listed(part, own) for part, own in told.items() if "classes" in own]
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


def _listed(part: Part, label: Mapping[str, Any]) -> list[Any]:
    """Return the classes of one site: texts, or finite numbers."""
    classes = label["classes"]
    kinds = (str,) if label.get("kind") == "text" else (int, float)
    is_listed = isinstance(classes, list) and all(
        type(value) in kinds for value in classes
    )
    if not is_listed or not all(
        isinstance(value, str) or abs(value) <= LARGEST_LABEL for value in classes
    ):
        raise refuse(part, "classes of its label that are none")
    found: list[Any] = classes
    return found


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
    facts = aligned.extracted.replies.facts()
    kinds = {
        facts[part.number]["label"]["kind"]
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
    facts = replies.facts()
    told = np.array([_sums(facts, part, classes or 3) for part in parts])
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
    facts = replies.facts()
    told = np.array([_sums(facts, part, 3) for part in parts])
    count, total, squares = told.sum(axis=0).tolist()
    variance = squares / max(count, 1.0) - (total / max(count, 1.0)) ** 2
    return math.sqrt(max(variance, 0.0)) or 1.0


def _sums(
    facts: Mapping[int, Mapping[str, Any]], part: Part, count: int
) -> list[float]:
    sums = fact_of(facts, part, LABEL_SUMS, list)
    is_number = [type(own) in (int, float) and abs(own) < LARGEST_SUM for own in sums]
    if len(sums) != count or not all(is_number):
        raise refuse(part, "sums of labels that are none")
    return [float(own) for own in sums]
