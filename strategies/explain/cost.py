"""What training will send: rounds and array bytes, from sizes that set-up knows.

Which messages an epoch takes, and which of their fields they carry, is said here; how
large a field is follows from its declaration (:mod:`tp_flower.protocol`). What is
counted is what a report counts as ``bytes-up`` and ``bytes-down`` (headers,
layouts and padding are ``overhead-bytes`` there, and nothing here).

The communication of Table 6 (paper, section 5) with its constants, per table, epoch and
both ways; without held-out rows, and with every table in one shard::

    method     the paper   here            rounds   told once, at set-up
    VFL-ADMM   O(N)        8 N d_c         1        4 N
    VFL-SGD    O(N)        8 N d_c         N/B      4 N + 4 (N/B + 1 + N)
    TP-ADMM    O(n)        8 n d_c         1        r/4 + 4 n
    TP-SGD     O(alpha)    8 alpha d_c     N/B      r/4 + 4 n + 4 (N/B + 1 + alpha)
    GD                     8 n d_c         1        r/4 + 4 n + 4 (2 + n)

alpha are the distinct rows of every batch, n <= alpha <= N; r the rows of the table.
For held-out rows, ADMM sends 4 d_c more for each that is not trained on, and SGD 4 d_c
for each. A table in Q shards adds 8 Q (d [+ 1]) d_c up and 8 Q p down (ADMM,
statistics), 8 Q p each way and inner round (ADMM, consensus), or 8 Q p each way and
batch (SGD): the paper's O(T' Q) and O(Q N/B). Joined rows of a LEFT JOIN without a row
of the table are none of its N. So VFL-ADMM sends M (2 N + N') / sum_i (n_i + m_i) times
the bytes of ADMM, with N' held-out joined rows and tables in one shard.

Notation:
    n, m    ``trained`` rows and rows that take part, of one shard    k  batch rows
    d_c     ``outputs``     d  ``features``     p  ``parameters``
    N, B    joined training rows and rows of a batch     G  multiplicity of a row
    M, Q    tables, and shards of one
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from tp_flower.privacy.plan import SAMPLED_ROWS
from tp_flower.protocol import (
    AdmmTarget,
    AdmmUpdate,
    BatchMessages,
    BatchUpdate,
    CommonParameters,
    ConsensusUpdate,
    DrawnPart,
    MeasuredPart,
    MeasurePart,
    PreparedPart,
    PreparePart,
    SampledRows,
    Update,
    WeighedPart,
    WeighPart,
    field_bytes,
)


@dataclass(frozen=True)
class ShardSize:
    """The rows of one shard.

    Attributes:
        rows: after the fragment's filters.
        trained: rows in at least one joined training row.
        tested: rows in at least one held-out joined row.
        total: rows that take part, trained or tested.
        batch_rows: distinct rows of a batch, summed over the batches of an epoch; 0
            without batches.
    """

    rows: int
    trained: int
    tested: int
    total: int
    batch_rows: float = 0.0


@dataclass(frozen=True)
class TableSize:
    """One table of the training problem.

    Attributes:
        name: alias in the query.
        shards: the rows of each.
        update: how its shards train together.
        outputs: d_c.
        features: d, after encoding.
        parameters: p.
        has_intercept: whether its model has the output intercept.
        is_linear: whether its model is linear.
        is_repeated: whether it has a row for each joined row (VFL).
        is_weighted: whether joined rows weigh other than alike.
    """

    name: str
    shards: tuple[ShardSize, ...]
    update: Update
    outputs: int
    features: int
    parameters: int
    has_intercept: bool
    is_linear: bool
    is_repeated: bool = False
    is_weighted: bool = False

    def sizes(self, shard: ShardSize) -> dict[str, float]:
        """Return the sizes that the shapes of messages name, of one shard."""
        return {
            "rows": shard.rows,
            "trained": shard.trained,
            "tested": shard.total - shard.trained if self.is_repeated else shard.tested,
            "total": shard.total,
            "outputs": self.outputs,
            "features": self.features,
            "parameters": self.parameters,
            "width": self.features + self.has_intercept,
        }

    @property
    def trained(self) -> int:
        """Rows that are trained on."""
        return sum(shard.trained for shard in self.shards)

    @property
    def tested(self) -> int:
        """Rows in held-out joined rows."""
        return sum(shard.tested for shard in self.shards)

    @property
    def total(self) -> int:
        """Rows that take part."""
        return sum(shard.total for shard in self.shards)

    @property
    def batch_rows(self) -> float:
        """Distinct rows of a batch, summed over the batches."""
        return sum(shard.batch_rows for shard in self.shards)


@dataclass(frozen=True)
class Traffic:
    """What some rounds send.

    Attributes:
        rounds: how many.
        up: bytes from the sites to the server, by table.
        down: bytes from the server to the sites, by table.
    """

    rounds: int = 0
    up: Mapping[str, float] = field(default_factory=dict)
    down: Mapping[str, float] = field(default_factory=dict)

    @property
    def bytes_up(self) -> float:
        """Bytes to the server, of all tables."""
        return sum(self.up.values())

    @property
    def bytes_down(self) -> float:
        """Bytes to the sites, of all tables."""
        return sum(self.down.values())

    def __add__(self, other: "Traffic") -> "Traffic":
        """Return one after the other."""
        return Traffic(
            self.rounds + other.rounds,
            _sum(self.up, other.up),
            _sum(self.down, other.down),
        )

    def __mul__(self, times: int) -> "Traffic":
        """Return the same several times."""
        return Traffic(
            self.rounds * times,
            {name: count * times for name, count in self.up.items()},
            {name: count * times for name, count in self.down.items()},
        )


@dataclass(frozen=True)
class RunCost:
    """The messages of a training run.

    Attributes:
        strategy: of the run.
        epochs: of the run.
        set_up: before the first epoch and after the last.
        epoch: one epoch.
        last_epoch: the last one.
    """

    strategy: str
    epochs: int
    set_up: Traffic
    epoch: Traffic
    last_epoch: Traffic

    @property
    def run(self) -> Traffic:
        """The whole run, set-up included."""
        return self.set_up + self.epoch * (self.epochs - 1) + self.last_epoch


def admm_epoch(
    tables: Sequence[TableSize], inner_rounds: int = 1, *, is_tested: bool = True
) -> Traffic:
    """Return what one epoch of ADMM sends.

    Targets go down, 4 n d_c. Scores come up, 4 m d_c, or 4 n d_c where held-out rows
    are not scored: at once from a table in one shard, and after one round more from a
    sharded one. Its shards first send moments, 8
    (d [+ 1]) d_c, or in every inner round a proposal, 8 p; parameters come down, 8 p.
    """
    up: defaultdict[str, float] = defaultdict(float)
    down: defaultdict[str, float] = defaultdict(float)
    rounds = 1
    for table in tables:
        for shard in table.shards:
            sizes = table.sizes(shard)
            sizes["scored"] = shard.total if is_tested else shard.trained
            down[table.name] += field_bytes(AdmmTarget, "target", sizes)
            up[table.name] += field_bytes(AdmmUpdate, "scores", sizes)
            parameters = field_bytes(CommonParameters, "parameters", sizes)
            if table.update is Update.GRAM:
                up[table.name] += field_bytes(AdmmUpdate, "moments", sizes)
                down[table.name] += parameters
                rounds = max(rounds, 2)
            elif table.update is Update.CONSENSUS:
                proposal = field_bytes(AdmmUpdate, "proposal", sizes)
                up[table.name] += inner_rounds * proposal
                down[table.name] += inner_rounds * parameters
                rounds = 1 + inner_rounds
    return Traffic(rounds, up, down)


def sgd_epoch(
    tables: Sequence[TableSize],
    batches: int,
    *,
    is_last: bool = False,
    scores_all: bool = False,
    is_tested: bool = True,
    staleness: int = 0,
) -> Traffic:
    """Return what one epoch of SGD sends.

    Per batch Y goes down and the scores of the next batch come up, 4 k d_c each; with
    several shards also a gradient up and the mean of all down, 8 p each, in a round of
    its own, or with the next batch. Scores of held-out rows ride along with the last
    batch.

    Args:
        tables: of the training problem.
        batches: per epoch.
        is_last: of the run: no batch follows, and all rows are scored.
        scores_all: whether every epoch scores all rows (a tolerance is set).
        is_tested: whether every epoch scores held-out rows, not the last one alone.
        staleness: 1 where the mean gradient goes down with the next batch.
    """
    up: defaultdict[str, float] = defaultdict(float)
    down: defaultdict[str, float] = defaultdict(float)
    sent = batches - 1 if is_last else batches
    for table in tables:
        for shard in table.shards:
            tested = shard.tested if is_tested else 0
            scored = shard.total if is_last or scores_all else tested
            sizes = table.sizes(shard)
            sizes |= {"batch_rows": shard.batch_rows, "total": scored}
            sizes["next_rows"] = shard.batch_rows * sent / batches
            down[table.name] += field_bytes(BatchMessages, "messages", sizes)
            up[table.name] += field_bytes(BatchUpdate, "batch_scores", sizes)
            up[table.name] += field_bytes(BatchUpdate, "scores", sizes)
            if table.update is Update.SUM:
                gradient = field_bytes(BatchUpdate, "gradient", sizes)
                up[table.name] += batches * gradient
                down[table.name] += batches * gradient
    is_sharded = any(table.update is Update.SUM for table in tables)
    own_rounds = (1 if staleness else batches) if is_sharded else 0
    return Traffic(batches + own_rounds, up, down)


def prepare_round(tables: Sequence[TableSize], batches: int = 0) -> Traffic:
    """Return what the last round of set-up sends.

    Which rows are trained and tested goes down as a bit each, and G as 4 n; in VFL the
    list of rows instead, 4 m, and weights if there are any, 4 n. With ``batches`` the
    batch plan follows, 4 (batches + 1 + k). Up comes which parameters are penalised, a
    byte each; the Gram matrix where it is summed; and the first scores of models that
    are not linear.
    """
    up: defaultdict[str, float] = defaultdict(float)
    down: defaultdict[str, float] = defaultdict(float)
    for table in tables:
        for shard in table.shards:
            sizes = table.sizes(shard)
            sizes |= {"batches+1": batches + 1, "batch_rows": shard.batch_rows}
            fields = list(_row_fields(table))
            if batches:
                fields += ["batch_start", "batch_rows"]
            for name in fields:
                down[table.name] += field_bytes(PreparePart, name, sizes)
            up[table.name] += field_bytes(PreparedPart, "penalised", sizes)
            if table.update is Update.GRAM:
                up[table.name] += field_bytes(PreparedPart, "gram", sizes)
            if not (table.is_linear or table.update is Update.GIVEN):
                up[table.name] += field_bytes(PreparedPart, "scores", sizes)
    return Traffic(1, up, down)


def _row_fields(table: TableSize) -> tuple[str, ...]:
    """Return the fields that tell a site which of its rows take part."""
    if not table.is_repeated:
        return ("trained", "tested", "multiplicity")
    lists = ("expanded_trained", "expanded_tested")
    return (*lists, "masses") if table.is_weighted else lists


def expected_batch_rows(
    multiplicity: npt.NDArray[np.integer], joined_rows: int, batch_size: int
) -> float:
    """Return the distinct rows of a batch, summed over the batches, as expected.

    A row in G of N joined rows is missing from a batch of B with probability
    C(N - G, B) / C(N, B).

    Args:
        multiplicity: G of the rows, (n,).
        joined_rows: N.
        batch_size: B, at most N.

    >>> expected_batch_rows(np.array([1, 1, 4]), joined_rows=4, batch_size=2)
    4.0
    """
    distinct, counts = np.unique(multiplicity, return_counts=True)
    full, rest = divmod(joined_rows, batch_size)
    total = 0.0
    for size, batches in ((batch_size, full), (rest, min(rest, 1))):
        absent = np.exp(
            _log_choose(joined_rows - distinct, size)
            - _log_choose(np.full(len(distinct), joined_rows), size)
        )
        total += batches * float(counts @ (1.0 - absent))
    return round(total, 6)


def _log_choose(total: npt.NDArray[np.integer], chosen: int) -> npt.NDArray[np.float64]:
    """Return log C(total, chosen); -inf where ``chosen`` is more than ``total``."""
    left = total - chosen
    # gammaln is infinite at 0, -1, ..: there is no way to choose
    logs: npt.NDArray[np.float64] = (
        gammaln(total + 1.0)
        - gammaln(chosen + 1.0)
        - gammaln(np.maximum(left, -1) + 1.0)
    )
    return logs


def _sum(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    names: Iterable[str] = dict.fromkeys([*one, *other])
    return {name: one.get(name, 0) + other.get(name, 0) for name in names}


@dataclass(frozen=True)
class CoresetSize:
    """A coreset before it is drawn.

    Attributes:
        size: m, rows that are drawn.
        joined_rows: N, of which they are drawn.
        label_columns: of the label in the scores of its table.
        has_moments: whether shards send second moments, not what their clusters cost.
        mass_bytes: by table, of what the joined rows of its trained rows weigh.
    """

    size: int
    joined_rows: int
    label_columns: int
    has_moments: bool
    mass_bytes: Mapping[str, int]

    @property
    def distinct(self) -> float:
        """Of m of N rows, drawn alike and with replacement: N (1 - (1 - 1/N)^m)."""
        absent: float = (1.0 - 1.0 / self.joined_rows) ** self.size
        return self.joined_rows * (1.0 - absent)

    def columns(self, table: TableSize) -> int:
        """Return the columns that a table's scores are of, p."""
        own = 1 + self.label_columns if table.has_intercept else 0
        return table.features + own


def coreset_rounds(tables: Sequence[TableSize], coreset: CoresetSize) -> Traffic:
    """Return what the rounds send.

    Args:
        tables: of the training problem, with all joined rows.
        coreset: that is to be drawn.
    """
    up: defaultdict[str, float] = defaultdict(float)
    down: defaultdict[str, float] = defaultdict(float)
    total = len(tables) + sum(map(coreset.columns, tables))
    for table in tables:
        columns = coreset.columns(table)
        sizes = {"columns": columns, "sample": coreset.distinct}
        # of the table's shards together
        sizes["drawn"] = coreset.size * columns / total
        down[table.name] += coreset.mass_bytes[table.name]
        up[table.name] += field_bytes(DrawnPart, "drawn", sizes)
        for shard in table.shards:
            of_shard = {**table.sizes(shard), **sizes}
            down[table.name] += field_bytes(MeasurePart, "trained", of_shard)
            if len(table.shards) > 1 and coreset.has_moments:
                moments = field_bytes(MeasuredPart, "gram", of_shard)
                up[table.name] += moments
                down[table.name] += moments
            up[table.name] += field_bytes(WeighedPart, "masked", of_shard)
            down[table.name] += field_bytes(WeighPart, "rows", of_shard)
    return Traffic(3, up, down)


def solved_epoch(tables: Sequence[TableSize], sends: str) -> Traffic:
    """Return what solving sends.

    Args:
        tables: of the training problem.
        sends: "rows", or "centres" of local clusters.
    """
    up: defaultdict[str, float] = defaultdict(float)
    down: defaultdict[str, float] = defaultdict(float)
    for table in tables:
        for shard in table.shards:
            # a centre per output; of a shard with fewer rows there are fewer
            sizes = {**table.sizes(shard), "clusters": table.outputs}
            sizes["scored"] = shard.total
            fields = ("rows",) if sends == SAMPLED_ROWS else ("centres", "nearest")
            for name in fields:
                up[table.name] += field_bytes(SampledRows, name, sizes)
            up[table.name] += field_bytes(ConsensusUpdate, "scores", sizes)
            down[table.name] += field_bytes(CommonParameters, "parameters", sizes)
    return Traffic(2, up, down)
