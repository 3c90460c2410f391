"""What `explain` says of a run that was not made: records, and their JSON.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strategies.disclosures import Release
from strategies.explain.cost import RunCost, Traffic
from tp_flower.joins.joining import JoinStep
from tp_flower.reports.records import (
    COMPLETED,
    SCHEMA_VERSION,
    RoundReport,
    plain,
    record_dict,
)


@dataclass(frozen=True)
class TableExplanation:
    """One table of the query, and what its sites will do.

    Attributes:
        table: alias.
        names: names at the sites, one per SELECT of a UNION ALL.
        sites: of each shard.
        rows: of each shard, after the filters.
        work: the fragment in words, a line each.
        features: encoded columns, d.
        dropped: features left out because they are constant.
        unused_rows: rows that are in no joined row.
        multiplicity_min: joined rows that a row is in, at least.
        multiplicity_median: the same in the middle.
        multiplicity_mean: the same on average.
        multiplicity_max: the same at most.
    """

    table: str
    names: tuple[str, ...]
    sites: tuple[str, ...]
    rows: tuple[int, ...]
    work: tuple[str, ...]
    features: int
    dropped: tuple[str, ...]
    unused_rows: int
    multiplicity_min: int
    multiplicity_median: float
    multiplicity_mean: float
    multiplicity_max: int

    @property
    def total_rows(self) -> int:
        """Rows of all shards."""
        return sum(self.rows)


@dataclass(frozen=True)
class KeySide:
    """One side of a join between two tables, by itself.

    Attributes:
        table: alias.
        rows: of the table.
        null: rows whose key is NULL.
        unmatched: rows, those of NULL keys included, whose key the other table lacks.
    """

    table: str
    rows: int
    null: int
    unmatched: int


@dataclass(frozen=True)
class JoinExplanation:
    """One join between two tables.

    Attributes:
        on: the predicate.
        is_outer: whether one of the tables is LEFT JOINed.
        left: the left side.
        right: the right side.
        checked_keys: matched keys on whose digests the sites of both sides agreed.
    """

    on: str
    is_outer: bool
    left: KeySide
    right: KeySide
    checked_keys: int


@dataclass(frozen=True)
class Explanation:
    """Everything that `explain` found.

    Attributes:
        settings: `Settings.to_dict()`.
        query: the SQL in canonical form.
        tables: one record per table, in the order of FROM.
        joins: one per join.
        join_steps: one per table, in the order of joining.
        joined_rows_train: rows of the join to train on.
        joined_rows_test: held-out rows of the join.
        loss: name of the loss.
        cost: rounds and bytes of training.
        releases: who will learn what, in the order of the messages.
        history: the rounds that were taken.
        output_dir: where `report.json` is.
        started: ISO 8601, UTC.
        seconds: wall time.
        row_weight: what joined rows weigh; None where nothing is asked of it.
    """

    settings: Mapping[str, object]
    query: str
    tables: Sequence[TableExplanation]
    joins: Sequence[JoinExplanation]
    join_steps: Sequence[JoinStep]
    joined_rows_train: int
    joined_rows_test: int
    loss: str
    cost: RunCost
    releases: Sequence[Release]
    history: Sequence[RoundReport]
    output_dir: str
    started: str
    seconds: float
    row_weight: Mapping[str, object] | None = None

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
    content = {
        "schema": SCHEMA_VERSION,
        "mode": "explain",
        "status": COMPLETED,
        "started": explanation.started,
        "seconds": explanation.seconds,
        "output-dir": explanation.output_dir,
        "query": explanation.query,
        "settings": explanation.settings,
        "tables": [_table_dict(table) for table in explanation.tables],
        "joins": [_join_dict(join) for join in explanation.joins],
        "join-steps": [record_dict(step) for step in explanation.join_steps],
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
        "cost": _cost_dict(explanation.cost),
        "releases": [record_dict(release) for release in explanation.releases],
        "history": [record_dict(item) for item in explanation.history],
    }
    return {key: plain(value) for key, value in content.items()}


def _table_dict(table: TableExplanation) -> dict[str, object]:
    return {
        "table": table.table,
        "names": table.names,
        "sites": table.sites,
        "rows": table.rows,
        "work": table.work,
        "features": table.features,
        "dropped": table.dropped,
        "unused-rows": table.unused_rows,
        "multiplicity": {
            "min": table.multiplicity_min,
            "median": table.multiplicity_median,
            "mean": table.multiplicity_mean,
            "max": table.multiplicity_max,
        },
    }


def _join_dict(join: JoinExplanation) -> dict[str, object]:
    content: dict[str, object] = {
        "on": join.on,
        "is-outer": join.is_outer,
        "checked-keys": join.checked_keys,
    }
    for name, side in (("left", join.left), ("right", join.right)):
        content[name] = side.table
        content[f"{name}-rows"] = side.rows
        content[f"{name}-null"] = side.null
        content[f"{name}-unmatched"] = side.unmatched
    return content


def _cost_dict(cost: RunCost) -> dict[str, object]:
    return {
        "strategy": cost.strategy,
        "epochs": cost.epochs,
        "set-up": _traffic_dict(cost.set_up),
        "epoch": _traffic_dict(cost.epoch),
        "run": _traffic_dict(cost.run),
    }


def _traffic_dict(traffic: Traffic) -> dict[str, object]:
    return {
        "rounds": traffic.rounds,
        "bytes-up": {table: round(count) for table, count in traffic.up.items()},
        "bytes-down": {table: round(count) for table, count in traffic.down.items()},
    }
