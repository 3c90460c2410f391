"""Trees of bins at the server: which tables show theirs, and what the trees gain.

Where owners let the bin numbers of their rows leave, the server asks for them once,
after training. It grows trees on the bins of all tables
(:mod:`tp_flower.learning.joint_trees`) at the best epoch's scores, and keeps them if
they lower the loss of the rows that validate.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO
from typing import Final

import numpy as np
from flwr.common.logger import log

from strategies.run.exchange import Part, Replies, Requests, ask
from strategies.run.replies import bins_of, refuse
from strategies.run.sites import Inventory
from strategies.setup.problem import SCORES, TrainingProblem
from strategies.training.row_effects import restore_scores
from tp_flower.arrays import FEWEST_BINS, NO_BIN
from tp_flower.features.bins import BinArray
from tp_flower.learning.joint_trees import (
    SHARE,
    Binned,
    JointTrees,
    Validation,
    grow_joint,
    share_of,
)
from tp_flower.learning.row_effects import Fall
from tp_flower.protocol.training_messages import BinnedPart, BinsPart, BinsRequest
from tp_flower.settings import Settings

LARGEST_SEED: Final = 1 << 31  # of LightGBM, not included
NO_BINS: Final = (
    "bins: the tables have no feature whose bin number could leave, so no trees grow "
    "on them"
)


@dataclass(frozen=True)
class TableBins:
    """The bin numbers of a table's rows that take part.

    Attributes:
        numbers: (n_i, c_i).
        categorical: the columns whose numbers have no order.
        most: N, into how many bins a column is divided at most.
    """

    numbers: BinArray
    categorical: tuple[int, ...]
    most: int


@dataclass(frozen=True)
class FittedTrees:
    """The trees that a model has beside its tables, and what they gain.

    Attributes:
        trees: of the columns of the tables' bins, one table after the other.
        most: by table, into how many bins its columns are divided.
        columns: by table, the columns of its bins.
        entry: what the report says.
    """

    trees: JointTrees
    most: Mapping[str, int]
    columns: Mapping[str, int]
    entry: dict[str, object]


def bins_of_tables(
    parts: Mapping[str, Sequence[Part]],
    widths: Mapping[str, int],
    settings: Settings,
    inventory: Inventory,
) -> dict[str, int]:
    """Return the tables that are to show bins, and how many a column has at most.

    By default these are two tables or more whose policies name a number.

    Args:
        parts: by table, its shards.
        widths: by table, its encoded columns.
        settings: of the run.
        inventory: what the sites say of their policies.
    """
    shards = inventory.by_place
    most = {}
    for name, of_table in parts.items():
        named = min(shards[part.node, part.shard].bins for part in of_table)
        bins = settings.bins_of(named)
        if widths[name] and bins >= FEWEST_BINS:
            most[name] = bins
    if len(most) < 2 and not settings.most_bins:
        return {}
    return most


def ask_bins(
    problem: TrainingProblem, most: Mapping[str, int]
) -> Generator[Requests, Replies, dict[str, TableBins]]:
    """Ask for the bin numbers of tables' rows, and return them."""
    parts = [part for name in most for part in problem.tables[name].parts]
    request = BinsRequest({part.number: BinsPart(most[part.table]) for part in parts})
    replies = yield ask(request, parts)
    binned = {}
    for name, bins in most.items():
        table = problem.tables[name]
        bodies = [replies.body(part, BinnedPart) for part in table.parts]
        first = bodies[0]
        columns = first.numbers.shape[1]
        for part, body, rows in zip(table.parts, bodies, table.rows, strict=True):
            if body.categorical != first.categorical:
                raise refuse(part, "other columns of bins than another shard")
            bins_of(replies, part, (rows.total, columns), bins)
        if max(first.categorical, default=-1) >= columns:
            raise refuse(table.parts[0], "a column of bins that is not there")
        binned[name] = TableBins(
            np.concatenate([body.numbers for body in bodies]),
            tuple(first.categorical),
            bins,
        )
    return binned


def fit_trees(
    problem: TrainingProblem, tables: Mapping[str, TableBins], settings: Settings
) -> FittedTrees | None:
    """Grow trees beside the best model; None, and its scores, where they do not help.

    If a run asks for a number of bins, they need not lower the validation loss by more
    than chance.
    """
    held_out = problem.held_out_rows
    if held_out is None:
        return None
    restore_scores(problem)
    numbers = {name: table.numbers for name, table in tables.items()}
    columns = {name: each.shape[1] for name, each in numbers.items()}
    first = 0
    categorical: list[int] = []
    for name, table in tables.items():
        categorical += [first + column for column in table.categorical]
        first += columns[name]
    validates = np.flatnonzero(problem.validates)
    held_out_bins = held_out.mapping.beside(numbers, NO_BIN)
    before = problem.validating_losses(held_out)
    for rows in problem.scored_rows:
        rows.fill(SCORES, share_of(rows.whole(SCORES), problem.base_score))
    start = held_out.take(SCORES, validates)
    training = Binned(problem.rows.mapping.beside(numbers, NO_BIN), categorical)
    validation = Validation(held_out_bins[validates], start, problem.validated)
    grown = grow_joint(
        problem.rows,
        problem.objective,
        training,
        validation,
        seed=settings.seed % LARGEST_SEED,
    )
    fall = Fall.between(before, before if grown is None else grown.losses)
    is_kept = fall.is_notable or (settings.most_bins and fall.after < fall.before)
    if grown is None or not is_kept:
        restore_scores(problem)
        return None
    trees = grown.trees
    log(
        INFO,
        "%d trees on the bins of %s: validation loss %.4g -> %.4g",
        trees.trees,
        ", ".join(tables),
        fall.before,
        fall.after,
    )
    for rows, bins in zip(
        problem.scored_rows, (training.bins, held_out_bins), strict=True
    ):
        rows.fill(SCORES, rows.whole(SCORES) + trees.scores(bins))
    most = {name: table.most for name, table in tables.items()}
    entry: dict[str, object] = {
        "tables": {
            name: {"bins": most[name], "columns": columns[name]} for name in tables
        },
        "trees": trees.trees,
        "leaves": trees.leaves,
        "tables-share": SHARE,
        "validation-loss": [fall.before, fall.after],
    }
    return FittedTrees(trees, most, columns, entry)
