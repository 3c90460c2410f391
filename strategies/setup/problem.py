"""What the server knows after set-up: parts, mapping, labels, loss and base score."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from strategies.disclosures.releases import Audience
from strategies.run.exchange import Part
from strategies.setup.coreset_sample import Drawn
from strategies.setup.row_weights import Weighting
from tp_flower.arrays import FloatArray
from tp_flower.features.encoder import TableEncoder
from tp_flower.joins.mapping import JoinStep, TableMapping
from tp_flower.learning.losses import Loss
from tp_flower.protocol import Update
from tp_flower.reports.records import TableReport

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class PartRows:
    """Where the rows of a part lie among the rows of its table that take part.

    The rows that take part are renumbered: per part the trained ones first, then those
    that are only tested. So a part's target is one slice and its scores another.

    Attributes:
        start: first row of the part.
        trained: number of its trained rows.
        total: number of its rows that take part.
        tested: (total,) bool, rows that appear in held-out joined rows.
    """

    start: int
    trained: int
    total: int
    tested: BoolArray

    @property
    def trained_slice(self) -> slice:
        """The trained rows within the table."""
        return slice(self.start, self.start + self.trained)

    @property
    def slice(self) -> slice:
        """All rows of the part within the table."""
        return slice(self.start, self.start + self.total)


@dataclass(frozen=True)
class Table:
    """One table of the query in training.

    Attributes:
        name: alias in the query.
        parts: its shards.
        rows: where each part's rows lie, in the same order.
        update: how its shards are trained together.
        features: encoded columns, d.
        outputs: d_c.
        has_intercept: whether its model has the output intercept.
        is_linear: whether its model is linear.
        largest_curvature: largest eigenvalue of [T, 1]^T diag(G) [T, 1] / N, bounded by
            the sum over the shards; 0 without batches.
        mean_curvature: per shard, the mean diagonal of that matrix.
        penalised: (p,) bool, the model's parameters that the penalty covers.
        gram: its sum over the shards where ``update`` is GRAM, else None.
        gram_deviation: of the noise that the shards have added to it together.
        gradient_noise: deviation over clip of the noise that the shards add together to
            the gradient of a batch.
    """

    name: str
    parts: tuple[Part, ...]
    rows: tuple[PartRows, ...]
    update: Update
    features: int
    outputs: int
    has_intercept: bool
    is_linear: bool
    largest_curvature: float
    mean_curvature: tuple[float, ...]
    penalised: BoolArray
    gram: FloatArray | None
    gram_deviation: float = 0.0
    gradient_noise: float = 0.0

    def with_gram(self, gram: FloatArray, deviation: float) -> "Table":
        """Return the table with the Gram matrix that its shards sent."""
        return replace(self, gram=gram, gram_deviation=deviation)

    @property
    def total_rows(self) -> int:
        """Rows of the table that take part."""
        return sum(rows.total for rows in self.rows)


@dataclass(frozen=True)
class Federation:
    """A training problem over joined rows that nobody holds.

    Attributes:
        tables: by alias.
        train: mapping of the training rows, over the tables' rows that take part.
        test: mapping of the held-out rows, or None without any.
        train_labels: (N,).
        test_labels: (N_test,).
        loss: of scores against labels.
        base_score: b, (d_c,).
        initial_scores: local scores (n_i, d_c) of the untrained models.
        l2: beta.
        seed: of the run.
        classes: names of the label's classes; empty in regression.
        join_steps: one record per table, in the order of joining.
        source_rows: rows of every table after its filters.
        fan_out: by table, the joined training rows of each of its rows that is in one.
        names: name of every table at the sites.
        encoders: of every table.
        audience: what decides who learns what.
        weighting: what the joined rows weigh.
        coreset: the sample that is trained on; None where all joined rows are.
        weight_facts: what a report says of the weights that were asked for.
    """

    tables: Mapping[str, Table]
    train: TableMapping
    test: TableMapping | None
    train_labels: FloatArray
    test_labels: FloatArray
    loss: Loss
    base_score: FloatArray
    initial_scores: Mapping[str, FloatArray]
    l2: float
    seed: int
    classes: tuple[str, ...]
    join_steps: tuple[JoinStep, ...]
    source_rows: Mapping[str, int]
    fan_out: Mapping[str, npt.NDArray[np.int64]]
    names: Mapping[str, str]
    encoders: Mapping[str, TableEncoder]
    audience: Audience
    weighting: Weighting = field(default_factory=Weighting)
    coreset: Drawn | None = None
    weight_facts: Mapping[str, object] | None = None

    @property
    def parts(self) -> Iterable[Part]:
        """All parts of all tables."""
        return [part for table in self.tables.values() for part in table.parts]

    @property
    def sharded(self) -> list[Table]:
        """The tables whose shards need a second round."""
        return [t for t in self.tables.values() if t.update is not Update.LOCAL]


def table_reports(federation: Federation) -> list[TableReport]:
    """Return what the report says of every table, in the order of the query."""
    reports = []
    for name, table in federation.tables.items():
        trained = federation.fan_out[name]
        reports.append(
            TableReport(
                table=name,
                name=federation.names[name],
                rows=federation.source_rows[name],
                features=table.features,
                shards=len(table.parts),
                sites=tuple(part.site for part in table.parts),
                # a LEFT JOINed table may have no row to train on
                multiplicity_min=int(trained.min()) if len(trained) else 0,
                multiplicity_mean=float(trained.mean()) if len(trained) else 0.0,
                multiplicity_max=int(trained.max(initial=0)),
                dropped=federation.encoders[name].dropped,
            )
        )
    return reports
