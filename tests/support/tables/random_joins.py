"""Random joins of tables whose second moments are wanted, and their exchange."""

from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, pairwise

import numpy as np
import pandas as pd

from tests.support.reference.joins import engine_of
from tp_flower.methods.moments.counts import CountedRows, count_joins, sums_by_shard
from tp_flower.methods.moments.exchange import (
    Assembly,
    Contribution,
    EdgeSecret,
    PassRows,
    ShardMasks,
    SummedShard,
    ToldCounts,
)
from tp_flower.methods.moments.terms import passes_without_partner
from tp_flower.methods.moments.tree import Edge, JoinTree

PASSES = ("train", "test")
KEYS = 4  # distinct values of every join key


@dataclass
class Joined:
    """A random join: its tree, and by table keys, words and passes of the rows."""

    tree: JoinTree
    keys: dict[tuple[str, int], np.ndarray]  # of a table at an edge; -1 for NULL
    values: dict[str, np.ndarray]
    split_table: str
    subset: np.ndarray  # of the split table's rows, the number of a pass

    @classmethod
    def draw(cls, rng: np.random.Generator, most_tables: int = 6) -> "Joined":
        count = int(rng.integers(2, most_tables + 1))
        tables = tuple(f"t{number}" for number in range(count))
        edges = []
        outer = set()
        for number in range(1, count):
            parent = int(rng.integers(number))
            edges.append(Edge(tables[parent], tables[number], 0, 0))
            if tables[parent] in outer or rng.random() < 0.3:
                outer.add(tables[number])
        rows = {table: int(rng.integers(1, 7)) for table in tables}
        keys = {
            (table, number): rng.integers(-1, KEYS, size=rows[table])
            for number, edge in enumerate(edges)
            for table in edge[:2]
        }
        values = {
            table: rng.integers(0, 1 << 63, size=(n, rng.integers(1, 4))).astype(
                np.uint64
            )
            for table, n in rows.items()
        }
        split_table = str(rng.choice(tables))
        subset = rng.integers(len(PASSES), size=rows[split_table])
        return cls(
            JoinTree(tables, edges, frozenset(outer)), keys, values, split_table, subset
        )

    def rows_of_join(self) -> dict[str, np.ndarray]:
        """The row of every table behind each joined row, by DuckDB; -1 for none."""
        frames = {}
        for table in self.tree.tables:
            frames[table] = pd.DataFrame({"row": np.arange(len(self.values[table]))})
            for number in self.tree.edges_of(table):
                codes = self.keys[table, number]
                frames[table][f"k{number}"] = pd.array(
                    [None if code < 0 else code for code in codes], "Int64"
                )
        joins = "".join(
            f" {'LEFT ' if edge.right in self.tree.outer else ''}JOIN {edge.right} "
            f"ON {edge.left}.k{number} = {edge.right}.k{number}"
            for number, edge in enumerate(self.tree.edges)
        )
        columns = ", ".join(
            f"COALESCE({table}.row, -1) AS {table}" for table in self.tree.tables
        )
        with engine_of(frames) as engine:
            result = engine.execute(f"SELECT {columns} FROM t0{joins}")
            return {
                name: np.asarray(rows) for name, rows in result.fetchnumpy().items()
            }

    def expected(self, number: int) -> dict[tuple[str, str], np.ndarray]:
        """The moments of a pass, from the built join."""
        rows = self.rows_of_join()
        # a joined row without a row of the split table is trained on
        taken = np.append(self.subset, 0)[rows[self.split_table]] == number
        joined = {
            table: np.vstack([block, np.zeros_like(block[:1])])[rows[table][taken]]
            for table, block in self.values.items()
        }
        pairs = combinations_with_replacement(self.tree.tables, 2)
        return {(i, k): joined[i].T @ joined[k] for i, k in pairs}

    def cut(self, rng: np.random.Generator) -> dict[str, list[slice]]:
        """Random shards of the tables, some of them empty."""
        shards = {}
        for table, block in self.values.items():
            cuts = rng.integers(len(block) + 1, size=rng.integers(3))
            edges = [0, *sorted(cuts.tolist()), len(block)]
            shards[table] = [slice(*pair) for pair in pairwise(edges)]
        return shards

    def count(self) -> dict[str, CountedRows]:
        """The tables' rows with their counts, as a server passes them on."""
        numbers = np.arange(len(PASSES))
        unmatched = {
            place: passes_without_partner(self.tree, *place, self.split_table, numbers)
            for place in ((number, table) for table, number in self.keys)
        }
        weights = {
            table: np.ones((len(PASSES), len(block)), np.int64)
            for table, block in self.values.items()
        }
        weights[self.split_table] = (self.subset == numbers[:, None]).astype(np.int64)
        codes = {(number, table): keys for (table, number), keys in self.keys.items()}
        return count_joins(self.tree, codes, weights, unmatched)

    def exchanged(
        self,
        number: int,
        rows: dict[str, CountedRows] | None = None,
        shards: dict[str, list[slice]] | None = None,
    ) -> dict[tuple[str, str], np.ndarray]:
        """The moments of a pass, by the exchange; with true counts by default."""
        rows = rows or self.count()
        of_pass = {name: PassRows.of(counted, number) for name, counted in rows.items()}
        return Assembly(self.tree, of_pass, self.sent(number, rows, shards)).blocks()

    def sent(
        self,
        number: int,
        rows: dict[str, CountedRows],
        shards: dict[str, list[slice]] | None = None,
    ) -> dict[str, Contribution]:
        """What the tables send in a pass."""
        contributions = {}
        for table, in_exchange in self.summed(rows, shards).items():
            contributions[table] = added_up(
                [
                    aligned(
                        shard.in_pass(number, PASSES[number]).contribution(),
                        shard.rows,
                        rows[table],
                        number,
                    )
                    for shard in in_exchange
                ]
            )
        return contributions

    def summed(
        self,
        rows: dict[str, CountedRows],
        shards: dict[str, list[slice]] | None = None,
    ) -> dict[str, list[SummedShard]]:
        """The shards of every table in the exchange."""
        shards = shards or {table: [slice(None)] for table in self.tree.tables}
        by_shard = {
            (edge, table): sums_by_shard(
                counted.edges[edge].codes,
                counted.counts(edge),
                counted.edges[edge].keys,
                shards[table],
            )
            for table, counted in rows.items()
            for edge in counted.edges
        }
        columns = {table: block.shape[1] for table, block in self.values.items()}
        tags = np.random.default_rng(9).integers(
            0, 1 << 63, size=(len(self.tree.edges), KEYS, 2), dtype=np.uint64
        )
        in_exchange: dict[str, list[SummedShard]] = {}
        for table, counted in rows.items():
            others = {
                edge: self.tree.edges[edge].other(table) for edge in counted.edges
            }
            told = {
                edge: ToldCounts(
                    by_shard[edge, other]
                    if len(shards[other]) > 1
                    else counted.edges[edge].incoming[..., None],
                    by_shard[edge, table],
                )
                for edge, other in others.items()
            }
            in_exchange[table] = []
            for shard, span in enumerate(shards[table]):
                edges = {
                    edge: replace(
                        of_edge,
                        codes=of_edge.codes[span],
                        incoming=told[edge].incoming.sum(axis=-1),
                    )
                    for edge, of_edge in counted.edges.items()
                }
                of_shard = CountedRows(edges, counted.weights[:, span])
                summed = SummedShard(
                    table,
                    self.tree,
                    of_shard,
                    self.values[table][span],
                    columns,
                    told,
                    {
                        edge: EdgeSecret(bytes([edge]) * 32, tags[edge, : of_edge.keys])
                        for edge, of_edge in counted.edges.items()
                    },
                    ShardMasks(b"k" * 32, shard, len(shards[table])),
                )
                in_exchange[table].append(summed)
        return in_exchange


def aligned(
    contribution: Contribution, shard: CountedRows, table: CountedRows, number: int
) -> Contribution:
    """The sums of a shard by the keys that any shard of the table joins."""
    sums = {}
    for (edge, source), block in contribution.sums.items():
        is_joined = table.is_joined(edge)[number]
        places = (np.cumsum(is_joined) - 1)[shard.is_joined(edge)[number]]
        sums[edge, source] = np.zeros((is_joined.sum(), block.shape[1]), np.uint64)
        sums[edge, source][places] = block
    return Contribution(sums, contribution.products)


def added_up(contributions: list[Contribution]) -> Contribution:
    total = contributions[0]
    for other in contributions[1:]:
        total = Contribution(
            {place: block + other.sums[place] for place, block in total.sums.items()},
            {
                pair: block + other.products[pair]
                for pair, block in total.products.items()
            },
        )
    return total
