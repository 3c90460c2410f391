"""Factors at the server: of which two tables' keys, and what a report says of them.

After training, and after the effects of keys, the server fits factors to the keys of
two tables (:mod:`tp_flower.learning.key_factors`), and keeps those that lower the loss
of the rows that validate. The message that ends the run brings each of the two tables
its own; in predictions they send them back by row, for the server to multiply.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from logging import INFO
from typing import Final

import numpy as np
from flwr.common.logger import log

from strategies.setup.joined_rows import JoinedTables
from strategies.setup.problem import SCORES, TrainedTable, TrainingProblem
from strategies.setup.splitting import table_named
from tp_flower.arrays import FloatArray
from tp_flower.errors import SettingsError
from tp_flower.joins.mapping import TableRows
from tp_flower.learning.key_factors import (
    WIDTHS,
    ChosenFactors,
    Factors,
    KeyFactors,
    add_products,
    choose_factors,
)
from tp_flower.randomness import Stream, generator
from tp_flower.settings import Settings
from tp_flower.settings.training import NONE

MOST_CANDIDATES: Final = 3
"""Pairs of tables that are tried, those with most pairs of keys."""
FEWEST_PAIRS: Final = 500
"""Pairs of keys of tables that nobody names: of fewer, many factors fit by chance."""
NO_FACTORS = (
    "factors: tables %r have none: the keys of one of them are in fewer than two "
    "joined training rows on average, its shards tell the label, or a policy lets no "
    "feature read them"
)
_WITH_FACTORS: Final = "scores with factors"


def check_factors(joined: JoinedTables, settings: Settings) -> None:
    """Refuse factors that are asked for, of a label with several scores."""
    outputs = joined.objective.outputs
    if settings.factor_tables and outputs > 1:
        raise SettingsError(
            f"factors: {settings.factors!r} are a part of one score, and this label "
            f"has {outputs} of them: use {NONE!r}, or a label of two classes"
        )


def keys_with_factors(
    joined: JoinedTables,
    keys: Mapping[str, TableRows],
    tables: Mapping[str, TrainedTable],
    settings: Settings,
) -> dict[str, TableRows]:
    """Return the keys of the tables that may get factors: of two that are named."""
    if joined.objective.outputs > 1:
        return {}
    named = {
        table_named(joined.bound, alias, "factors") for alias in settings.factor_tables
    }
    return {
        name: of_rows
        for name, of_rows in keys.items()
        if tables[name].takes_factors and (name in named or not named)
    }


@dataclass(frozen=True)
class FittedFactors:
    """The factors that a model has beside its tables, and what they gain.

    Attributes:
        of_rows: by table, (n_i, d).
        entry: what the report says.
    """

    of_rows: Mapping[str, FloatArray]
    entry: Mapping[str, object]

    @property
    def widths(self) -> dict[str, int]:
        """By table, the number of its rows' factors, d."""
        return {name: values.shape[1] for name, values in self.of_rows.items()}


def fit_factors(
    problem: TrainingProblem,
    keys: Mapping[str, TableRows],
    settings: Settings,
    with_effects: Collection[str],
) -> FittedFactors | None:
    """Fit factors to what the scores leave; None where none lower the loss.

    The vectors of scores become those with factors. ``keys`` are those of the tables
    that may have some: of two if the settings name them, else of any two of which one
    is ``with_effects``. Where no key has an effect, keys hardly interact.
    """
    pairs = list(combinations(keys, 2))
    if not settings.factor_tables:
        pairs = [pair for pair in pairs if {*pair} & {*with_effects}]
    candidates = _candidates(
        problem, keys, pairs, are_wanted=bool(settings.factor_tables)
    )
    if not candidates:
        return None
    widths = (settings.factor_width,) if settings.factor_width else WIDTHS
    chosen = choose_factors(
        candidates,
        widths,
        _losses(problem, keys),
        lambda width: generator(settings.seed, Stream.FACTORS, width),
        are_wanted=bool(settings.factor_tables),
    )
    if chosen is None:
        return None
    of_rows = {
        name: keys[name].expand(values) for name, values in chosen.factors.items()
    }
    for rows in problem.scored_rows:
        add_products(rows, of_rows)
    _log(chosen)
    return FittedFactors(of_rows, _entry(chosen))


def _candidates(
    problem: TrainingProblem,
    keys: Mapping[str, TableRows],
    tables_in_pairs: Sequence[tuple[str, str]],
    *,
    are_wanted: bool,
) -> list[KeyFactors]:
    """Return the pairs of tables whose keys may have factors, most pairs of keys first.

    Where a key has hardly more than one partner, its effect says as much. Tables that
    ``are_wanted`` may have factors of any.
    """
    unit = 1.0
    if problem.objective.has_constant_hessian:
        unit = float(np.sqrt(2.0 * problem.train_metrics()["loss"]))
    if not unit > 0.0:
        # the scores leave nothing
        return []
    pairs = (
        KeyFactors(
            problem.rows,
            problem.objective,
            {name: keys[name] for name in tables},
            unit,
        )
        for tables in tables_in_pairs
    )
    candidates = [
        each
        for each in pairs
        if are_wanted or each.pairs >= max(FEWEST_PAIRS, 1 + sum(each.sizes))
    ]
    return sorted(candidates, key=lambda each: -each.pairs)[:MOST_CANDIDATES]


def _losses(
    problem: TrainingProblem, keys: Mapping[str, TableRows]
) -> Callable[[Factors], FloatArray]:
    """Return the function of factors that returns the validating rows' losses, (V,)."""
    validated = problem.validated
    rows = problem.scored_rows[-1].select(problem.validates)

    def losses(factors: Factors) -> FloatArray:
        name = SCORES
        if factors:
            name = _WITH_FACTORS
            of_rows = {table: keys[table].expand(p) for table, p in factors.items()}
            add_products(rows, of_rows, name)
        return validated.weigh(validated.row_values(rows.whole(name)))

    return losses


def _log(chosen: ChosenFactors) -> None:
    """Say what was found."""
    pair = chosen.pair
    log(
        INFO,
        "%d factors of %d and %d keys of %s: validation loss %.4g -> %.4g",
        chosen.width,
        *pair.sizes,
        " and ".join(pair.tables),
        chosen.fall.before,
        chosen.fall.after,
    )


def _entry(chosen: ChosenFactors) -> dict[str, object]:
    """Return what the report says of the factors."""
    pair = chosen.pair
    return {
        "tables": list(pair.tables),
        "width": chosen.width,
        "keys": list(pair.sizes),
        "pairs": pair.pairs,
        "penalty": chosen.least,
        "validation-loss": [chosen.fall.before, chosen.fall.after],
    }
