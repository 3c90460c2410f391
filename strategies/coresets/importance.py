"""What the sensitivities of the parts' rows sum to, as far as a site may say so."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from strategies.run.exchange import Part, Replies
from strategies.run.replies import LARGEST, array_of, read_label, refuse
from strategies.setup.joined_rows import JoinedRows
from strategies.setup.problem import PartRows, TableLayout
from tp_flower.arrays import FloatArray
from tp_flower.coresets.importance import (
    REGRESSION,
    is_gram,
    kmeans_total,
    leverage_total,
    penalised,
    whitening,
)
from tp_flower.features.encoder import TableEncoder
from tp_flower.protocol import MeasuredPart
from tp_flower.settings import Settings

ROUNDING: Final = 1e-6
"""By which a total may be beyond its bound, relative to it."""


@dataclass(frozen=True)
class Party:
    """A part as one that draws rows.

    Attributes:
        part: of the run.
        rows: where its rows lie.
        total: what its sensitivities sum to, as its site says.
        most: that they can sum to.
        cost: of the clusters of all shards of its table; None where they have none.
        gram: second moments of the columns of all shards of its table; None without.
    """

    part: Part
    rows: PartRows
    total: float
    most: float
    cost: float | None = None
    gram: FloatArray | None = None

    @property
    def scale(self) -> float:
        """By what its scores are lowered: 1 where its total is one that it can have."""
        if self.total <= self.most * (1.0 + ROUNDING):
            return 1.0
        # a site without rows has nothing that could be drawn
        return max(self.most / self.total, np.finfo(np.float64).tiny)

    @property
    def words(self) -> str:
        """What a report says of a total that is more than it can be."""
        own = self.part
        return f"{own.table} at {own.site}: {self.total:g} of at most {self.most:g}"

    @property
    def capped(self) -> float:
        """What its lowered scores sum to."""
        return min(self.total, self.most)


def measured_parties(
    joined: JoinedRows,
    encoders: Mapping[str, TableEncoder],
    replies: Replies,
    wanted: str,
    settings: Settings,
) -> list[Party]:
    """Return the parts of all tables, in the order of the query.

    Raises:
        ReplyError: a site says what no rows can sum to, beyond what can be capped.
    """
    parties: list[Party] = []
    penalty = penalty_of(joined, settings)
    for name, own in joined.compact.items():
        if wanted == REGRESSION:
            others = 0
            if name == joined.bound.label_table:
                others = 1 + max(len(joined.labels.classes), 1)
            features = encoders[name].width
            parties += _of_columns(own, replies, features, others, penalty)
        else:
            parties += _of_clusters(own, replies, settings.clusters)
    return parties


def label_order(joined: JoinedRows) -> dict[str, Any]:
    """Return how the label table is to take its label: as a number, or by classes.

    The classes are values as the sites have them, in the order of their codes here.
    """
    if not joined.labels.classes:
        return {"classes": None}
    sent = joined.extracted
    parts = [p for p in sent.parts[joined.bound.label_table] if sent.rows[p.number]]
    labels = [read_label(sent.replies, p, sent.rows[p.number]) for p in parts]
    if labels[0].kind == "text":
        return {"classes": list(joined.labels.classes)}
    values = np.concatenate([label.values for label in labels])
    return {"classes": np.unique(values).tolist()}


def penalty_of(joined: JoinedRows, settings: Settings) -> float:
    """Return N l2: what the objective's penalty adds to a table's second moments."""
    return settings.l2 * joined.train.joined_rows


def _of_columns(
    own: TableLayout, replies: Replies, features: int, others: int, penalty: float
) -> list[Party]:
    """Return the parts of a table whose rows' leverages sum to its columns at most.

    Args:
        own: the table.
        replies: of its sites.
        features: its columns that are penalised; they come first.
        others: the intercept and the label's, at the label table.
        penalty: N l2.
    """
    columns = features + others
    most = [float(min(columns, rows.trained)) for rows in own.rows]
    if len(own.parts) == 1:
        return [
            Party(own.parts[0], own.rows[0], _total(replies, own.parts[0]), most[0])
        ]
    grams = [_gram(replies, part, columns) for part in own.parts]
    whole: FloatArray = np.sum(grams, axis=0)
    basis = whitening(penalised(whole, features, penalty))
    return [
        Party(
            part,
            rows,
            max(leverage_total(gram, basis), 0.0) if rows.trained else 0.0,
            limit,
            gram=whole,
        )
        for part, rows, gram, limit in zip(
            own.parts, own.rows, grams, most, strict=True
        )
    ]


def _gram(replies: Replies, part: Part, columns: int) -> FloatArray:
    found = array_of(replies, part, "gram", (columns, columns))
    if not is_gram(found):
        raise refuse(part, "second moments that no columns have")
    return found


def _total(replies: Replies, part: Part) -> float:
    total = replies.body(part, MeasuredPart).total
    if total is None:
        raise refuse(part, "no sum of its sensitivities")
    return total


def _clusters(replies: Replies, part: Part) -> tuple[float, int]:
    """Return the cost of a shard's clusters, and how many it uses."""
    body = replies.body(part, MeasuredPart)
    if body.cost is None or body.clusters is None:
        raise refuse(part, "no cost of its clusters")
    return body.cost, body.clusters


def _of_clusters(own: TableLayout, replies: Replies, clusters: int) -> list[Party]:
    """Return the parts of a table whose rows are clustered shard by shard."""
    most = [min(clusters, rows.trained) for rows in own.rows]
    limits = [kmeans_total(1.0, 1.0, used) if used else 0.0 for used in most]
    if len(own.parts) == 1:
        total = _total(replies, own.parts[0])
        return [Party(own.parts[0], own.rows[0], total, limits[0])]
    clustered = [_clusters(replies, part) for part in own.parts]
    costs, used = [cost for cost, _ in clustered], [count for _, count in clustered]
    whole = sum(costs)
    if whole > LARGEST:
        raise refuse(own.parts[int(np.argmax(costs))], "clusters of an absurd cost")
    return [
        Party(
            part,
            rows,
            kmeans_total(cost, whole, count) if count else 0.0,
            limit,
            cost=whole,
        )
        for part, rows, cost, count, limit in zip(
            own.parts, own.rows, costs, used, limits, strict=True
        )
    ]
