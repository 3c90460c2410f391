"""Explain: set a run up and forecast its training, without training.

The rounds are those of set-up up to the encoders, so that the explanation describes
what would really happen; then the sites forget the run.

Schema of the `report.json` that `mode = "explain"` writes (`schema` 1; counts are whole
numbers, predicted bytes are rounded)::

    schema, mode ("explain"), status, started, seconds, output-dir, query (SQL)
    settings {run-config key: value}
    tables   [{table, names: [..], sites: [..], rows: [per shard], work: [text],
               features, dropped: [..], encoding: [..] as in a report, unused-rows,
               multiplicity: {min, median, mean, max}}]
    joins    [{on, left, right, is-outer,
               left-rows, left-null, left-unmatched, right-rows, ..}]
    join-steps  as in a report of training
    joined-rows {train, test}, chosen {task}, loss
    row-weight  {column, entity, min, max, effective-rows, left-out}, null without
             weights: as in `chosen` of a report of training
    offset   {column, min, max}, null without one: as there
    events   {train, total}: rows with an event, null where labels are no times of one
    saving   {joined-rows, rows-held, joined-values, values-held}
    cost     {strategy, epochs, rounds: {set-up, epoch, run},
               bytes: {up, down} of an epoch that is not the last one,
               waiting: {channel: seconds of a deployment, besides computing and
               network},
               beside: {strategy, epochs, usual-epochs}}: in how many epochs another
               strategy sends as much, and within how many it is usually near its
               optimum; only where the strategy names one
    score-vectors  [{table, site, left, epoch, epochs}]: where policies limit them,
               how many may leave, how many an epoch takes, and for how many epochs they
               last
    memory   {sites: {site: bytes}, server: bytes}: the peak over what a process has
               when its libraries are loaded
    releases [{message, to, carries, protection}]
    history  the rounds that `explain` itself took, as in a report of training

Multiplicity covers all rows after the filters, even those in no joined row, and
training and held-out rows together; ``unused-rows`` are in no joined row. Each join is
considered on its own: ``unmatched`` rows have a key that the other table lacks, or no
key, which ``null`` counts separately.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from strategies.disclosures import disclosures, privacy_report
from strategies.explain.memory import forecast
from strategies.ranks import Ranks, ScoreForecast, rank_rows
from strategies.registry import STRATEGIES
from strategies.run.exchange import Replies, Requests, ask
from strategies.run.strategy import RoundStrategy
from strategies.score_readings import score_readings
from strategies.setup.encoding import TableEncoding, fit_encoders
from strategies.setup.extract import describe_formats, describe_places, describe_work
from strategies.setup.joined_rows import JoinedTables, TableLayout
from strategies.training.join_method import JoinMethod
from strategies.training.prepare import Preparation, check_shards
from strategies.training.traffic import (
    ShardSize,
    TableSize,
)
from tp_flower.learning.models.local_model import LINEAR, NUMPY_KINDS, build_model
from tp_flower.protocol.fields import Document
from tp_flower.protocol.inference_messages import FinishRequest
from tp_flower.protocol.setup_messages import EncodedColumns
from tp_flower.protocol.training_messages import Update
from tp_flower.reports import records
from tp_flower.settings import Settings
from tp_flower.settings.run import EXPLAIN

SEARCHES: Final = (
    "the run is a search of {} fits, which share one extraction: the costs are of one"
)


def expected_batch_rows(
    multiplicity: npt.NDArray[np.integer], joined_rows: int, batch_size: int
) -> float:
    """Return the expected number of distinct rows per batch, summed over the batches.

    A row that is in G of N joined rows is missing from a batch of B with probability
    C(N - G, B) / C(N, B).

    >>> expected_batch_rows(np.array([1, 1, 4]), joined_rows=4, batch_size=2)
    4.0
    """
    # a run without batches does not wait for it
    from scipy.special import gammaln

    distinct, counts = np.unique(multiplicity, return_counts=True)
    full, last_rows = divmod(joined_rows, batch_size)
    total = 0.0
    for size, batches in ((batch_size, full), (last_rows, min(last_rows, 1))):
        others = joined_rows - distinct
        # gammaln is infinite at 0, -1, ..: then no batch is without the row
        absent = np.exp(
            gammaln(others + 1.0)
            - gammaln(others - size + 1.0)
            + gammaln(joined_rows - size + 1.0)
            - gammaln(joined_rows + 1.0)
        )
        total += batches * float(counts @ (1.0 - absent))
    return round(total, 6)


@dataclass(frozen=True)
class CostEstimate:
    """Rounds and bytes of training on the joined rows."""

    joined: JoinedTables
    encoders: Mapping[str, TableEncoding]
    method: JoinMethod
    history: Sequence[records.RoundReport]

    def cost(self, forecasts: Sequence[ScoreForecast], *, shows_bins: bool) -> Document:
        """Return the entry `cost`; set-up includes the rounds after the epochs.

        There are no more epochs than policies allow, if these allow any. If sites show
        bins, that is a round.
        """
        settings = self.method.settings
        set_up = self._set_up_rounds() + int(shows_bins)
        allowed = [item.epochs for item in forecasts if item.epochs]
        epochs = min([settings.epochs, *allowed])
        epoch = self.method.epoch_traffic(self._tables, self._batches)
        rounds = set_up + epoch.rounds * epochs
        return {
            "strategy": settings.method_name,
            "epochs": epochs,
            "rounds": {"set-up": set_up, "epoch": epoch.rounds, "run": rounds},
            "bytes": {"up": round(epoch.up), "down": round(epoch.down)},
            "waiting": records.waiting_seconds(rounds),
        }

    def beside(self, other: JoinMethod) -> Document:
        """Return the entry `beside` of `cost`, about another method's bytes."""
        traffic = self.method.epoch_traffic(self._tables, self._batches)
        theirs = other.epoch_traffic(self._tables, 0)
        return {
            "strategy": other.name,
            "epochs": (traffic.up + traffic.down) / (theirs.up + theirs.down),
            "usual-epochs": other.usual_epochs,
        }

    def forecast_scores(self, ranks: Ranks) -> list[ScoreForecast]:
        """Return how many epochs of scores each part with a score limit may release."""
        rows = self.trained
        preparation = self._preparation(self.trained)
        specs = {
            name: self.method.model_spec(preparation, name) for name in rows.layouts
        }
        return self.method.forecast_scores(ranks, rows, specs, self.encoders)

    def memory(self) -> Document:
        """Return the entry `memory`."""
        return forecast(self.joined, self.encoders, self._tables, self.method)

    @property
    def updates(self) -> dict[str, Update]:
        """By table, how its shards are trained together."""
        return {size.name: size.update for size in self._tables}

    @cached_property
    def trained(self) -> JoinedTables:
        """The joined rows to train on: all of them, or a sample.

        A sample that the server draws alone stands in for one of the same size.
        """
        trained = self.joined
        if (drawing := self.method.drawing) is not None:
            trained = self.method.restrict(trained, drawing.stand_in(trained))
        return trained

    @cached_property
    def _tables(self) -> list[TableSize]:
        return self._sizes(self.trained)

    @property
    def _batches(self) -> int:
        """Batches of an epoch of SGD, ceil(N / B); 0 without batches."""
        rows = self.trained.train.joined_rows
        size = self.method.batch_size(rows)
        return -(-rows // size) if size else 0

    def _set_up_rounds(self) -> int:
        """Return the rounds outside of epochs.

        Those before ``prepare`` have taken place, and training would take the same; the
        last one ends the run.
        """
        previous_rounds = sum(item.phase != "finish" for item in self.history)
        drawing = self.method.drawing
        drawing_rounds = len(drawing.messages) if drawing else 0
        scoring_rounds = len(self.method.messages_of_start)
        scoring_rounds += self.method.rounds_of_start
        later_rounds = int(self.method.settings.method.is_prepared) + 1
        return previous_rounds + drawing_rounds + scoring_rounds + later_rounds

    def _preparation(self, joined: JoinedTables) -> Preparation:
        method = self.method
        objective = joined.train_objective
        head = method.head(objective.outputs)
        return Preparation(joined, method.settings, self.encoders, objective, head)

    def _sizes(self, joined: JoinedTables) -> list[TableSize]:
        preparation = self._preparation(joined)
        return [self._size(preparation, layout) for layout in joined.layouts.values()]

    def _size(self, preparation: Preparation, layout: TableLayout) -> TableSize:
        """Return the size of a table in training, by shard."""
        name = layout.name
        features = self.encoders[layout.name].columns.width
        spec = self.method.model_spec(preparation, name)
        joined = preparation.joined
        train = preparation.joined.train
        counts = train.tables[name].multiplicity
        batch = self.method.batch_size(train.joined_rows)
        shards = []
        for rows, part in zip(layout.rows, layout.parts, strict=True):
            batch_rows = 0.0
            if batch:
                batch_rows = expected_batch_rows(
                    counts[rows.trained_slice], train.joined_rows, batch
                )
            size = ShardSize(
                rows=joined.extracted.rows[part.number],
                trained=rows.trained,
                tested=int(np.count_nonzero(rows.tested)),
                total=rows.total,
                batch_rows=batch_rows,
            )
            shards.append(size)
        return TableSize(
            name=name,
            shards=tuple(shards),
            update=self.method.choose_update(
                name, len(layout.parts), is_linear=spec.kind == LINEAR
            ),
            outputs=spec.outputs,
            features=features,
            parameters=len(build_model(spec, features, "cpu").penalised),
            has_intercept=spec.intercept,
            starts_at_zero=spec.kind in NUMPY_KINDS,
            has_hessian=not joined.objective.has_constant_hessian,
            joined_rows=joined.train.joined_rows,
        )


class Explain(RoundStrategy):
    """Explain training over the result of a query, without training."""

    name = EXPLAIN
    _joined: JoinedTables | None = None
    _forecasts: Sequence[ScoreForecast] = ()

    @cached_property
    def _method(self) -> JoinMethod:
        """The method, of a run that never starts and collects the warnings."""
        name = self.settings.method_name
        method = STRATEGIES[name](self.query, self.settings).method
        if not isinstance(method, JoinMethod):
            raise TypeError(f"strategy {name!r} does not train over joins")
        return method

    def rounds(self) -> Generator[Requests, Replies, None]:
        """Take the rounds of set-up, and make the sites forget."""
        joined = yield from self._method.join(self.inventory)
        check_shards(joined.layouts, self.settings)
        self._encoders = yield from fit_encoders(joined, self._method.run)
        if self._method.asks_ranks(self.inventory):
            estimate = CostEstimate(joined, self._encoders, self._method, ())
            ranks = yield from rank_rows(estimate.trained, self._encoders)
            self._method.scores_left = ranks.by_number
            self._forecasts = estimate.forecast_scores(ranks)
            self.warn(*self._method.warnings_of_scores(self._forecasts))
        self.warn(*self._method.warnings_of_encoders(self._encoders))
        if fits := self._method.run.fits:
            self.warn(SEARCHES.format(fits))
        yield ask(FinishRequest(), joined.extracted.all_parts)
        self._joined = joined
        for warning in self._method.run.warnings:
            self.warn(warning)

    @property
    def explanation(self) -> Document:
        """The content of `report.json`, available after the rounds."""
        joined = self._joined
        if joined is None:
            raise RuntimeError("there is no explanation before the rounds are done")
        encoders = self._encoders
        method = self._method
        estimate = CostEstimate(joined, encoders, method, self.history)
        exposure = method.exposure(joined, self.inventory, estimate.updates, encoders)
        releases = disclosures(exposure)
        privacy = self.settings.privacy
        columns = {name: encoders[name].columns for name in joined.bound.tables}
        train = joined.train.joined_rows
        test = len(joined.test_objective)
        trained = estimate.trained
        readings = score_readings(
            exposure,
            method.sent_derivatives(trained.train.joined_rows),
            joined.objective,
            trained.train,
            trained.layouts,
            method.scores_left,
        )
        content = {
            **records.RunRecord(**self.record_fields, join_steps=joined.steps).content(
                EXPLAIN
            ),
            "tables": [_table(joined, name, encoders[name]) for name in columns],
            "joins": [
                _join(joined, number) for number in range(len(joined.bound.joins))
            ],
            "joined-rows": {"train": train, "test": test},
            "chosen": method.run.chosen,
            "loss": joined.objective.name,
            "row-weight": joined.weighting.report_entry(train),
            "offset": joined.offset_entry(),
            "events": joined.events_entry(),
            "saving": _saving(joined, columns),
            "cost": estimate.cost(self._forecasts, shows_bins=bool(exposure.bins))
            | self._beside(estimate),
            "memory": estimate.memory(),
            "score-vectors": [item.report_entry() for item in self._forecasts],
            "releases": releases,
            "privacy": {
                **privacy_report(releases, self.ledgers, privacy, is_complete=True),
                "readings": readings,
            },
        }
        return {key: records.plain(value) for key, value in content.items()}

    def _beside(self, estimate: CostEstimate) -> Document:
        """Return the entry `beside` of the cost, if the method is compared."""
        if not self.settings.method.is_compared:
            return {}
        usual = Settings()
        name = usual.method_name
        method = STRATEGIES[name](self.query, usual).method
        if not isinstance(method, JoinMethod):
            raise TypeError(f"strategy {name!r} does not train over joins")
        return {"beside": estimate.beside(method)}


def _saving(
    joined: JoinedTables, columns: Mapping[str, EncodedColumns]
) -> dict[str, int]:
    """Return rows and encoded values: in the joined table, and held by the sites."""
    rows = joined.mapping.joined_rows
    table_rows = joined.extracted.table_rows
    widths = {name: of_table.width for name, of_table in columns.items()}
    return {
        "joined-rows": rows,
        "rows-held": sum(table_rows.values()),
        "joined-values": rows * sum(widths.values()),
        "values-held": sum(table_rows[name] * width for name, width in widths.items()),
    }


def _table(joined: JoinedTables, name: str, encoding: TableEncoding) -> Document:
    """Return the report entry of a table."""
    fragments = joined.bound.fragments_of(name)
    parts = joined.extracted.parts[name]
    multiplicity = joined.mapping.tables[name].multiplicity
    # a sub-query that looks back may have no answer
    counts = multiplicity if len(multiplicity) else np.zeros(1, int)
    return {
        "table": name,
        "names": [fragment.name for fragment in fragments],
        "sites": [part.site for part in parts],
        "rows": [joined.extracted.rows[part.number] for part in parts],
        "work": (
            *describe_work(fragments),
            *describe_formats(fragments, joined.extracted.columns),
            *describe_places(joined.extracted, name),
        ),
        "features": encoding.columns.width,
        "dropped": encoding.columns.dropped,
        "encoding": encoding.rows(),
        "unused-rows": np.count_nonzero(multiplicity == 0),
        "multiplicity": {
            "min": counts.min(),
            "median": np.median(counts),
            "mean": counts.mean(),
            "max": counts.max(),
        },
    }


def _join(joined: JoinedTables, number: int) -> Document:
    """Compare the keys of two tables, regardless of the other joins."""
    join = joined.bound.joins[number]
    codes_of = joined.key_codes(number)
    comparison: Document = {
        "on": join.text,
        "is-outer": not joined.bound.outer.isdisjoint((join.left, join.right)),
    }
    for side, table, other in (
        ("left", join.left, join.right),
        ("right", join.right, join.left),
    ):
        codes = codes_of[table]
        # -1 is the code of NULL
        comparison |= {
            side: table,
            f"{side}-rows": len(codes),
            f"{side}-null": np.count_nonzero(codes < 0),
            f"{side}-unmatched": np.count_nonzero(
                (codes < 0) | ~np.isin(codes, codes_of[other])
            ),
        }
    return comparison
