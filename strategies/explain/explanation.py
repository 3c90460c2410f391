"""Explain: the set-up of a run, and what training would do, without training.

The rounds are those of set-up up to the encoders, so that the explanation is of what
would happen; then the sites confirm the mapping (:mod:`strategies.setup.cross_check`)
and forget the run.

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

Multiplicity is over all rows after the filters, those in no joined row included, and
over training and held-out rows together. ``unmatched`` rows of a join have a key that
the other table does not have, or, counted in ``null`` too, no key.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from strategies.disclosures import Disclosure, disclosures
from strategies.explain.cost import CostEstimate, RunCost
from strategies.run.exchange import Replies, Request, ask
from strategies.run.strategy import RoundStrategy
from strategies.setup.cross_check import check_alignment
from strategies.setup.extract import describe_places, describe_work
from strategies.setup.joined_rows import JoinedRows
from strategies.training.base import JoinStrategy
from strategies.training.prepare import fit_encoders
from strategies.training.traffic import Traffic
from tp_flower.features.encoder import TableEncoder
from tp_flower.joins.joining import join_codes
from tp_flower.joins.mapping import IntArray
from tp_flower.protocol.inference_messages import FinishRequest
from tp_flower.query import Join
from tp_flower.randomness import Stream, generator
from tp_flower.reports.records import RunRecord, plain
from tp_flower.settings import Settings
from tp_flower.settings.run import EXPLAIN


@dataclass(frozen=True)
class TableExplanation:
    """One table of the query, and what its sites will do.

    Attributes:
        names: names at the sites, one per SELECT of a UNION ALL.
        rows: of each shard, after the filters.
        work: the fragment in words, a line each.
        features: encoded columns, d; ``dropped`` ones are constant.
        unused_rows: rows that are in no joined row.
        multiplicity: min, median, mean and max of the joined rows that a row is in.
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

    @property
    def total_rows(self) -> int:
        """Rows of all shards."""
        return sum(self.rows)


@dataclass(frozen=True)
class KeySide:
    """One side of a join between two tables, by itself.

    ``unmatched`` rows, those of NULL keys included, have a key that the other lacks.
    """

    table: str
    rows: int
    null: int
    unmatched: int


@dataclass(frozen=True)
class JoinExplanation:
    """One join between two tables.

    Attributes:
        is_outer: whether one of the tables is LEFT JOINed.
        checked_keys: matched keys on whose digests the sites of both sides agreed.
    """

    on: str
    is_outer: bool
    left: KeySide
    right: KeySide
    checked_keys: int


@dataclass(frozen=True, kw_only=True)
class Explanation(RunRecord):
    """An explanation: the fields of its `report.json`, see there."""

    tables: Sequence[TableExplanation]
    joins: Sequence[JoinExplanation]
    joined_rows_train: int
    joined_rows_test: int
    loss: str
    row_weight: Mapping[str, object] | None
    cost: RunCost
    disclosures: Sequence[Disclosure]

    @property
    def joined_rows(self) -> int:
        """Rows of the joined table."""
        return self.joined_rows_train + self.joined_rows_test

    @property
    def rows_held(self) -> int:
        """Rows of the tables, which stay where they are."""
        return sum(table.total_rows for table in self.tables)

    @property
    def joined_values(self) -> int:
        """Encoded values of the joined table, N * d."""
        return self.joined_rows * sum(table.features for table in self.tables)

    @property
    def values_held(self) -> int:
        """Encoded values of the tables, the sum of n_i * d_i."""
        return sum(table.total_rows * table.features for table in self.tables)


def explanation_dict(explanation: Explanation) -> dict[str, object]:
    """Return the content of `report.json`: JSON types only."""
    cost = explanation.cost
    content = {
        **explanation.content(EXPLAIN),
        "tables": explanation.tables,
        "joins": [_join_dict(join) for join in explanation.joins],
        "joined-rows": {
            "train": explanation.joined_rows_train,
            "test": explanation.joined_rows_test,
        },
        "loss": explanation.loss,
        "row-weight": explanation.row_weight,
        "saving": {
            "joined-rows": explanation.joined_rows,
            "rows-held": explanation.rows_held,
            "joined-values": explanation.joined_values,
            "values-held": explanation.values_held,
        },
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


def _join_dict(join: JoinExplanation) -> dict[str, object]:
    content = {name.replace("_", "-"): value for name, value in vars(join).items()}
    for name, side in (("left", join.left), ("right", join.right)):
        counts = {f"{name}-{key}": value for key, value in vars(side).items()}
        content |= counts | {name: counts.pop(f"{name}-table")}
    return content


def _traffic_dict(traffic: Traffic) -> dict[str, object]:
    return {
        "rounds": traffic.rounds,
        "bytes-up": {table: round(count) for table, count in traffic.up.items()},
        "bytes-down": {table: round(count) for table, count in traffic.down.items()},
    }


@dataclass(frozen=True)
class _SetUp:
    """The result of the rounds."""

    joined: JoinedRows
    encoders: Mapping[str, TableEncoder]
    # by join, the keys on whose digests its two sides agreed
    checked: Mapping[str, int]


class Explain(RoundStrategy):
    """Say what training over the result of a query would do."""

    name = EXPLAIN
    _set_up: _SetUp | None = None

    def default_settings(self) -> Settings:
        """Return the defaults, in this mode."""
        return Settings(mode=EXPLAIN)

    @property
    def _method(self) -> JoinStrategy:
        """The method that is asked about."""
        return JoinStrategy.methods[self.settings.strategy](self.query, self.settings)

    def rounds(self) -> Generator[Request, Replies, None]:
        """Take the rounds of set-up, check the mapping, let the sites forget."""
        joined = yield from self._method.join(self.inventory)
        encoders = yield from fit_encoders(joined)
        rng = generator(self.settings.seed, Stream.CHECK)
        checked = yield from check_alignment(joined, rng)
        yield ask(FinishRequest(), joined.extracted.all_parts)
        self._set_up = _SetUp(joined, encoders, checked)

    @property
    def explanation(self) -> Explanation:
        """The explanation, once the rounds are done."""
        if self._set_up is None:
            raise RuntimeError("there is no explanation before the rounds are done")
        set_up, settings = self._set_up, self.settings
        joined, encoders = set_up.joined, set_up.encoders
        estimate = CostEstimate(joined, encoders, self._method, self.history)
        exposure = self._method.exposure(
            joined, self.inventory, estimate.updates, encoders
        )
        return Explanation(
            started=self.started,
            seconds=self.seconds,
            output_dir=settings.output_dir,
            query=self.query.to_sql(),
            settings=settings.to_dict(),
            tables=[_explain_table(set_up, name) for name in joined.bound.tables],
            joins=[_explain_join(set_up, join) for join in joined.bound.joins],
            join_steps=joined.steps,
            joined_rows_train=joined.train.joined_rows,
            joined_rows_test=len(joined.test_labels),
            loss=joined.loss.name,
            row_weight=joined.weighting.facts(joined.train.joined_rows),
            cost=estimate.cost(),
            disclosures=disclosures(exposure),
            history=self.history,
        )


def _explain_table(set_up: _SetUp, name: str) -> TableExplanation:
    joined, encoder = set_up.joined, set_up.encoders[name]
    fragments, parts = joined.bound.fragments_of(name), joined.extracted.parts[name]
    places = [(part.site, joined.extracted.work[part.number]) for part in parts]
    multiplicity = joined.mapping.tables[name].multiplicity
    return TableExplanation(
        table=name,
        names=tuple(fragment.name for fragment in fragments),
        sites=tuple(part.site for part in parts),
        rows=tuple(joined.extracted.rows[part.number] for part in parts),
        work=(*describe_work(fragments), *describe_places(places)),
        features=encoder.width,
        dropped=encoder.dropped,
        unused_rows=int(np.count_nonzero(multiplicity == 0)),
        multiplicity={
            "min": int(multiplicity.min()),
            "median": float(np.median(multiplicity)),
            "mean": float(multiplicity.mean()),
            "max": int(multiplicity.max()),
        },
    )


def _explain_join(set_up: _SetUp, join: Join) -> JoinExplanation:
    """Compare the keys of two tables, whatever the other joins do."""
    bound, keys = set_up.joined.bound, set_up.joined.extracted.keys
    left, right = join_codes(
        join, keys[join.left, join.left_key], keys[join.right, join.right_key]
    )
    return JoinExplanation(
        on=join.text,
        is_outer=not bound.outer.isdisjoint((join.left, join.right)),
        left=_key_side(join.left, left, right),
        right=_key_side(join.right, right, left),
        checked_keys=set_up.checked[join.text],
    )


def _key_side(table: str, codes: IntArray, others: IntArray) -> KeySide:
    """Return how many keys of a table another lacks; -1 is the code of NULL."""
    matches = (codes >= 0) & np.isin(codes, others)
    return KeySide(
        table=table,
        rows=len(codes),
        null=int(np.count_nonzero(codes < 0)),
        unmatched=int(np.count_nonzero(~matches)),
    )
