"""Row effects at the server: which tables get them, and what a report says of them.

The server knows which rows have one join key by the keyed hashes of extraction. After
training it fits effects (:mod:`tp_flower.learning.row_effects`) at the best epoch's
scores, and keeps those that lower the loss of the rows that validate. The message that
ends the run brings each table its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import INFO

import numpy as np
from flwr.common.logger import log

from strategies.setup.joined_rows import JoinedTables
from strategies.setup.problem import SCORES, TrainingProblem
from strategies.setup.splitting import table_named
from tp_flower.arrays import FloatArray, IntArray
from tp_flower.learning.row_effects import RowEffects, TableKeys, choose_penalties
from tp_flower.protocol.inference_messages import FinishPart
from tp_flower.protocol.packet import unpack_bits

ROWS_PER_KEY = 2.0
"""Joined training rows that the keys of a table have on average, at least: of fewer an
effect would be the label itself."""
_BEST = "scores of the best epoch"


def keys_of_tables(joined: JoinedTables, wanted: Sequence[str]) -> dict[str, TableKeys]:
    """Return the keys of the ``wanted`` tables, or of any, that may have effects.

    Keys are numbered over the rows that take part, in the order of the layout.
    """
    keys = {}
    aliases = {table_named(joined.bound, alias, "effects") for alias in wanted}
    for table in aliases or joined.layouts:
        count = joined.bound.joined_keys(table)
        if not count:
            continue
        numbers = _numbers_of_keys(joined, table, count)[_positions(joined, table)]
        distinct, of_rows = np.unique(numbers, return_inverse=True)
        has_none = int(len(distinct) > 0 and distinct[0] < 0)
        table_keys = TableKeys(of_rows - has_none, len(distinct) - has_none)
        multiplicity = joined.train.tables[table].multiplicity
        rows = table_keys.add_up(multiplicity[:, None].astype(np.float64))
        trained = np.count_nonzero(rows)
        if rows.sum() >= ROWS_PER_KEY * trained > 0:
            keys[table] = table_keys
    return keys


def _numbers_of_keys(joined: JoinedTables, table: str, count: int) -> IntArray:
    """Return a number of the tuple of each row's join keys, (rows,); -1 without one."""
    extracted = joined.extracted
    rows = extracted.table_rows[table]
    numbers = np.zeros(rows, np.int64)
    lacks_key = np.zeros(rows, np.bool_)
    for key in range(count):
        columns = extracted.keys[table, key]
        hashes = np.concatenate([column.hashes for column in columns])
        _, places = np.unique(hashes, axis=0, return_inverse=True)
        codes = []
        start = 0
        for column in columns:
            shifted = np.where(column.codes < 0, -1, column.codes + start)
            codes.append(shifted)
            start += len(column.hashes)
        code_of_row = np.concatenate(codes)
        lacks_key |= code_of_row < 0
        with_none = np.append(places.ravel(), 0)
        _, numbers = np.unique(
            numbers * (len(places) + 1) + with_none[code_of_row], return_inverse=True
        )
    numbers[lacks_key] = -1
    return numbers


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
        of_rows: by table, (n_i, d_c).
        entries: by table, what the report says.
    """

    of_rows: Mapping[str, FloatArray]
    entries: Mapping[str, Mapping[str, object]]

    def parts(self, problem: TrainingProblem) -> dict[int, FinishPart]:
        """Return what the last message brings each part, by number."""
        return {
            number: FinishPart(rows)
            for name, effects in self.of_rows.items()
            for number, rows in problem.tables[name].scatter_rows(effects).items()
        }


def mark_scores(problem: TrainingProblem) -> None:
    """Copy the scores, which are those of the best model so far."""
    for rows in problem.scored_rows:
        rows.fill(_BEST, rows.whole(SCORES))


def fit_effects(
    problem: TrainingProblem, keys: Mapping[str, TableKeys], *, are_wanted: bool
) -> FittedEffects | None:
    """Fit effects to the best model's scores; None where none lowers the loss.

    The vectors of scores become those with effects. If they ``are_wanted``, they need
    not lower it by more than chance.
    """
    for rows in problem.scored_rows:
        rows.fill(SCORES, rows.whole(_BEST))
    effects = RowEffects(problem.scored_rows, problem.objective, keys)
    held_out = problem.scored_rows[-1]
    validates = np.flatnonzero(problem.validates)

    def losses() -> FloatArray:
        validated = problem.validated
        return validated.weigh(validated.row_values(held_out.take(SCORES, validates)))

    falls = choose_penalties(
        effects, effects.by_first_gain(), losses, are_wanted=are_wanted
    )
    if not falls:
        return None
    for name, fall in falls.items():
        log(
            INFO,
            "Row effects of %d keys of %s: validation loss %.4g -> %.4g",
            keys[name].count,
            name,
            fall.before,
            fall.after,
        )
    dispersion = 1.0
    if problem.objective.has_constant_hessian:
        dispersion = 2.0 * problem.train_metrics()["loss"]
    entries = {
        name: {
            "keys": keys[name].count,
            "penalty": effects.penalties[name],
            # of a mixed model that has this shrinkage
            "variance": dispersion / effects.penalties[name],
            "kept": float(effects.remaining(name).mean()),
            "validation-loss": [fall.before, fall.after],
        }
        for name, fall in falls.items()
    }
    of_rows = {name: effects.of_rows(name) for name in falls}
    return FittedEffects(of_rows, entries)
