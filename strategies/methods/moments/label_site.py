"""The round in which the label's site reads the moments in place of the server.

The server computes blocks of words as ever, which have a pad of the label's site on
them, and relays what is sealed: the bits of columns to that site, the parameters of
models from it.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Final

import numpy as np

from strategies.methods.moments.join_counts import JoinCounts
from strategies.run.exchange import Part, Replies, Requests, ask
from strategies.run.replies import refuse
from strategies.training.traffic import TableSize
from tp_flower.arrays import AnyArray
from tp_flower.errors import QueryError
from tp_flower.methods.moments.exchange import Assembly
from tp_flower.methods.moments.messages import (
    PaddedBlocks,
    PaddedPart,
    PassMetrics,
    SolvedBlocks,
    SolvedPart,
    SolveRequest,
)
from tp_flower.methods.moments.penalties import Penalty
from tp_flower.methods.moments.reading.column_layout import ColumnLayout
from tp_flower.methods.moments.reading.label_site import checked_widths
from tp_flower.privacy.shard_seals import sealed_bytes

WORD: Final = 8  # bytes
Metrics = dict[str, float]
READ_BY_SITE: Final = (
    "one-time pads by join key (AES-256) that the sites of a join share, and one that "
    "the label's site has alone: the server reads nothing"
)


@dataclass(frozen=True)
class SiteSolution:
    """What the label's site has solved for, and has told of it.

    Attributes:
        sealed: the parameters of every table's model.
        metrics: of the model, by pass.
        constant: of the mean label, by pass.
        unit: the size of the labels, a power of two; 1 for classes.
        is_optimal: whether a lasso has come to its optimum.
    """

    sealed: Mapping[str, AnyArray]
    metrics: Mapping[int, Metrics]
    constant: Mapping[int, Metrics]
    penalty: Penalty
    unit: float
    is_optimal: bool

    def parts(self, parts: Mapping[str, tuple[Part, ...]]) -> dict[int, SolvedPart]:
        """Return what every part of the tables is sent."""
        return {
            part.number: SolvedPart(sealed=self.sealed[table])
            for table, shards in parts.items()
            for part in shards
        }


def check_reader(parts: Mapping[str, tuple[Part, ...]], label_table: str) -> None:
    """Refuse a label's table of several shards, none of which reads for all."""
    if len(parts[label_table]) > 1:
        raise QueryError(
            f"moments-to: the label's table, {label_table}, has shards at "
            f"{len(parts[label_table])} places, and one site reads the moments: set "
            "moments-to = 'server', or take the label from a table in one shard"
        )


def reader_traffic(
    counts: JoinCounts, tables: Sequence[TableSize], label_table: str
) -> tuple[float, float]:
    """Return the bytes up and down beside those of a run that the server solves.

    They are those of the blocks and of what is sealed: the bits of columns for the
    label's site, the parameters of models for all sites.
    """
    widths = counts.columns({table.name: table.features for table in tables})
    blocks = sum(
        (widths[first] + 1) * (widths[second] + 1)
        for first, second in combinations_with_replacement(counts.tree.tables, 2)
    )
    bits = sum(
        sealed_bytes(WORD * widths[table.name]) * len(table.shards)
        for table in tables
        if table.name != label_table
    )
    models = {table.name: sealed_bytes(WORD * table.parameters) for table in tables}
    down = WORD * blocks * len(counts.passes) + bits
    down += sum(models[table.name] * len(table.shards) for table in tables)
    return float(bits + sum(models.values())), float(down)


def let_site_solve(
    counts: JoinCounts, replies: Replies, layout: ColumnLayout
) -> Generator[Requests, Replies, SiteSolution]:
    """Bring the label's site the moments under its pads; return what it replies."""
    (reader,) = counts.joined.extracted.parts[layout.label_table]
    others = [part for part in counts.joined.parts if part.number != reader.number]
    body = PaddedBlocks(
        products=_padded_blocks(counts, replies, layout),
        sealed_bits={str(part.number): _sealed_bits(replies, part) for part in others},
    )
    answers = yield ask(SolveRequest(parts={reader.number: body}), [reader])
    return _solution_of(answers.body(reader, SolvedBlocks), counts, reader)


def _padded_blocks(
    counts: JoinCounts, replies: Replies, layout: ColumnLayout
) -> dict[str, AnyArray]:
    """Return the blocks of all passes, by pass and two tables."""
    tables = list(layout.columns)
    widths = checked_widths(layout.columns)
    blocks: dict[str, AnyArray] = {}
    for position, number in enumerate(counts.passes):
        contributions = {
            table: counts.read(table, replies, position, widths) for table in tables
        }
        assembly = Assembly(counts.tree, counts.of_pass(position), contributions)
        for (first, second), block in assembly.blocks().items():
            name = f"{number}-{tables.index(first)}-{tables.index(second)}"
            blocks[name] = block
    return blocks


def _sealed_bits(replies: Replies, part: Part) -> AnyArray:
    """Return the bits of a part's columns, sealed for the label's site."""
    sealed = replies.body(part, PaddedPart).sealed_bits
    if sealed is None:
        raise refuse(part, "no bits for the label's site")
    return sealed


def _solution_of(
    solved: SolvedBlocks, counts: JoinCounts, reader: Part
) -> SiteSolution:
    """Return what the label's site has replied, of all tables and passes."""
    tables = counts.tree.tables
    if sorted(solved.sealed) != sorted(map(str, range(len(tables)))):
        raise refuse(reader, "models of other tables than the query's")
    if sorted(solved.metrics) != sorted(map(str, counts.passes)):
        raise refuse(reader, "metrics of other rows than the run's")
    passes = {number: solved.metrics[str(number)] for number in counts.passes}
    return SiteSolution(
        sealed={name: solved.sealed[str(n)] for n, name in enumerate(tables)},
        metrics={n: _metrics(told.loss, told.r2) for n, told in passes.items()},
        constant={n: _of_constant(told) for n, told in passes.items()},
        penalty=Penalty(solved.l1, solved.l2),
        unit=2.0 ** (solved.magnitude or 0),
        is_optimal=solved.is_optimal,
    )


def _of_constant(told: PassMetrics) -> Metrics:
    return _metrics(told.constant_loss, told.constant_r2)


def _metrics(loss: float, r2: float | None) -> Metrics:
    """Return the metrics of a fit, of which the loss is half the mean square."""
    metrics = {"loss": loss, "rmse": float(np.sqrt(2.0 * loss))}
    return metrics if r2 is None else {**metrics, "r2": r2}
