"""Explain: take the set-up of a run, and say what training would do, without training.

The rounds are those of set-up up to the encoders, so that the explanation describes
what would really happen; then the sites confirm the mapping
(:mod:`strategies.setup.cross_check`) and forget the run.

Schema of the `report.json` that `mode = "explain"` writes (`schema` 1; counts are whole
numbers, predicted bytes are rounded)::

    schema, mode ("explain"), status, started, seconds, output-dir, query (SQL)
    settings {run-config key: value}
    tables   [{table, names: [..], sites: [..], rows: [per shard], work: [text],
               features, dropped: [..], unused-rows,
               multiplicity: {min, median, mean, max}}]
    joins    [{on, left, right, is-outer, checked-keys,
               left-rows, left-null, left-unmatched, right-rows, ..}]
    join-steps  as in a report of training
    joined-rows {train, test}, loss
    row-weight  {column, entity, min, max, effective-rows, left-out}, null without
             weights: as in `chosen` of a report of training
    saving   {joined-rows, rows-held, joined-values, values-held}
    cost     {strategy, epochs, set-up: sent, epoch: sent, run: sent}
               where sent = {rounds, bytes-up: {table: n}, bytes-down: {table: n}}
    releases [{message, to, carries, protection}]
    history  the rounds that `explain` itself took, as in a report of training

Multiplicity covers all rows after the filters, even those in no joined row, and
training and held-out rows together. ``unmatched`` rows of a join have a key that the
other table lacks, or no key, which ``null`` counts separately.
"""

import operator
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from strategies.coresets.draw import measured_rows, sample_uniformly
from strategies.disclosures import Disclosure, disclosures
from strategies.run.exchange import Replies, Requests, ask
from strategies.run.strategy import RoundStrategy
from strategies.setup.cross_check import check_alignment
from strategies.setup.encoding import TableEncoding, fit_encoders
from strategies.setup.extract import describe_places, describe_work
from strategies.setup.joined_rows import JoinedRows, TableLayout
from strategies.setup.masking import ScoreMasking
from strategies.training.base import JoinStrategy
from strategies.training.prepare import Preparation
from strategies.training.traffic import (
    ShardSize,
    TableSize,
    Tally,
    Traffic,
    finish_round,
    prepare_round,
)
from tp_flower.coresets.importance import REGRESSION
from tp_flower.joins.joining import join_codes
from tp_flower.learning.models.local_model import build_model
from tp_flower.protocol.coreset_messages import (
    DrawnPart,
    MeasuredPart,
    MeasurePart,
    WeighedPart,
    WeighPart,
)
from tp_flower.protocol.inference_messages import FinishRequest
from tp_flower.protocol.setup_messages import EncodedColumns
from tp_flower.protocol.training_messages import Update
from tp_flower.query import Join
from tp_flower.randomness import Stream, generator
from tp_flower.reports.records import RoundReport, RunRecord, plain, sum_by_table
from tp_flower.settings.run import EXPLAIN

EXPLAIN_PHASES: Final = ("check", "finish")
"""Rounds that explaining takes in addition to those of set-up."""


@dataclass(frozen=True)
class RunCost:
    """The traffic of a training run; set-up includes the rounds after the epochs."""

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
    """Return the expected number of distinct rows per batch, summed over the batches.

    A row that is in G of N joined rows is missing from a batch of B with probability
    C(N - G, B) / C(N, B).

    >>> expected_batch_rows(np.array([1, 1, 4]), joined_rows=4, batch_size=2)
    4.0
    """
    distinct, counts = np.unique(multiplicity, return_counts=True)
    full, last_rows = divmod(joined_rows, batch_size)
    total = 0.0
    for size, batches in ((batch_size, full), (last_rows, min(last_rows, 1))):
        absent = np.exp(
            _log_choose(joined_rows - distinct, size)
            - _log_choose(np.full(len(distinct), joined_rows), size)
        )
        total += batches * float(counts @ (1.0 - absent))
    return round(total, 6)


def _log_choose(total: npt.NDArray[np.integer], chosen: int) -> npt.NDArray[np.float64]:
    """Return log C(total, chosen); -inf where ``chosen`` is more than ``total``."""
    remaining = total - chosen
    # gammaln is infinite at 0, -1, ..: there is no way to choose
    logs: npt.NDArray[np.float64] = (
        gammaln(total + 1.0)
        - gammaln(chosen + 1.0)
        - gammaln(np.maximum(remaining, -1) + 1.0)
    )
    return logs


@dataclass(frozen=True)
class CostEstimate:
    """Rounds and bytes of training on the joined rows."""

    joined: JoinedRows
    encoders: Mapping[str, TableEncoding]
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
        """The joined rows to train on: all of them, repeated rows (VFL), or a sample.

        A uniform sample stands in for a coreset of the same size.
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
        """Batches of an epoch of SGD, ceil(N / B); 0 without batches."""
        rows = self._trained.train.joined_rows
        size = self.method.batch_size(rows)
        return -(-rows // size) if size else 0

    def _set_up(self) -> Traffic:
        """Return the traffic outside of epochs.

        The rounds before ``prepare`` have taken place, and training would take the
        same; ``prepare`` and the final round are predicted.
        """
        rounds = [item for item in self.history if item.phase not in EXPLAIN_PHASES]
        traffic = Traffic(
            len(rounds),
            sum_by_table(item.bytes_up for item in rounds),
            sum_by_table(item.bytes_down for item in rounds),
        )
        drawing = self._drawing() if self.method.is_measured else Traffic()
        masking = self._masking
        is_masked = masking.point is not None
        prepare = prepare_round(self._tables, self._batches, is_masked=is_masked)
        finish = finish_round(self._tables)
        return traffic + drawing + prepare + self._passed_on(masking) + finish

    @property
    def _masking(self) -> ScoreMasking:
        settings, labels = self.method.settings, self._trained.train_labels
        preparation = Preparation(self._trained, settings, self.encoders, labels)
        return preparation.masking()

    def _passed_on(self, masking: ScoreMasking | None) -> Traffic:
        """Return the bytes of sealed encoders, and of rows without a partner."""
        down: dict[str, float] = {}
        for part in self.joined.parts:
            arrays = {} if masking is None else masking.unmatched_at(part.number)
            sent = sum(array.nbytes for array in arrays.values())
            if (sealed := self.encoders[part.table].sealed) is not None:
                sent += sealed.nbytes * (1 + self.method.is_measured)
            down[part.table] = down.get(part.table, 0) + sent
        return Traffic(0, {}, down)

    def _drawing(self) -> Traffic:
        """Return the traffic of drawing a coreset from all joined rows.

        m uniform draws with replacement from N rows hit N (1 - (1 - 1/N)^m) of them.
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
            # the shards of a table share its draws
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
        name, features = layout.name, self.encoders[layout.name].columns.width
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


@dataclass(frozen=True)
class TableExplanation:
    """One table of the query, and what its sites will do; see the schema above.

    ``names`` are those at the sites, one per SELECT of a UNION ALL; ``work`` describes
    the fragments in words; ``unused_rows`` are in no joined row.
    """

    table: str
    names: tuple[str, ...]
    sites: tuple[str, ...]
    rows: tuple[int, ...]
    work: tuple[str, ...]
    features: int
    dropped: tuple[str, ...]
    unused_rows: int
    multiplicity: Mapping[str, float]


@dataclass(frozen=True)
class JoinExplanation:
    """One join between two tables, considered on its own.

    ``is_outer`` if one of them is LEFT JOINed. The sites of both sides agreed on the
    digests of the checked keys. Unmatched rows have a key unknown to the other side, or
    NULL.
    """

    on: str
    is_outer: bool
    checked_keys: int
    left: str
    left_rows: int
    left_null: int
    left_unmatched: int
    right: str
    right_rows: int
    right_null: int
    right_unmatched: int


@dataclass(frozen=True, kw_only=True)
class Explanation(RunRecord):
    """An explanation, with the fields of its `report.json` (see the schema above)."""

    tables: Sequence[TableExplanation]
    joins: Sequence[JoinExplanation]
    joined_rows_train: int
    joined_rows_test: int
    loss: str
    row_weight: Mapping[str, object] | None
    cost: RunCost
    disclosures: Sequence[Disclosure]

    @property
    def saving(self) -> dict[str, int]:
        """Rows and encoded values: in the joined table, and held by the sites."""
        rows = self.joined_rows_train + self.joined_rows_test
        held = [sum(table.rows) for table in self.tables]
        widths = [table.features for table in self.tables]
        return {
            "joined-rows": rows,
            "rows-held": sum(held),
            "joined-values": rows * sum(widths),
            "values-held": sum(map(operator.mul, held, widths)),
        }


def explanation_dict(explanation: Explanation) -> dict[str, object]:
    """Return the content of `report.json`: JSON types only."""
    cost = explanation.cost
    content = {
        **explanation.content(EXPLAIN),
        "tables": explanation.tables,
        "joins": explanation.joins,
        "joined-rows": {
            "train": explanation.joined_rows_train,
            "test": explanation.joined_rows_test,
        },
        "loss": explanation.loss,
        "row-weight": explanation.row_weight,
        "saving": explanation.saving,
        "cost": {
            "strategy": cost.strategy,
            "epochs": cost.epochs,
            "set-up": _traffic_dict(cost.set_up),
            "epoch": _traffic_dict(cost.epoch),
            "run": _traffic_dict(cost.run),
        },
        "releases": explanation.disclosures,
    }
    return {key: plain(value) for key, value in content.items()}


def _traffic_dict(traffic: Traffic) -> dict[str, object]:
    return {
        "rounds": traffic.rounds,
        "bytes-up": {table: round(count) for table, count in traffic.up.items()},
        "bytes-down": {table: round(count) for table, count in traffic.down.items()},
    }


class Explain(RoundStrategy):
    """Explain training over the result of a query, without training."""

    name = EXPLAIN
    _joined: JoinedRows | None = None

    @property
    def _method(self) -> JoinStrategy:
        """The method to explain."""
        return JoinStrategy.methods[self.settings.strategy](self.query, self.settings)

    def rounds(self) -> Generator[Requests, Replies, None]:
        """Take the rounds of set-up, check the mapping, make the sites forget."""
        joined = yield from self._method.join(self.inventory)
        self._encoders = yield from fit_encoders(joined)
        rng = generator(self.settings.seed, Stream.CHECK)
        # by join, the keys on whose digests its two sides agreed
        self._checked = yield from check_alignment(joined, rng)
        yield ask(FinishRequest(), joined.extracted.all_parts)
        self._joined = joined

    @property
    def explanation(self) -> Explanation:
        """The explanation, available after the rounds."""
        joined = self._joined
        if joined is None:
            raise RuntimeError("there is no explanation before the rounds are done")
        encoders, checked = self._encoders, self._checked
        estimate = CostEstimate(joined, encoders, self._method, self.history)
        exposure = self._method.exposure(
            joined, self.inventory, estimate.updates, encoders
        )
        return Explanation(
            **self.record_fields,
            tables=[
                _explain_table(joined, encoders[name].columns, name)
                for name in joined.bound.tables
            ],
            joins=[
                _explain_join(joined, join, checked[join.text])
                for join in joined.bound.joins
            ],
            join_steps=joined.steps,
            joined_rows_train=joined.train.joined_rows,
            joined_rows_test=len(joined.test_labels),
            loss=joined.loss.name,
            row_weight=joined.weighting.facts(joined.train.joined_rows),
            cost=estimate.cost(),
            disclosures=disclosures(exposure),
        )


def _explain_table(
    joined: JoinedRows, columns: EncodedColumns, name: str
) -> TableExplanation:
    fragments, parts = joined.bound.fragments_of(name), joined.extracted.parts[name]
    multiplicity = joined.mapping.tables[name].multiplicity
    return TableExplanation(
        table=name,
        names=tuple(fragment.name for fragment in fragments),
        sites=tuple(part.site for part in parts),
        rows=tuple(joined.extracted.rows[part.number] for part in parts),
        work=(*describe_work(fragments), *describe_places(joined.extracted, name)),
        features=columns.width,
        dropped=columns.dropped,
        unused_rows=int(np.count_nonzero(multiplicity == 0)),
        multiplicity={
            "min": int(multiplicity.min()),
            "median": float(np.median(multiplicity)),
            "mean": float(multiplicity.mean()),
            "max": int(multiplicity.max()),
        },
    )


def _explain_join(joined: JoinedRows, join: Join, checked: int) -> JoinExplanation:
    """Compare the keys of two tables, regardless of the other joins."""
    keys = joined.extracted.keys
    left, right = join_codes(
        join, keys[join.left, join.left_key], keys[join.right, join.right_key]
    )
    # -1 is the code of NULL
    left_unmatched, right_unmatched = (
        int(np.count_nonzero((codes < 0) | ~np.isin(codes, others)))
        for codes, others in ((left, right), (right, left))
    )
    return JoinExplanation(
        on=join.text,
        is_outer=not joined.bound.outer.isdisjoint((join.left, join.right)),
        checked_keys=checked,
        left=join.left,
        left_rows=len(left),
        left_null=int(np.count_nonzero(left < 0)),
        left_unmatched=left_unmatched,
        right=join.right,
        right_rows=len(right),
        right_null=int(np.count_nonzero(right < 0)),
        right_unmatched=right_unmatched,
    )
