"""The second moments of a join from padded sums equal those of the built join."""

from dataclasses import dataclass, replace
from itertools import combinations_with_replacement

import duckdb
import numpy as np
import pandas as pd
import pytest

from tp_flower.methods.moments.counts import CountedRows, count_joins
from tp_flower.methods.moments.exchange import (
    Assembly,
    EdgeSecret,
    PassRows,
    SummedTable,
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
        self, number: int, rows: dict[str, CountedRows] | None = None
    ) -> dict[tuple[str, str], np.ndarray]:
        """The moments of a pass, by the exchange, with counts as they are by default."""
        rows = rows or self.count()
        columns = {table: block.shape[1] for table, block in self.values.items()}
        tags = np.random.default_rng(9).integers(
            0, 1 << 63, size=(len(self.tree.edges), KEYS, 2), dtype=np.uint64
        )
        contributions = {}
        for table, counted in rows.items():
            secrets = {
                edge: EdgeSecret(bytes([edge]) * 32, tags[edge, : of_edge.keys])
                for edge, of_edge in counted.edges.items()
            }
            summed = SummedTable(
                table, self.tree, counted, self.values[table], columns, secrets
            )
            in_pass = summed.in_pass(number, PASSES[number])
            contributions[table] = in_pass.contribution()
        of_pass = {name: PassRows.of(counted, number) for name, counted in rows.items()}
        return Assembly(self.tree, of_pass, contributions).blocks()


@pytest.mark.cases("0", "1", "2", "3")
@pytest.mark.parametrize("seed", range(20))
def test_the_blocks_are_those_of_the_built_join(seed):
    rng = np.random.default_rng(seed)
    for _ in range(50):
        joined = Joined.draw(rng)
        for number in range(len(PASSES)):
            expected = joined.expected(number)
            found = joined.exchanged(number)
            assert found.keys() == expected.keys()
            for pair, block in expected.items():
                np.testing.assert_array_equal(found[pair], block, err_msg=str(pair))


def test_words_multiply_as_integers_do():
    rng = np.random.default_rng(0)
    left, right = (
        rng.integers(0, 1 << 64, size=(70_000, columns), dtype=np.uint64)
        for columns in (3, 5)
    )
    np.testing.assert_array_equal(inner(left, right), left.T @ right)


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
