"""The cost estimate of a run, from sizes that set-up knows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from strategies.coresets.draw import measured_rows, sample_uniformly
from strategies.setup.joined_rows import JoinedRows
from strategies.setup.row_layout import TableLayout
from strategies.training.base import JoinStrategy
from strategies.training.prepare import Preparation
from strategies.training.traffic import (
    ShardSize,
    TableSize,
    Tally,
    Traffic,
    prepare_round,
)
from tp_flower.coresets.importance import REGRESSION
from tp_flower.features.encoder import TableEncoder
from tp_flower.learning.models.local_model import build_model
from tp_flower.protocol.coreset_messages import (
    DrawnPart,
    MeasuredPart,
    MeasurePart,
    WeighedPart,
    WeighPart,
)
from tp_flower.protocol.training_messages import Update
from tp_flower.reports.records import RoundReport, sum_by_table

EXPLAIN_PHASES: Final = ("check", "finish")
"""Rounds of explaining that are not those of set-up."""


@dataclass(frozen=True)
class RunCost:
    """The messages of a training run; set-up has also those after the last epoch."""

    strategy: str
    epochs: int
    set_up: Traffic
    epoch: Traffic
    last_epoch: Traffic

    @property
    def run(self) -> Traffic:
        """The whole run, set-up included."""
        return self.set_up + self.epoch * (self.epochs - 1) + self.last_epoch


def expected_batch_rows(
    multiplicity: npt.NDArray[np.integer], joined_rows: int, batch_size: int
) -> float:
    """Return the distinct rows of a batch, summed over the batches, as expected.

    A row in G of N joined rows is missing from a batch of B with probability
    C(N - G, B) / C(N, B).

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


@dataclass(frozen=True)
class CostEstimate:
    """Rounds and bytes of training on the joined rows."""

    joined: JoinedRows
    encoders: Mapping[str, TableEncoder]
    method: JoinStrategy
    history: Sequence[RoundReport]

    def cost(self) -> RunCost:
        """Return the rounds and bytes of the run."""
        settings = self.method.settings
        epoch, last_epoch = (
            self.method.epoch_traffic(self._tables, self._batches, is_last=is_last)
            for is_last in (False, True)
        )
        return RunCost(
            settings.strategy, settings.epochs, self._set_up(), epoch, last_epoch
        )

    @property
    def updates(self) -> dict[str, Update]:
        """By table, how its shards are trained together."""
        return {size.name: size.update for size in self._tables}

    @cached_property
    def _trained(self) -> JoinedRows:
        """The joined rows that are trained on: repeated, or a sample.

        In place of a coreset stands a uniform sample of its size.
        """
        trained = self.joined
        if self.method.settings.coreset_rows:
            sample = sample_uniformly(trained, self.method.settings)
            trained = self.method.restrict(trained, sample)
        return self.method.training_rows(trained)

    @cached_property
    def _tables(self) -> list[TableSize]:
        """The tables as the method trains them."""
        return self._sizes(self._trained)

    @property
    def _batches(self) -> int:
        """Batches of an epoch of SGD, ceil(N / B); 0 without."""
        rows = self._trained.train.joined_rows
        size = self.method.batch_size(rows)
        return -(-rows // size) if size else 0

    def _set_up(self) -> Traffic:
        """Return all that is sent outside of epochs.

        The rounds before ``prepare`` were taken, and are what training would take;
        ``prepare`` and the round that ends a run are predicted.
        """
        before = [item for item in self.history if item.phase not in EXPLAIN_PHASES]
        taken = Traffic(
            len(before),
            sum_by_table(item.bytes_up for item in before),
            sum_by_table(item.bytes_down for item in before),
        )
        drawing = self._drawing() if self.method.is_measured else Traffic()
        prepare = prepare_round(self._tables, self._batches)
        return taken + drawing + prepare + Traffic(rounds=1)

    def _drawing(self) -> Traffic:
        """Return what drawing a coreset of all joined rows sends.

        Of m of N rows, drawn alike and with replacement, N (1 - (1 - 1/N)^m) differ.
        """
        size, rows = self.method.settings.coreset_rows, self.joined.train.joined_rows
        distinct = rows * (1.0 - (1.0 - 1.0 / rows) ** size)
        labels = max(len(self.joined.labels.classes), 1)
        tables = self._sizes(self.joined)
        widths = [
            table.features + (1 + labels if table.has_intercept else 0)
            for table in tables
        ]
        total = len(tables) + sum(widths)
        has_moments = self.method.importance == REGRESSION
        tally = Tally()
        for table, width in zip(tables, widths, strict=True):
            # the draws are of the table's shards together
            sizes = {
                "columns": width,
                "sample": distinct,
                "drawn": size * width / total,
            }
            tally.add("up", table, sizes, DrawnPart, "drawn")
            for shard in table.shards:
                of_shard = {**table.sizes(shard), **sizes}
                tally.add("down", table, of_shard, MeasurePart, "trained")
                if len(table.shards) > 1 and has_moments:
                    tally.add("up", table, of_shard, MeasuredPart, "gram")
                    tally.add("down", table, of_shard, MeasuredPart, "gram")
                tally.add("up", table, of_shard, WeighedPart, "masked")
                tally.add("down", table, of_shard, WeighPart, "rows")
        weights = {
            name: sum(
                array.nbytes
                for arrays in measured_rows(layout).values()
                for field, array in arrays.items()
                if field != "trained"
            )
            for name, layout in self.joined.layouts.items()
        }
        return tally.traffic(rounds=3) + Traffic(0, {}, weights)

    def _sizes(self, joined: JoinedRows) -> list[TableSize]:
        settings = self.method.settings
        problem = Preparation(joined, settings, self.encoders, joined.train_labels)
        return [self._size(problem, layout) for layout in joined.layouts.values()]

    def _size(self, problem: Preparation, layout: TableLayout) -> TableSize:
        name, features = layout.name, self.encoders[layout.name].width
        spec = self.method.model_spec(problem, name)
        is_linear = spec.kind == "linear"
        train = problem.joined.train
        counts = train.tables[name].multiplicity
        batch = self.method.batch_size(train.joined_rows)
        shards = [
            ShardSize(
                rows=size,
                trained=rows.trained,
                tested=int(np.count_nonzero(rows.tested)),
                total=rows.total,
                batch_rows=expected_batch_rows(
                    counts[rows.trained_slice], train.joined_rows, batch
                )
                if batch
                else 0.0,
            )
            for rows, size in zip(layout.rows, layout.shard_rows, strict=True)
        ]
        return TableSize(
            name=name,
            shards=tuple(shards),
            update=self.method.choose_update(
                name, len(layout.parts), is_linear=is_linear
            ),
            outputs=spec.outputs,
            features=features,
            parameters=len(build_model(spec, features, "cpu").penalised),
            has_intercept=spec.intercept,
            is_linear=is_linear,
            is_repeated=layout.is_repeated,
            is_weighted=layout.masses is not None or self.method.is_measured,
        )
