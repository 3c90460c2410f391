"""The second moments of a join from padded sums equal those of the built join."""

from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, pairwise

import duckdb
import numpy as np
import pandas as pd
import pytest

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
from tp_flower.methods.moments.words import inner

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
        with duckdb.connect() as connection:
            for table in self.tree.tables:
                frame = pd.DataFrame({"row": np.arange(len(self.values[table]))})
                for number in self.tree.edges_of(table):
                    codes = self.keys[table, number]
                    frame[f"k{number}"] = pd.array(
                        [None if code < 0 else code for code in codes], "Int64"
                    )
                connection.register(table, frame)
            joins = "".join(
                f" {'LEFT ' if edge.right in self.tree.outer else ''}JOIN {edge.right} "
                f"ON {edge.left}.k{number} = {edge.right}.k{number}"
                for number, edge in enumerate(self.tree.edges)
            )
            columns = ", ".join(
                f"COALESCE({table}.row, -1) AS {table}" for table in self.tree.tables
            )
            result = connection.execute(f"SELECT {columns} FROM t0{joins}")
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
        contributions = {}
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
            sent = []
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
                contribution = summed.in_pass(number, PASSES[number]).contribution()
                sent.append(aligned(contribution, of_shard, counted, number))
            contributions[table] = added_up(sent)
        return contributions


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


@pytest.mark.cases("0", "1", "2", "3")
@pytest.mark.parametrize("seed", range(20))
def test_the_blocks_are_those_of_the_built_join(seed):
    rng = np.random.default_rng(seed)
    for _ in range(50):
        joined = Joined.draw(rng)
        for number in range(len(PASSES)):
            expected = joined.expected(number)
            found = joined.exchanged(number)
            cut = joined.exchanged(number, shards=joined.cut(rng))
            assert found.keys() == expected.keys()
            for pair, block in expected.items():
                np.testing.assert_array_equal(found[pair], block, err_msg=str(pair))
                np.testing.assert_array_equal(cut[pair], block, err_msg=str(pair))


@pytest.mark.parametrize("bits", [1, 15, 16, 17, 31, 47, 48, 62, 64])
def test_words_multiply_as_integers_do(bits):
    rng = np.random.default_rng(0)
    low = -(1 << (bits - 1))
    left = rng.integers(low, -low - 1, size=(70_000, 3), endpoint=True).view(np.uint64)
    left[:3] = np.array([low, -low - 1, 0]).view(np.uint64)[:, None]
    right = rng.integers(0, 1 << 64, size=(70_000, 5), dtype=np.uint64)
    for other in (left, right):
        np.testing.assert_array_equal(inner(left, other), left.T @ other)


@pytest.mark.parametrize("seed", range(5))
def test_counts_that_one_end_alone_is_told_leave_uniform_words(seed):
    """A server that weighs a table's rows as it likes reads nothing of them."""
    tree = JoinTree(("a", "b"), [Edge("a", "b", 0, 0)])
    rng = np.random.default_rng(seed)
    keys = {("a", 0): np.array([0, 1, 2]), ("b", 0): np.array([0, 1, 1, 2])}
    values = {
        table: rng.integers(0, 1 << 20, size=(len(rows), 2)).astype(np.uint64)
        for (table, _), rows in keys.items()
    }
    joined = Joined(tree, keys, values, "a", np.zeros(3, np.int64))
    honest = joined.exchanged(0)
    told = joined.count()
    edge = told["b"].edges[0]
    # the first row of b alone counts twice
    lied = replace(edge, incoming=edge.incoming + np.array([[1, 0, 0], [0, 0, 0]]))
    told["b"] = CountedRows({0: lied}, told["b"].weights)
    weighted = told["b"].multiplicity[0].astype(np.uint64)[:, None] * values["b"]
    read = joined.exchanged(0, told)
    assert not np.any(read["b", "b"] == inner(weighted, values["b"]))
    for pair, block in honest.items():
        assert not np.any(read[pair] == block)


def test_a_lie_about_one_join_that_is_consistent_at_others_leaves_uniform_words():
    """A server that leaves all but one row of c out reads no sums over its partners."""
    tree = JoinTree(("a", "b", "c"), [Edge("a", "b", 0, 0), Edge("b", "c", 1, 0)])
    rng = np.random.default_rng(1)
    keys = {
        ("a", 0): np.array([0, 1]),
        ("b", 0): np.array([0, 0, 1, 1]),
        ("b", 1): np.array([0, 1, 2, 1]),
        ("c", 1): np.array([0, 1, 2]),
    }
    values = {
        table: rng.integers(0, 1 << 20, size=(len(rows), 2)).astype(np.uint64)
        for (table, _), rows in keys.items()
    }
    joined = Joined(tree, keys, values, "b", np.zeros(4, np.int64))
    told = joined.count()
    only_first = replace(told["b"].edges[1], incoming=np.array([[1, 0, 0], [0, 0, 0]]))
    told["b"] = CountedRows({0: told["b"].edges[0], 1: only_first}, told["b"].weights)
    consistent = replace(told["a"].edges[0], incoming=told["b"].outgoing[0])
    told["a"] = CountedRows({0: consistent}, told["a"].weights)
    sent = joined.sent(0, told)
    for table in "ab":
        weights = told[table].multiplicity[0].astype(np.uint64)[:, None]
        wanted = inner(weights * values[table], values[table])
        assert wanted.any()
        blocks = [each.products[table, table] for each in sent.values()]
        assert not np.any(np.sum(blocks, axis=0) == wanted)
    # the sums of both ends of the honest join fit together
    product = inner(sent["a"].sums[0, "a"], sent["b"].sums[0, "b"])
    read = product - np.sum([each.products["a", "b"] for each in sent.values()], axis=0)
    assert not np.any(read == inner(values["a"][:1], values["b"][:1]))
