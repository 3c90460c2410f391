"""Joined rows at workers, some of which die, against joined rows at the server."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal

from tests.support.tables.mappings import table_rows
from tests.support.tables.workers import WorkersHere
from tp_flower.errors import WorkerError
from tp_flower.joins import rows as joins
from tp_flower.joins import spread_rows
from tp_flower.joins.mapping import TableMapping
from tp_flower.joins.rows import JoinedRows
from tp_flower.joins.spread_rows import JournalEntry, SpreadRows, joined_rows, needed
from tp_flower.joins.workers import WorkerLostError

ROWS, LOCAL = 41, 9


def drawn(seed: int, rows: int = ROWS) -> tuple[TableMapping, dict[str, np.ndarray]]:
    """The label's table in order, one without order, one that some rows lack."""
    rng = default_rng(seed)
    mapping = TableMapping(
        {
            "label": table_rows(np.sort(rng.integers(0, rows, rows)), rows),
            "any": table_rows(rng.integers(0, LOCAL, rows), LOCAL),
            "left": table_rows(rng.integers(-1, LOCAL, rows), LOCAL),
        }
    )
    return mapping, {"target": rng.normal(size=(rows, 1))}


def step(length):
    def kernel(vectors, expanded):
        scores = vectors["scores"] + length * expanded - vectors["target"]
        return {"scores": scores, "squares": scores**2}, [scores.sum(), len(scores)]

    return kernel


def act(rows: JoinedRows, mapping: TableMapping, seed: int, until) -> list[np.ndarray]:
    """Do everything that joined rows can do; return what can be seen of it."""
    rng = default_rng(seed)
    seen = []
    rows.fill("scores", np.zeros(1))
    for number in range(3):
        until(number)
        local = {n: rng.normal(size=(size, 1)) for n, size in rows.sizes.items()}
        total, sums = rows.run(step(0.5 + number), local, sums_of="scores")
        seen += [total, *sums.values(), rows.whole("scores").copy()]
    until(3)
    rows.fill("drawn", rng.normal(size=(rows.rows, 2)))
    (most,), _ = rows.run(lambda v, _: ({}, [v["drawn"].max()]), combine="max")
    until(4)
    some = rng.permutation(rows.rows)[:7]
    seen += [most, rows.take("drawn", some), rows.sums("squares", ["left"])["left"]]
    until(5)
    renumbered = {
        name: each.renumber(np.arange(each.rows)[::-1], each.rows)
        for name, each in mapping.tables.items()
    }
    over = rows.over(TableMapping(renumbered))
    until(6)
    over.run(lambda v, _: ({"scores": v["scores"] + 1.0}, ()))
    until(7)
    seen += list(over.sums("scores").values())
    local = {"any": rng.normal(size=(LOCAL, 1)), "left": rng.normal(size=(LOCAL, 1))}
    over.run(lambda _, e: ({"each": e[:, 0] * 2.0 + e[:, 1]}, ()), local, by_table=True)
    until(8)
    seen += [over.whole("each"), over.whole("scores"), over.whole("target")]
    mask = rng.random(rows.rows) < 0.5
    chosen = over.select(mask)
    return [*seen, chosen.whole("each"), *chosen.sums("scores").values()]


@settings(max_examples=25)
@given(
    workers=st.integers(1, 6),
    seed=st.integers(0, 99),
    deaths=st.dictionaries(st.integers(0, 5), st.integers(0, 25), max_size=3),
    killed=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5)), max_size=4),
    journal=st.sampled_from([0, 1 << 26]),
    is_single=st.booleans(),
)
def test_workers_that_die_change_nothing(
    workers, seed, deaths, killed, journal, is_single
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joins, "PART_ROWS", 4)
        patch.setattr(spread_rows, "LEAST_JOURNAL", journal)
        mapping, vectors = drawn(seed)
        here = JoinedRows(mapping, dict(vectors), is_single=is_single)
        expected = act(here, mapping, seed, lambda _: None)
        there = WorkersHere(workers)
        there.dies_at = deaths

        def kill(moment: int) -> None:
            for when, number in killed:
                if when == moment and number < workers:
                    there.kill(number)

        rows = joined_rows(mapping, vectors, is_single=is_single, workers=there)
        assert isinstance(rows, SpreadRows)
        seen = act(rows, mapping, seed, kill)
    for one, other in zip(expected, seen, strict=True):
        assert_allclose(other, one, rtol=1e-12, atol=1e-12)
    assert list(vectors) == ["target"]


def test_a_worker_that_dies_again_and_again_ends_the_run(monkeypatch):
    monkeypatch.setattr(joins, "PART_ROWS", 4)
    mapping, vectors = drawn(0)
    lost = []
    there = WorkersHere(2, lost.append)
    rows = joined_rows(mapping, vectors, workers=there)
    rows.fill("scores", np.zeros(1))
    monkeypatch.setattr(there, "start", lambda _: None)
    there.kill(1)
    with pytest.raises(WorkerError, match="has died 3 times over one step"):
        rows.sums("scores")
    assert lost == [1, 1]


def test_a_call_whose_result_is_lost_changes_vectors_once(monkeypatch):
    """Though the worker has carried it out, and lives."""
    monkeypatch.setattr(joins, "PART_ROWS", 4)
    mapping, vectors = drawn(0)
    there = WorkersHere(2)
    rows = joined_rows(mapping, vectors, workers=there)
    rows.fill("scores", np.zeros(1))
    fetch, losses = there.fetch, ["the result is lost"]

    def lose_one(future):
        if losses:
            raise WorkerLostError(losses.pop())
        return fetch(future)

    monkeypatch.setattr(there, "fetch", lose_one)
    rows.run(lambda v, _: ({"scores": v["scores"] + 1.0}, ()))
    assert_array_equal(rows.whole("scores"), np.ones((ROWS, 1)))
    assert there.generations == [1, 0]


def test_errors_of_kernels_are_those_of_the_server(monkeypatch):
    monkeypatch.setattr(joins, "PART_ROWS", 4)
    mapping, vectors = drawn(0)
    rows = joined_rows(mapping, vectors, workers=WorkersHere(3))
    with pytest.raises(KeyError, match="scores"):
        rows.run(lambda v, _: ({}, [v["scores"].sum()]))


def test_few_rows_and_those_of_one_part_stay_at_the_server(monkeypatch):
    monkeypatch.setattr(joins, "PART_ROWS", ROWS)
    mapping, vectors = drawn(0)
    there = WorkersHere(2)
    assert type(joined_rows(mapping, vectors, workers=there)) is JoinedRows
    monkeypatch.setattr(joins, "PART_ROWS", ROWS - 1)
    assert type(joined_rows(mapping, vectors, workers=there)) is SpreadRows
    alone = joined_rows(mapping, vectors, is_one_part=True, workers=there)
    assert type(alone) is JoinedRows
    assert type(joined_rows(mapping, vectors)) is JoinedRows


def test_partitions_end_with_the_rows_they_are_of(monkeypatch):
    monkeypatch.setattr(joins, "PART_ROWS", 4)
    mapping, vectors = drawn(0)
    there = WorkersHere(2)
    rows = joined_rows(mapping, vectors, workers=there)
    rows.fill("scores", np.zeros(1))
    over = rows.over(mapping)
    over.whole("scores")
    assert [len(each) for each in there.held()] == [2, 2]
    del rows, over
    assert [len(each) for each in there.held()] == [0, 0]


def test_a_worker_is_sent_the_rows_of_tables_that_it_knows(monkeypatch):
    """Of the label's table, in order, a share; of others, whatever they are, all."""
    monkeypatch.setattr(joins, "PART_ROWS", 100)
    rng = default_rng(0)
    rows, few = 2_000, 10
    mapping = TableMapping(
        {
            "label": table_rows(np.arange(rows), rows),
            "any": table_rows(rng.integers(0, few, rows), few),
        }
    )
    local = {"label": rng.normal(size=(rows, 1)), "any": rng.normal(size=(few, 1))}
    sizes = []
    for workers in (2, 4):
        there = WorkersHere(workers)
        spread = joined_rows(mapping, {"target": np.zeros((rows, 1))}, workers=there)
        spread.fill("scores", np.zeros(1))
        there.sent.clear()
        spread.run(lambda v, e: ({"scores": v["scores"] + e}, ()), local)
        sizes.append(sum(there.sent))
        assert max(there.sent) < 1.1 * 8 * rows / workers
    # the same for any number of workers, besides the kernel and what frames a message
    assert sizes[1] - sizes[0] < 0.2 * 8 * rows


def test_what_no_vector_depends_on_leaves_the_journal():
    def entry(reads: str, writes: str) -> JournalEntry:
        return JournalEntry("run", [], frozenset(reads), frozenset(writes), 0)

    lost = entry("", "a")
    start, turned = entry("", "a"), entry("ab", "b")
    moved, derived = entry("ab", "c"), entry("c", "d")
    assert needed([lost, start, turned, moved, derived, derived]) == [
        *(start, turned, moved, derived)
    ]
