"""What each way of training would cost, from what set-up has found."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from strategies import admm, sgd
from strategies.alignment import Alignment
from strategies.audience import is_measured, sent_of_rows
from strategies.batch_sizes import choose_batch_size
from strategies.compact import TableLayout
from strategies.coreset import measured_rows, sampled_uniformly
from strategies.epochs import tests_every_epoch
from strategies.expanded import expand
from strategies.sampled import sampled
from strategies.setup import Problem, UpdateChooser
from tp_flower.encoding.encoder import TableEncoder
from tp_flower.errors import SettingsError
from tp_flower.explain import cost, server_memory, solved
from tp_flower.explain.coreset_cost import CoresetSize, coreset_rounds
from tp_flower.explain.cost import ShardSize, TableSize, Traffic
from tp_flower.explain.explanation import StrategyCost
from tp_flower.learning.models import build_model
from tp_flower.methods import ADMM, CORESET, METHODS, SGD
from tp_flower.protocol import Action, Update
from tp_flower.report import RoundReport, sum_by_table
from tp_flower.settings import Settings

OTHER_PHASES = frozenset(
    action.name.lower() for action in (Action.CHECK, Action.FINISH)
)
"""Rounds of explaining that are not those of set-up."""

OWN = ("admm", "sgd")
"""Strategies that are not there for comparison only."""

COMPARED = tuple(
    name
    for name, method in METHODS.items()
    if name not in OWN and method.family != CORESET
)

LOU = ("auto", "consensus")
"""What ADMM may do for shards."""


@dataclass(frozen=True)
class Forecast:
    """Costs of training on an aligned problem.

    Attributes:
        aligned: the joined rows.
        encoders: of every table.
        settings: of the run that is asked about.
        history: the rounds that set-up took so far.
        trained: the joined rows as a strategy trains on them: repeated, or a sample. In
            place of a coreset stands a uniform sample of its size.
    """

    aligned: Alignment
    encoders: Mapping[str, TableEncoder]
    settings: Settings
    history: Sequence[RoundReport]
    trained: Alignment | None = None

    def strategies(self) -> list[StrategyCost]:
        """Return what every way costs that the settings and the shards leave open."""
        if self.settings.family == CORESET:
            # others train on all rows, or on labels
            return [own for own in [self._way(self.settings.strategy)] if own]
        costs = [
            *self._ways_of_admm(),
            self._way("sgd"),
            *(self._unsplit(name) for name in OWN),
            *(self._way(name) for name in COMPARED),
        ]
        return [cost for cost in costs if cost is not None]

    def _as(self, name: str) -> "Forecast | None":
        """Return the forecast of another strategy; None if the settings rule it out."""
        size = 0 if METHODS[name].is_full_batch else self.settings.batch_size
        try:
            settings = self.settings.with_fields(strategy=name, batch_size=size)
        except SettingsError:
            return None
        trained = self.aligned
        if settings.coreset_rows:
            trained = sampled(trained, sampled_uniformly(trained, settings).sample)
        if settings.method.is_expanded:
            trained = expand(trained)
        return replace(self, settings=settings, trained=trained)

    @property
    def _trained(self) -> Alignment:
        return self.trained or self.aligned

    def _ways_of_admm(self) -> Iterable[StrategyCost]:
        """Yield what ADMM costs by what is done for shards."""
        own = self._as("admm")
        if own is None:
            return
        chosen = own.own_sizes()
        ways = [own.sizes(partial(admm.choose_update, lou)) for lou in LOU]
        if self.settings.privacy.covers_features or ways[0] == ways[1]:
            # a mechanism goes with one of them
            ways = [chosen]
        for sizes in ways:
            name = f"admm, {_lou_name(sizes)}" if _is_sharded(chosen) else "admm"
            is_chosen = sizes == chosen and self.settings.strategy == "admm"
            yield own.cost_of(name, sizes, is_chosen=is_chosen)

    def _way(self, name: str) -> StrategyCost | None:
        """Return what a strategy costs as it is set."""
        own = self._as(name)
        if own is None:
            return None
        is_chosen = self.settings.strategy == name
        return own.cost_of(name, own.own_sizes(), is_chosen=is_chosen)

    def _unsplit(self, name: str) -> StrategyCost | None:
        """Return what a strategy would cost if every table were one shard."""
        own = self._as(name)
        if own is None or not _is_sharded(sizes := own.own_sizes()):
            return None
        one = [table.in_one_shard() for table in sizes]
        return own.cost_of(f"{name}, unsplit", one, is_chosen=False)

    @property
    def updates(self) -> dict[str, Update]:
        """By table, how its shards are trained together as it is set."""
        return {size.name: size.update for size in self.own_sizes()}

    def own_sizes(self) -> list[TableSize]:
        """Return the tables as the run's strategy trains them."""
        if self.settings.family == ADMM:
            return self.sizes(admm.choose_update_for(self.settings))
        if self.settings.family == CORESET:
            return self.sizes(lambda *_: Update.GIVEN)
        return self._sgd_sizes()

    def cost_of(
        self, name: str, tables: Sequence[TableSize], *, is_chosen: bool
    ) -> StrategyCost:
        """Return what the run's strategy costs over tables, under a name."""
        ways = {ADMM: self._admm, SGD: self._sgd, CORESET: self._solved}
        return ways[self.settings.family](name, tables, is_chosen=is_chosen)

    def _sgd_sizes(self) -> list[TableSize]:
        """Return the tables as SGD trains them, with the rows of its batches."""
        rows = self._trained.train.joined_rows
        size = choose_batch_size(self.settings, rows)

        def in_batches(table: TableSize) -> TableSize:
            counts = self._multiplicity(table.name)
            shards = tuple(
                replace(shard, batch_rows=cost.expected_batch_rows(own, rows, size))
                for shard, own in zip(table.shards, counts, strict=True)
            )
            return replace(table, shards=shards)

        return [in_batches(table) for table in self.sizes(sgd.choose_update)]

    @property
    def batches(self) -> int:
        """Batches of an epoch of SGD, ceil(N / B)."""
        rows = self._trained.train.joined_rows
        return -(-rows // choose_batch_size(self.settings, rows))

    def set_up(self, tables: Sequence[TableSize], batches: int = 0) -> Traffic:
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
        drawing = self._drawing() if is_measured(self.settings) else Traffic()
        return taken + drawing + cost.prepare_round(tables, batches) + Traffic(rounds=1)

    def _drawing(self) -> Traffic:
        """Return what is sent to draw a coreset of all joined rows."""
        whole = replace(self, trained=None)
        coreset = CoresetSize(
            size=self.settings.coreset_rows,
            joined_rows=self.aligned.train.joined_rows,
            label_columns=max(len(self.aligned.labels.classes), 1),
            has_moments=not self.settings.method.is_clustering,
            mass_bytes={
                name: sum(
                    told["masses"].nbytes
                    for told in measured_rows(own).values()
                    if "masses" in told
                )
                for name, own in self.aligned.compact.items()
            },
        )
        return coreset_rounds(whole.sizes(_one_way), coreset)

    def _admm(
        self, name: str, tables: Sequence[TableSize], *, is_chosen: bool
    ) -> StrategyCost:
        settings = self.settings
        is_exact = all(
            table.is_linear and table.update is not Update.CONSENSUS for table in tables
        )
        return StrategyCost(
            name=name,
            is_chosen=is_chosen,
            set_up=self.set_up(tables),
            epoch=cost.admm_epoch(
                tables, settings.inner_rounds, is_tested=tests_every_epoch(settings)
            ),
            last_epoch=cost.admm_epoch(tables, settings.inner_rounds),
            epochs=settings.epochs,
            server_bytes=server_memory.admm_bytes(
                tables, *self._rows(), settings.anderson_memory if is_exact else 0
            ),
        )

    def _sgd(
        self, name: str, tables: Sequence[TableSize], *, is_chosen: bool
    ) -> StrategyCost:
        settings = self.settings
        sgd_epoch = partial(
            cost.sgd_epoch,
            tables,
            self.batches,
            scores_all=bool(settings.tolerance),
            is_tested=tests_every_epoch(settings),
            staleness=settings.staleness,
        )
        return StrategyCost(
            name=name,
            is_chosen=is_chosen,
            set_up=self.set_up(tables, self.batches),
            epoch=sgd_epoch(),
            last_epoch=sgd_epoch(is_last=True),
            epochs=settings.epochs,
            server_bytes=server_memory.sgd_bytes(tables, *self._rows()),
        )

    def _solved(
        self, name: str, tables: Sequence[TableSize], *, is_chosen: bool
    ) -> StrategyCost:
        epoch = solved.solved_epoch(tables, sent_of_rows(self.settings))
        return StrategyCost(
            name=name,
            is_chosen=is_chosen,
            set_up=self.set_up(tables),
            epoch=epoch,
            last_epoch=epoch,
            epochs=self.settings.epochs,
            server_bytes=solved.solved_bytes(tables, *self._rows()),
        )

    def _rows(self) -> tuple[int, int]:
        return self._trained.train.joined_rows, len(self._trained.test_labels)

    def _multiplicity(self, table: str) -> list[npt.NDArray[np.int64]]:
        """Return by part the joined rows of each row that is trained on."""
        counts = self._trained.train.tables[table].multiplicity
        return [counts[own.trained_slice] for own in self._trained.compact[table].rows]

    def sizes(self, choose_update: UpdateChooser) -> list[TableSize]:
        """Return the tables, whose shards train together as is chosen."""
        return [
            self._size(table, choose_update) for table in self._trained.compact.values()
        ]

    @property
    def _problem(self) -> Problem:
        labels = self._trained.train_labels
        return Problem(self._trained, self.settings, self.encoders, labels)

    def _size(self, own: TableLayout, choose_update: UpdateChooser) -> TableSize:
        features = self.encoders[own.name].width
        spec = self._problem.spec(own.name)
        is_linear = spec.kind == "linear"
        return TableSize(
            name=own.name,
            shards=tuple(_shard_sizes(own)),
            update=choose_update(own.name, len(own.parts), is_linear),
            outputs=spec.outputs,
            features=features,
            parameters=len(build_model(spec, features, "cpu").penalised),
            has_intercept=spec.intercept,
            is_linear=is_linear,
            is_expanded=self.settings.method.is_expanded,
            is_weighted=own.masses is not None or is_measured(self.settings),
        )


def _one_way(*_: object) -> Update:
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


def _is_sharded(tables: Sequence[TableSize]) -> bool:
    return any(len(table.shards) > 1 for table in tables)


def _lou_name(tables: Sequence[TableSize]) -> str:
    """Name the setting ``lou`` by what it does to these tables."""
    used = {table.update for table in tables} - {Update.LOCAL}
    return str(*used) if len(used) == 1 else "auto"
