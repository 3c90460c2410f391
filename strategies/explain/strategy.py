"""Explain: the set-up of a run, and what training would do, without training.

The rounds are those of set-up up to the encoders, so that what is said is what would
happen; then the sites confirm the mapping (:mod:`strategies.setup.cross_check`) and
forget the run.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass

import numpy as np

from strategies.disclosures import releases
from strategies.explain.cost_estimate import Forecast
from strategies.explain.explanation import (
    Explanation,
    JoinExplanation,
    KeySide,
    TableExplanation,
)
from strategies.run.exchange import Replies, Request, ask
from strategies.run.strategy import RoundStrategy
from strategies.setup.cross_check import check_alignment
from strategies.setup.extract import describe_places, describe_work
from strategies.setup.joined_rows import JoinedRows
from strategies.training.base import JoinStrategy
from strategies.training.prepare import fit_encoders
from tp_flower.features.encoder import TableEncoder
from tp_flower.joins.joining import join_codes
from tp_flower.joins.mapping import IntArray
from tp_flower.protocol import FinishRequest
from tp_flower.query import Join
from tp_flower.randomness import Stream, generator
from tp_flower.settings import Settings


@dataclass(frozen=True)
class _Found:
    """What the rounds found.

    Attributes:
        joined: the joined rows.
        encoders: of every table.
        checked: by join, the keys on whose digests its two sides agreed.
    """

    joined: JoinedRows
    encoders: Mapping[str, TableEncoder]
    checked: Mapping[str, int]


class Explain(RoundStrategy):
    """Say what training over the result of a query would do.

    Args:
        query: the training set.
        settings: of the run that is asked about.
    """

    name = "explain"
    _found: _Found | None = None

    def default_settings(self) -> Settings:
        """Return the defaults, in this mode."""
        return Settings(mode="explain")

    @property
    def _method(self) -> JoinStrategy:
        """The method that is asked about."""
        method = JoinStrategy.methods[self.settings.strategy]
        return method(self.query, self.settings)

    def rounds(self) -> Generator[Request, Replies, None]:
        """Take the rounds of set-up, check the mapping, let the sites forget."""
        joined = yield from self._method.join(self.inventory)
        encoders = yield from fit_encoders(joined)
        rng = generator(self.settings.seed, Stream.CHECK)
        checked = yield from check_alignment(joined, rng)
        yield ask(FinishRequest(), joined.extracted.all_parts)
        self._found = _Found(joined, encoders, checked)

    @property
    def explanation(self) -> Explanation:
        """What the rounds found.

        Raises:
            RuntimeError: before they are done.
        """
        if self._found is None:
            raise RuntimeError("there is no explanation before the rounds are done")
        joined, settings = self._found.joined, self.settings
        forecast = Forecast(joined, self._found.encoders, self._method, self.history)
        return Explanation(
            settings=settings.to_dict(),
            query=self.query.to_sql(),
            tables=[self._table(self._found, name) for name in joined.bound.tables],
            joins=[_join(self._found, join) for join in joined.bound.joins],
            join_steps=joined.steps,
            joined_rows_train=joined.train.joined_rows,
            joined_rows_test=len(joined.test_labels),
            loss=joined.loss.name,
            cost=forecast.cost(),
            releases=releases(
                self._method.audience(
                    joined, self.inventory, forecast.updates, self._found.encoders
                )
            ),
            history=self.history,
            output_dir=settings.output_dir,
            started=self.started,
            seconds=self.seconds,
            row_weight=joined.weighting.facts(joined.train.joined_rows),
        )

    def _table(self, found: _Found, name: str) -> TableExplanation:
        fragments = found.joined.bound.fragments_of(name)
        parts = found.joined.extracted.parts[name]
        multiplicity = found.joined.mapping.tables[name].multiplicity
        encoder = found.encoders[name]
        return TableExplanation(
            table=name,
            names=tuple(fragment.name for fragment in fragments),
            sites=tuple(part.site for part in parts),
            rows=tuple(found.joined.extracted.rows[part.number] for part in parts),
            work=(
                *describe_work(fragments),
                *describe_places(
                    [(p.site, found.joined.extracted.work[p.number]) for p in parts]
                ),
            ),
            features=encoder.width,
            dropped=encoder.dropped,
            unused_rows=int(np.count_nonzero(multiplicity == 0)),
            multiplicity_min=int(multiplicity.min()),
            multiplicity_median=float(np.median(multiplicity)),
            multiplicity_mean=float(multiplicity.mean()),
            multiplicity_max=int(multiplicity.max()),
        )


def _join(found: _Found, join: Join) -> JoinExplanation:
    """Compare the keys of two tables, whatever the other joins do."""
    keys = found.joined.extracted.keys
    left, right = join_codes(
        join, keys[join.left, join.left_key], keys[join.right, join.right_key]
    )
    return JoinExplanation(
        on=join.text,
        is_outer=not found.joined.bound.outer.isdisjoint((join.left, join.right)),
        left=_key_side(join.left, left, right),
        right=_key_side(join.right, right, left),
        checked_keys=found.checked[join.text],
    )


def _key_side(table: str, own: IntArray, other: IntArray) -> KeySide:
    known = np.zeros(int(max(own.max(initial=0), other.max(initial=0))) + 2, np.bool_)
    known[other] = True
    # the last entry is what NULL, -1, takes
    known[-1] = False
    return KeySide(
        table=table,
        rows=len(own),
        null=int(np.count_nonzero(own < 0)),
        unmatched=int(np.count_nonzero(~known[own])),
    )
