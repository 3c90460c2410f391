"""What training would send, from what set-up has found."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from strategies.coreset_solvers import SolvedStrategy
from strategies.coresets.draw import measured_rows, sample_uniformly
from strategies.explain import cost
from strategies.explain.cost import (
    CoresetSize,
    RunCost,
    ShardSize,
    TableSize,
    Traffic,
    coreset_rounds,
)
from strategies.run.strategy import tests_every_epoch
from strategies.setup.joined_rows import JoinedRows
from strategies.setup.row_layout import TableLayout
from strategies.training.admm import AdmmStrategy
from strategies.training.base import JoinStrategy
from strategies.training.prepare import Preparation
from strategies.training.sgd import BatchStrategy
from tp_flower.coresets.importance import REGRESSION
from tp_flower.features.encoder import TableEncoder
from tp_flower.learning.models.local_model import build_model
from tp_flower.protocol import Action, Update
from tp_flower.reports.records import RoundReport, sum_by_table
from tp_flower.settings import Settings

OTHER_PHASES = frozenset(
    action.name.lower() for action in (Action.CHECK, Action.FINISH)
)
"""Rounds of explaining that are not those of set-up."""


@dataclass(frozen=True)
class Forecast:
    """Rounds and bytes of training on an joined problem.

    Attributes:
        joined: the joined rows.
        encoders: of every table.
        method: that is asked about.
        history: the rounds that set-up took so far.
    """

    joined: JoinedRows
    encoders: Mapping[str, TableEncoder]
    method: JoinStrategy
    history: Sequence[RoundReport]

    @property
    def settings(self) -> Settings:
        """Of the run that is asked about."""
        return self.method.settings

    def cost(self) -> RunCost:
        """Return the rounds and bytes of the run."""
        return RunCost(
            strategy=self.settings.strategy,
            epochs=self.settings.epochs,
            set_up=self._set_up(),
            epoch=self._epoch(is_last=False),
            last_epoch=self._epoch(is_last=True),
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
        if self.settings.coreset_rows:
            sample = sample_uniformly(trained, self.settings)
            trained = self.method.restrict(trained, sample)
        return self.method.training_rows(trained)

    @cached_property
    def _tables(self) -> list[TableSize]:
        """The tables as the strategy trains them."""
        tables = self._sizes(self._trained, self.method.choose_update)
        if not isinstance(self.method, BatchStrategy):
            return tables
        return [self._in_batches(table, self.method) for table in tables]

    def _in_batches(self, table: TableSize, method: BatchStrategy) -> TableSize:
        """Return a table with the rows of SGD's batches."""
        rows = self._trained.train.joined_rows
        size = method.batch_size(rows)
        counts = self._trained.train.tables[table.name].multiplicity
        layout = self._trained.layouts[table.name].rows
        shards = tuple(
            replace(
                shard,
                batch_rows=cost.expected_batch_rows(
                    counts[own.trained_slice], rows, size
                ),
            )
            for shard, own in zip(table.shards, layout, strict=True)
        )
        return replace(table, shards=shards)

    @property
    def _batches(self) -> int:
        """Batches of an epoch of SGD, ceil(N / B); 0 without."""
        if not isinstance(self.method, BatchStrategy):
            return 0
        rows = self._trained.train.joined_rows
        return -(-rows // self.method.batch_size(rows))

    def _epoch(self, *, is_last: bool) -> Traffic:
        settings = self.settings
        is_tested = tests_every_epoch(settings)
        if isinstance(self.method, SolvedStrategy):
            return cost.solved_epoch(self._tables, self.method.sends)
        if isinstance(self.method, AdmmStrategy):
            return cost.admm_epoch(
                self._tables, settings.inner_rounds, is_tested=is_tested or is_last
            )
        return cost.sgd_epoch(
            self._tables,
            self._batches,
            is_last=is_last,
            scores_all=bool(settings.tolerance),
            is_tested=is_tested,
            staleness=settings.staleness,
        )

    def _set_up(self) -> Traffic:
        """Return all that is sent outside of epochs.

        The rounds before ``prepare`` were taken, and are what training would take;
        ``prepare`` and the round that ends a run are predicted.
        """
        before = [item for item in self.history if item.phase not in OTHER_PHASES]
        taken = Traffic(
            len(before),
            sum_by_table(item.bytes_up for item in before),
            sum_by_table(item.bytes_down for item in before),
        )
        drawing = self._drawing() if self.method.is_measured else Traffic()
        prepare = cost.prepare_round(self._tables, self._batches)
        return taken + drawing + prepare + Traffic(rounds=1)

    def _drawing(self) -> Traffic:
        """Return what is sent to draw a coreset of all joined rows."""
        coreset = CoresetSize(
            size=self.settings.coreset_rows,
            joined_rows=self.joined.train.joined_rows,
            label_columns=max(len(self.joined.labels.classes), 1),
            has_moments=self.method.importance == REGRESSION,
            mass_bytes={
                name: sum(
                    array.nbytes
                    for arrays in measured_rows(own).values()
                    for field, array in arrays.items()
                    if field != "trained"
                )
                for name, own in self.joined.layouts.items()
            },
        )
        return coreset_rounds(self._sizes(self.joined, _one_way), coreset)

    def _sizes(
        self, trained: JoinedRows, choose_update: Callable[..., Update]
    ) -> list[TableSize]:
        """Return the tables, whose shards train together as is chosen."""
        problem = Preparation(
            trained, self.settings, self.encoders, trained.train_labels
        )
        return [
            self._size(problem, own, choose_update) for own in trained.layouts.values()
        ]

    def _size(
        self,
        problem: Preparation,
        own: TableLayout,
        choose_update: Callable[..., Update],
    ) -> TableSize:
        features = self.encoders[own.name].width
        spec = self.method.model_spec(problem, own.name)
        is_linear = spec.kind == "linear"
        return TableSize(
            name=own.name,
            shards=tuple(_shard_sizes(own)),
            update=choose_update(own.name, len(own.parts), is_linear=is_linear),
            outputs=spec.outputs,
            features=features,
            parameters=len(build_model(spec, features, "cpu").penalised),
            has_intercept=spec.intercept,
            is_linear=is_linear,
            is_repeated=own.is_repeated,
            is_weighted=own.masses is not None or self.method.is_measured,
        )


def _one_way(*_: object, **_named: object) -> Update:
    """Return how shards train together where that makes no difference."""
    return Update.LOCAL


def _shard_sizes(own: TableLayout) -> Iterable[ShardSize]:
    for rows, size in zip(own.rows, own.shard_rows, strict=True):
        yield ShardSize(
            rows=size,
            trained=rows.trained,
            tested=int(np.count_nonzero(rows.tested)),
            total=rows.total,
        )
