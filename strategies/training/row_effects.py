"""Row effects at the server: which tables get them, and what a report says of them.

The server knows which rows have one join key by the keyed hashes of extraction. After
training it fits effects (:mod:`tp_flower.learning.row_effects`) at the best epoch's
scores, and keeps those that lower the loss of the rows that validate. The message that
ends the run brings each table its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from logging import INFO

import numpy as np
from flwr.common.logger import log

from strategies.setup.joined_rows import JoinedTables
from strategies.setup.problem import SCORES, TrainingProblem
from strategies.setup.shard_labels import shards_that_tell_labels
from tp_flower.arrays import AnyArray, FloatArray, IntArray
from tp_flower.joins.joining import number_keys
from tp_flower.joins.mapping import TableRows
from tp_flower.joins.rows import Vectors
from tp_flower.learning.row_effects import (
    Fall,
    RowEffects,
    choose_penalties,
    fit_together,
)
from tp_flower.protocol.packet import unpack_bits

ROWS_PER_KEY = 2
"""Joined training rows of a key that has an effect: of one row it would be its label.
So many must the keys of a table have on average."""
NO_EFFECTS = (
    "effects: table %r has none: its keys are in fewer than two joined training rows "
    "on average, its shards tell the label, or a policy lets no feature read them"
)
_BEST = "scores of the best epoch"


def keys_of_tables(joined: JoinedTables) -> dict[str, TableRows]:
    """Return the keys of the tables that may have effects, or factors.

    Keys are numbered over the rows that take part, in the order of the layout. Shards
    have keys of their own: what a shard has not trained on it would not find again.
    """
    keys = {}
    # where a shard is of one label, its keys would be, too
    telling = {table.table for table in shards_that_tell_labels(joined)}
    for table in joined.layouts:
        if table in telling or not joined.bound.joined_keys(table):
            continue
        numbers = _numbers_of_keys(joined, table)
        has_key = numbers >= 0
        multiplicity = joined.train.tables[table].multiplicity
        rows = np.bincount(numbers[has_key], multiplicity[has_key])
        trained = int(np.count_nonzero(rows))
        if not trained or rows.sum() < ROWS_PER_KEY * trained:
            continue
        has_effect = rows >= ROWS_PER_KEY
        # numbered anew, and none for the others and for rows without a key
        new_number = np.append(np.where(has_effect, np.cumsum(has_effect) - 1, -1), -1)
        key_of_row = new_number[numbers].astype(np.int32)
        keys[table] = TableRows(key_of_row, int(np.count_nonzero(has_effect)))
    return keys


def _numbers_of_keys(joined: JoinedTables, table: str) -> IntArray:
    """Return a number of the join keys and the shard of each row that takes part.

    It is -1 where a row lacks a key.
    """
    extracted = joined.extracted
    count = joined.bound.joined_keys(table)
    numbers = number_keys([extracted.keys[table, key] for key in range(count)])
    sizes = [extracted.rows[part.number] for part in extracted.parts[table]]
    shard = np.repeat(np.arange(len(sizes)), sizes)
    of_rows = np.where(numbers < 0, -1, numbers.astype(np.int64) * len(sizes) + shard)
    taking_part: IntArray = of_rows[_positions(joined, table)]
    return taking_part


def _positions(joined: JoinedTables, table: str) -> IntArray:
    """Return the positions of the rows that take part, in the order of the layout."""
    fields = joined.layouts[table].fields
    positions = []
    for part, rows in joined.extracted.shards_of(table):
        size = rows.stop - rows.start
        trained, tested = (
            unpack_bits(fields[part.number][name], size)
            for name in ("trained", "tested")
        )
        positions += [
            rows.start + np.flatnonzero(trained),
            rows.start + np.flatnonzero(tested & ~trained),
        ]
    return np.concatenate(positions)


@dataclass(frozen=True)
class FittedEffects:
    """The effects that a model has beside its tables, and what they gain.

    Attributes:
        effects: of all tables whose keys may have some.
        entries: by table, what the report says; tables that are not in it have none.
        losses: returns the losses of the rows that validate, (V,).
        falls: by table, of these losses.
    """

    effects: RowEffects
    entries: Mapping[str, Mapping[str, object]]
    losses: Callable[[], FloatArray]
    falls: Mapping[str, Fall]

    @property
    def of_rows(self) -> dict[str, FloatArray]:
        """By table, the effect of each row, (n_i, d_c)."""
        return {name: self.effects.of_rows(name) for name in self.entries}

    def tables_of(self, gain: float) -> list[str]:
        """Return the tables whose effects lowered the loss by such a share of it."""
        return [
            name
            for name, fall in self.falls.items()
            if fall.before - fall.after >= gain * abs(fall.before)
        ]

    def fit_again(self) -> None:
        """Fit them anew to scores that have changed since, unless that loses."""
        fit_together(self.effects, self.losses)


def mark_scores(problem: TrainingProblem) -> None:
    """Copy the scores, which are those of the best model so far."""
    _copy(problem, SCORES, _BEST)


def restore_scores(problem: TrainingProblem) -> None:
    """Take the scores that were copied."""
    _copy(problem, _BEST, SCORES)


def _copy(problem: TrainingProblem, name: str, copy: str) -> None:
    """Store a vector of the joined rows under another name, too."""

    def copied(vectors: Vectors, _: AnyArray) -> tuple[Vectors, Sequence[float]]:
        return {copy: vectors[name]}, ()

    for rows in problem.scored_rows:
        rows.run(copied)


def fit_effects(
    problem: TrainingProblem, keys: Mapping[str, TableRows], *, are_wanted: bool
) -> FittedEffects | None:
    """Fit effects to the best model's scores; None where none lowers the loss.

    The vectors of scores become those with effects. If they ``are_wanted``, they need
    not lower it by more than chance.
    """
    effects = RowEffects(problem.scored_rows, problem.objective, keys)
    losses = partial(problem.validating_losses, problem.scored_rows[-1])
    falls = choose_penalties(
        effects, effects.by_first_gain(), losses, are_wanted=are_wanted
    )
    if not falls:
        return None
    for name, fall in falls.items():
        log(
            INFO,
            "Row effects of %d keys of %s: validation loss %.4g -> %.4g",
            keys[name].rows,
            name,
            fall.before,
            fall.after,
        )
    dispersion = 1.0
    if problem.objective.has_constant_hessian:
        dispersion = 2.0 * problem.train_metrics()["loss"]
    entries = {
        name: {
            "keys": keys[name].rows,
            "penalty": effects.penalties[name],
            # of a mixed model that has this shrinkage
            "variance": dispersion / effects.penalties[name],
            "kept": float(effects.remaining(name).mean()),
            "validation-loss": [fall.before, fall.after],
        }
        for name, fall in falls.items()
    }
    return FittedEffects(effects, entries, losses, falls)
