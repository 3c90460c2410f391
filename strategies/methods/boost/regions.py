"""Regions at the server: which table is divided, and the pairs that take rows' place.

Every table that may have regions is asked for them once, in one round. The server fits
shrunken effects of the regions, then of the cells that the regions of two tables make:
where cells lower the loss of the rows that validate, the tables interact. The table
that interacts most is the one whose regions all others read.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from logging import INFO
from typing import Final

import numpy as np
from flwr.common.logger import log
from msgspec.structs import replace as replace_struct

from strategies.run.exchange import Replies, Requests, ask
from strategies.run.replies import array_of
from strategies.run.sites import Inventory
from strategies.setup.problem import SCORES, PartRows, TrainedTable, TrainingProblem
from strategies.setup.splitting import table_named
from strategies.training.outcome import DividedTable
from strategies.training.strategy import TrainingStrategy
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import SettingsError
from tp_flower.joins.mapping import RowWeights, TableMapping, TableRows
from tp_flower.joins.pairs import NO_REGION, TablePairs, cells, pair_rows
from tp_flower.learning.row_effects import RowEffects, choose_penalties
from tp_flower.methods.boost.messages import (
    LOCAL,
    BoostStep,
    Growth,
    PairsPart,
    PairsRequest,
    RegionsRequest,
    RegionsUpdate,
)
from tp_flower.methods.boost.regions import region_tables
from tp_flower.methods.boost.settings import EVEN, BoostSettings, regions_by_rows
from tp_flower.protocol.packet import pack_bits, row_numbers
from tp_flower.query import BoundQuery
from tp_flower.settings import Settings
from tp_flower.settings.declare import AUTO
from tp_flower.settings.training import NONE

MOST_PAIRED_VALUES: Final = 1 << 28
"""Values of a table's pairs, encoded: 1 GiB of float32, which its site would hold."""
NEAR: Final = 0.9
"""Of the largest gain: if the label table's is so near, it is the one to divide."""
LEAST_GAIN: Final = 0.005
"""Of the validation loss, by the cells of two tables' regions: less is not worth it."""


REFUSED: Final = (
    "regions: table {!r} cannot be divided: {}; set regions = 'none', or name another "
    "table"
)


def divisible_tables(
    settings: Settings,
    bound: BoundQuery,
    inventory: Inventory,
    telling: Sequence[str],
) -> list[str]:
    """Return the tables that may be divided into regions, of which others read.

    Those whose shards tell the label, ``telling``, may not, nor those whose shards
    share their trees.

    Raises:
        SettingsError: the one that the settings name may not.
    """
    wanted = region_tables(settings)
    if wanted is None or not bound.joins:
        return []
    names = [table_named(bound, alias, "regions") for alias in wanted] or bound.tables
    divisible = []
    for table in names:
        refusal = _refusal(settings, bound, inventory, table)
        if table in telling:
            refusal = "its shards tell the label"
        if not refusal:
            divisible.append(table)
        elif wanted:
            raise SettingsError(REFUSED.format(table, refusal))
    return divisible


def _refusal(
    settings: Settings, bound: BoundQuery, inventory: Inventory, table: str
) -> str:
    """Return why a table may not be divided into regions; "" if it may."""
    shards_of_table = [
        shard
        for fragment in bound.fragments_of(table)
        for shard in inventory.shards_of(fragment.name)
    ]
    others = [
        shard
        for name in bound.tables
        if name != table
        for fragment in bound.fragments_of(name)
        for shard in inventory.shards_of(fragment.name)
    ]
    if closed := [shard.site for shard in shards_of_table if not shard.regions]:
        return f"the policy of {closed[0]!r} allows no regions (releases.regions)"
    if blind := [shard for shard in others if not shard.sees_regions]:
        return (
            f"the policy of table {blind[0].table!r} at {blind[0].site!r} lets none of "
            "its rows be scored by regions (sees-regions)"
        )
    if limited := [shard for shard in (*shards_of_table, *others) if shard.ranks]:
        return (
            f"the policy of table {limited[0].table!r} at {limited[0].site!r} limits "
            "how many scores of a row leave (scores-per-rank), and a row would have "
            "one for each region"
        )
    if len(shards_of_table) > 1 and settings.lou not in (AUTO, LOCAL):
        return f"its shards share their trees (lou = {settings.lou})"
    return ""


@dataclass(frozen=True)
class Regions:
    """The regions of a table's rows, numbered over its shards.

    Attributes:
        of_rows: uint8 (n,), of the rows that take part.
        first: by part, the number of the shard's first region.
        count: of all shards.
    """

    of_rows: AnyArray
    first: Mapping[int, int]
    count: int


class Division:
    """What becomes of regions in a run: who is asked for them, and who is divided.

    Attributes:
        divisible: the tables that may be divided.
        divided: the table that is, if one is.
        since: the first epoch in which rows are pairs.
    """

    def __init__(
        self, run: TrainingStrategy, divisible: Sequence[str], label_table: str
    ) -> None:
        self.divisible = divisible
        self.divided: DividedTable | None = None
        self.since = 0
        self._run = run
        self._label_table = label_table
        self._regions: Mapping[str, Regions] = {}
        self._pairs: Mapping[str, TablePairs] = {}

    def tables_of(self, problem: TrainingProblem) -> dict[str, TrainedTable]:
        """Return the tables that are asked for regions: those with features."""
        tables = ((name, problem.tables[name]) for name in self.divisible)
        return {name: table for name, table in tables if table.features}

    def ask(
        self,
        problem: TrainingProblem,
        derivatives: dict[int, BoostStep],
        growth: Growth,
        joined_rows: int,
    ) -> Generator[Requests, Replies, None]:
        """Ask for the regions of the tables that may be divided."""
        tables = self.tables_of(problem)
        # trees of a second epoch of trees would read them
        if not tables or self._run.settings.epochs < 2:
            return
        shards = max(len(table.parts) for table in tables.values())
        leaves = max(regions_by_rows(joined_rows) // shards, 2)
        rows = joined_rows // (EVEN * leaves * shards)
        one_tree = replace_struct(
            growth,
            trees=1,
            rate=1.0,
            leaves=leaves,
            least_rows=max(rows, growth.least_rows),
        )
        request = RegionsRequest(growth=one_tree, parts=derivatives)
        replies = yield self._run.request(ask(request, problem.parts))
        by_table = {
            name: read_regions(table, replies) for name, table in tables.items()
        }
        self._regions = {n: each for n, each in by_table.items() if each is not None}

    def divide(
        self, problem: TrainingProblem
    ) -> Generator[Requests, Replies, TrainingProblem | None]:
        """Divide a table into its regions, if that helps.

        Return the problem over pairs of rows and regions; None if it stays as it was.
        """
        regions = self._regions
        if not regions:
            return None
        chosen = self._run.chosen
        divided = next(iter(regions))
        if len(regions) > 1:
            divided = most_interacting(problem, regions, self._label_table)
        if not divided:
            chosen["regions"] = NONE
            return None
        paired, pairs = pair_tables(problem, divided, regions[divided])
        values = max(
            len(each.rows) * paired.tables[name].features
            for name, each in pairs.items()
        )
        is_named = self._run.settings.of(BoostSettings).regions != AUTO
        if values > MOST_PAIRED_VALUES and not is_named:
            chosen["regions"] = f"{NONE}: the pairs would have {values:,} values"
            return None
        request = PairsRequest(table=divided, parts=pair_parts(problem, pairs, paired))
        yield self._run.request(ask(request, problem.parts))
        self._pairs = pairs
        self.divided = DividedTable(divided, regions[divided].first)
        self.since = self._run.epoch
        chosen["regions"] = {
            "table": divided,
            "regions": regions[divided].count,
            "pairs": {name: len(each.rows) for name, each in pairs.items()},
        }
        return paired

    def keys(self, keys: Mapping[str, TableRows]) -> dict[str, TableRows]:
        """Return the keys of tables' rows as those of their pairs."""
        return {name: self._pairs[name].keys(each) for name, each in keys.items()}

    def of_epoch(self, epoch: int) -> DividedTable | None:
        """Return the table whose regions the saved models of an epoch read, if any do.

        Those of the epoch before there were pairs are copied once there are.
        """
        return self.divided if epoch >= self.since - 1 else None


def read_regions(table: TrainedTable, replies: Replies) -> Regions | None:
    """Return the regions that the shards of a table have sent; None of fewer than 2."""
    of_rows = np.zeros(table.total_rows, np.int64)
    first: dict[int, int] = {}
    count = 0
    for part, rows in zip(table.parts, table.rows, strict=True):
        update = replies.body(part, RegionsUpdate)
        first[part.number] = count
        if update.regions is not None:
            numbers = array_of(replies, part, "regions", (rows.total,))
            of_rows[rows.slice] = count + np.minimum(numbers, update.count - 1)
        else:
            of_rows[rows.slice] = count
        count += update.count
    if not len(table.parts) < count < NO_REGION:
        return None
    return Regions(of_rows.astype(np.uint8), first, count)


def most_interacting(
    problem: TrainingProblem, regions: Mapping[str, Regions], label_table: str
) -> str:
    """Return the table that interacts most with others; "" where none does."""
    if not problem.validates.any():
        return ""
    pairs = list(combinations(regions, 2))
    effects, losses = _effects_of_cells(problem, regions, pairs)
    choose_penalties(effects, list(regions), losses, are_wanted=True)
    gains = dict.fromkeys(regions, 0.0)
    for pair in pairs:
        name = _cell_name(pair)
        fall = choose_penalties(effects, [name], losses).get(name)
        if fall is None:
            continue
        gain = (fall.before - fall.after) / abs(fall.before)
        log(INFO, "Regions of %s and %s: %.2g of the loss", *pair, gain)
        if gain >= LEAST_GAIN:
            for table in pair:
                gains[table] += gain
    most = max(gains.values())
    if not most:
        return ""
    if gains.get(label_table, 0.0) >= NEAR * most:
        return label_table
    return max(gains, key=lambda table: gains[table])


def _effects_of_cells(
    problem: TrainingProblem,
    regions: Mapping[str, Regions],
    pairs: Sequence[tuple[str, str]],
) -> tuple[RowEffects, Callable[[], FloatArray]]:
    """Return effects of regions and of the cells of two, and the validation losses.

    To them regions and cells are tables, and their rows the keys.
    """
    over_regions = []
    for rows in problem.scored_rows:
        of_joined = {
            name: _of_joined(rows.mapping, name, each) for name, each in regions.items()
        }
        tables = {n: TableRows(of_joined[n], NO_REGION + 1) for n in regions}
        for pair in pairs:
            first, second = (of_joined[name] for name in pair)
            tables[_cell_name(pair)] = cells(first, second)
        copied = rows.over(TableMapping(tables))
        copied.fill(SCORES, rows.whole(SCORES))
        over_regions.append(copied)
    keys = {
        name: TableRows(np.arange(table.rows, dtype=np.int32), table.rows)
        for name, table in over_regions[0].mapping.tables.items()
    }
    effects = RowEffects(over_regions, problem.objective, keys)
    return effects, partial(problem.validating_losses, over_regions[-1])


def _of_joined(mapping: TableMapping, table: str, regions: Regions) -> AnyArray:
    """Return the region of each joined row, int32 (N,)."""
    region = mapping.tables[table].expand(regions.of_rows, absent=NO_REGION)
    return region.astype(np.int32)


def _cell_name(pair: tuple[str, str]) -> str:
    return " x ".join(pair)


def pair_tables(
    problem: TrainingProblem, divided: str, regions: Regions
) -> tuple[TrainingProblem, dict[str, TablePairs]]:
    """Return the problem over pairs of rows and regions, and the pairs by table."""
    of_joined = [
        _of_joined(rows.mapping, divided, regions) for rows in problem.scored_rows
    ]
    of_held_out = of_joined[-1]
    pairs = {
        name: pair_rows(
            problem.train.tables[name],
            None if problem.test is None else problem.test.tables[name],
            (of_joined[0], of_held_out),
            [rows.slice.stop for rows in table.rows],
        )
        for name, table in problem.tables.items()
    }
    train = TableMapping({name: each.train for name, each in pairs.items()})
    test = None
    if problem.test is not None:
        tested = {n: each.test for n, each in pairs.items() if each.test is not None}
        test = TableMapping(tested)
    tables = {
        name: _paired_table(table, pairs[name], is_divided=name == divided)
        for name, table in problem.tables.items()
    }
    region = f"region of {divided}"
    encoders = {
        name: columns if name == divided else columns.with_feature(region)
        for name, columns in problem.encoders.items()
    }
    weighting = problem.weighting
    if weighting.train is not None:
        weights = RowWeights.of(weighting.train.rows, train)
        weighting = replace(weighting, train=weights)
    paired = problem.over(tables, (train, test), encoders=encoders, weighting=weighting)
    return paired, pairs


def _paired_table(
    table: TrainedTable, pairs: TablePairs, *, is_divided: bool
) -> TrainedTable:
    """Return a table whose rows are pairs; all but the divided one read the region."""
    rows = []
    start = 0
    for shard in table.rows:
        total = len(pairs.of_rows(shard.slice))
        span = slice(start, start + total)
        trained = int(np.count_nonzero(pairs.is_trained[span]))
        rows.append(PartRows(start, trained, total, pairs.is_tested[span]))
        start = span.stop
    features = table.features + (not is_divided)
    return replace(table, rows=tuple(rows), features=features)


def pair_parts(
    problem: TrainingProblem, pairs: Mapping[str, TablePairs], paired: TrainingProblem
) -> dict[int, PairsPart]:
    """Return what each part is told of its pairs, by number."""
    weights = paired.weighting.train
    parts: dict[int, PairsPart] = {}
    for name, table in paired.tables.items():
        each = pairs[name]
        counts = paired.train.tables[name].multiplicity
        for part, before, rows in zip(
            table.parts, problem.tables[name].rows, table.rows, strict=True
        ):
            span, trained = rows.slice, rows.trained_slice
            mass: dict[str, AnyArray]
            if weights is None:
                mass = {"multiplicity": counts[trained].astype(np.int32)}
            else:
                mass = {"masses": row_numbers(weights.multiplicity[name][trained])}
            parts[part.number] = PairsPart(
                rows=(each.rows[span] - before.start).astype(np.int32),
                regions=each.regions[span],
                tested=pack_bits(each.is_tested[span]),
                **mass,
            )
    return parts
