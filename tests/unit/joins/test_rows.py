"""Vectors over joined rows: in any parts and threads, against whole arrays."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal

from tests.support.tables.mappings import one_to_one, table_rows
from tp_flower.joins import rows as joins
from tp_flower.joins.mapping import TableMapping
from tp_flower.joins.rows import JoinedRows

SIZES = {"a": 4, "b": 7}


def drawn(rng: np.random.Generator, rows: int) -> JoinedRows:
    """Joined rows of two tables, some without a row of either."""
    tables = {
        name: table_rows(rng.integers(-1, size, rows), size)
        for name, size in SIZES.items()
    }
    vectors = {"x": rng.normal(size=(rows, 2)), "y": rng.normal(size=(rows, 2))}
    return JoinedRows(TableMapping(tables), vectors)


def local_of(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {name: rng.normal(size=(size, 2)) for name, size in SIZES.items()}


def kernel(vectors, expanded):
    """z = x + 2 y + the expanded values, and y anew; sums of squares."""
    z = vectors["x"] + 2.0 * vectors["y"] + expanded
    return {"z": z, "y": -vectors["y"]}, [np.sum(z**2), np.sum(z)]


@given(
    rows=st.integers(0, 40),
    part=st.integers(1, 12),
    block=st.integers(1, 9),
    threads=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_a_run_is_that_of_whole_arrays(rows, part, block, threads, seed):
    rng = default_rng(seed)
    joined = drawn(rng, rows)
    local = local_of(rng)
    x, y = (joined.whole(name).copy() for name in ("x", "y"))
    tables = joined.mapping.tables
    z = x + 2.0 * y + sum(tables[name].expand(local[name]) for name in SIZES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joins, "PART_ROWS", part)
        patch.setattr(joins, "BLOCK_ROWS", block)
        patch.setenv("OMP_NUM_THREADS", str(threads))
        total, sums = joined.run(kernel, local, sums_of="z")
    assert_allclose(total, [np.sum(z**2), z.sum()], atol=1e-12)
    assert_allclose(joined.whole("z"), z, atol=1e-12)
    assert_array_equal(joined.whole("y"), -y)
    assert_array_equal(joined.whole("x"), x)
    for name, table in tables.items():
        assert_allclose(sums[name], table.segment_sum(z), atol=1e-12)


def test_threads_change_no_bit(monkeypatch):
    monkeypatch.setattr(joins, "PART_ROWS", 7)
    monkeypatch.setattr(joins, "BLOCK_ROWS", 3)
    results = []
    for threads in ("1", "2", "5"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        rng = default_rng(0)
        joined = drawn(rng, 100)
        total, sums = joined.run(kernel, local_of(rng), sums_of="z")
        results.append([total, joined.whole("z"), *sums.values()])
    for other in results[1:]:
        for one, same in zip(results[0], other, strict=True):
            assert_array_equal(one, same)


@pytest.mark.parametrize(
    ("combine", "expected"), [("add", 28.0), ("min", 1.0), ("max", 7.0), ("or", 1.0)]
)
def test_partial_results_are_combined(monkeypatch, combine, expected):
    monkeypatch.setattr(joins, "PART_ROWS", 2)
    monkeypatch.setattr(joins, "BLOCK_ROWS", 1)
    joined = one_to_one(7, {"x": np.arange(1.0, 8.0)})
    total, sums = joined.run(lambda v, _: ({}, v["x"]), combine=combine)
    assert total.tolist() == [expected]
    assert sums == {}


def test_words_are_summed_modulo_their_range():
    rows = table_rows([0, -1, 0], 1)
    joined = JoinedRows(TableMapping({"a": rows, "b": rows}))
    words = np.array([[2**32 - 1]], np.uint32)
    joined.run(lambda _, sums: ({"sums": sums}, ()), {"a": words, "b": words})
    assert joined.whole("sums").dtype == np.uint32
    assert joined.whole("sums").tolist() == [[2**32 - 2], [0], [2**32 - 2]]


def test_rows_are_selected_and_taken_with_their_vectors():
    rng = default_rng(0)
    joined = drawn(rng, 9)
    mask = np.arange(9) % 2 == 0
    some = joined.select(mask)
    x = joined.whole("x")
    assert_array_equal(some.whole("x"), x[mask])
    assert some.rows == 5
    assert some.sizes == SIZES
    for name, table in some.mapping.tables.items():
        before = joined.mapping.tables[name].row_of
        assert_array_equal(table.row_of, before[mask])
    assert_array_equal(joined.take("x", np.array([3, 1])), x[[3, 1]])


def test_a_vector_of_a_new_shape_replaces_the_old_one():
    joined = drawn(default_rng(0), 5)
    x = joined.whole("x").copy()
    joined.run(lambda v, _: ({"x": v["x"][:, :1] > 0.0}, ()))
    assert_array_equal(joined.whole("x"), x[:, :1] > 0.0)
    with pytest.raises(ValueError, match="read-only"):
        joined.whole("x")[0] = True


def test_rows_that_are_one_part_are_computed_at_once(monkeypatch):
    monkeypatch.setattr(joins, "PART_ROWS", 3)
    monkeypatch.setattr(joins, "BLOCK_ROWS", 2)
    rng = default_rng(0)
    parts = drawn(rng, 11)
    whole = replace(parts, is_one_part=True)
    seen = []

    def count(vectors, expanded):
        seen.append(len(vectors["x"]))
        return {"mean": vectors["x"] - vectors["x"].mean(axis=0)}, [len(expanded)]

    mask = np.arange(11) % 2 == 0
    for rows in (whole, whole.select(mask), whole.over(whole.mapping)):
        total, _ = rows.run(count)
        assert seen.pop() == total[0] == rows.rows
        assert not seen
        assert_allclose(rows.whole("mean").mean(axis=0), 0.0, atol=1e-15)


def test_kernels_and_sums_are_double_where_vectors_are_single():
    rng = default_rng(5)
    double = drawn(rng, 200)
    local = local_of(rng)
    single = replace(double, vectors={}, is_single=True)
    for name in ("x", "y"):
        single.fill(name, double.whole(name))
        assert_allclose(single.whole(name), double.whole(name), rtol=2.0**-24)
        double.fill(name, single.whole(name))
    seen = set()

    def watched(vectors, expanded):
        seen.update(vectors[name].dtype for name in vectors)
        return kernel(vectors, expanded)

    total, sums = single.run(watched, local, sums_of="z")
    exact, exact_sums = double.run(kernel, local, sums_of="z")
    assert seen == {np.dtype(np.float64)}
    # the kernel's numbers, of which only those that are stored are rounded
    assert_array_equal(total, exact)
    rounded = double.whole("z").astype(np.float32).astype(np.float64)
    assert_array_equal(single.whole("z"), rounded)
    assert_array_equal(single.take("z", np.arange(9)), rounded[:9])
    for name, table in double.mapping.tables.items():
        assert_array_equal(sums[name], table.segment_sum(rounded))
        assert_allclose(sums[name], exact_sums[name], atol=1e-5)
    sizes = {name: vector.nbytes for name, vector in single.vectors.items()}
    assert 2 * sizes["z"] == double.vectors["z"].nbytes
    assert set(sizes.values()) == {200 * 2 * 4}
