"""Masks cancel in joined rows and nowhere else; every score has a mask of its own."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_array_equal

from tests.support.tables.mappings import table_rows
from tp_flower.errors import DivergedError
from tp_flower.joins.mapping import TableMapping
from tp_flower.privacy.score_masks import FixedPoint, JoinMask, ScoreMasks

SHAPES = {
    "star": [(0, 1), (0, 2), (0, 3)],
    "chain": [(0, 1), (1, 2), (2, 3)],
    "snowflake": [(0, 1), (0, 2), (1, 3), (2, 4)],
    "triangle": [(0, 1), (1, 2), (0, 2)],
    "square": [(0, 1), (1, 2), (2, 3), (0, 3)],
}
ACYCLIC = ["star", "chain", "snowflake"]


@dataclass(frozen=True)
class Join:
    """A small join: the key of every side's rows, and the joined rows.

    ``outer`` is a leaf that joined rows may lack, None where all joins are inner.
    """

    edges: list[tuple[int, int]]
    keys: dict[tuple[int, int], np.ndarray]
    rows: list[int]
    outer: int | None

    @property
    def joined(self) -> list[tuple[int, ...]]:
        """The row of every table behind each joined row; -1 for none."""
        inner = [e for e, edge in enumerate(self.edges) if self.outer not in edge]
        tables = [t for t in range(len(self.rows)) if t != self.outer]
        found = []
        for chosen in itertools.product(*(range(self.rows[t]) for t in tables)):
            row_of = dict(zip(tables, chosen, strict=True))
            if not all(self.meets(e, row_of) for e in inner):
                continue
            if self.outer is None:
                found.append(chosen)
                continue
            (last,) = set(range(len(self.edges))) - set(inner)
            partners = [
                row
                for row in range(self.rows[self.outer])
                if self.meets(last, {**row_of, self.outer: row})
            ]
            found += [
                tuple(row_of.get(t, row) for t in range(len(self.rows)))
                for row in partners or [-1]
            ]
        return found

    def meets(self, edge: int, row_of: dict[int, int]) -> bool:
        """Whether both sides of an equality hold the same key."""
        left, right = self.edges[edge]
        keys = self.keys
        return keys[edge, left][row_of[left]] == keys[edge, right][row_of[right]]

    def key_of(self, edge: int, table: int, row: int) -> int | None:
        """The key that masks a row; None where the LEFT JOIN finds no partner."""
        key = int(self.keys[edge, table][row])
        if self.outer in self.edges[edge] and table != self.outer:
            return key if key in self.keys[edge, self.outer] else None
        return key

    def masks(self, table: int) -> tuple[JoinMask, ...]:
        """The masks of a table's rows, with a key of its own for every equality."""
        masks = []
        for edge, (left, right) in enumerate(self.edges):
            for side, is_positive in ((left, True), (right, False)):
                if side != table:
                    continue
                keys = [self.key_of(edge, table, r) for r in range(self.rows[table])]
                codes = np.array([-1 if k is None else k for k in keys], np.int32)
                tags = np.arange(8, dtype=np.uint64).reshape(4, 2)
                masks.append(JoinMask("", bytes([edge]) * 32, tags, codes, is_positive))
        return tuple(masks)


@st.composite
def joins(draw, shapes, *, outer=False):
    edges = SHAPES[draw(st.sampled_from(shapes))]
    tables = 1 + max(max(edge) for edge in edges)
    rows = [draw(st.integers(1, 4)) for _ in range(tables)]
    keys = {
        (e, t): np.array(draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
        for e, edge in enumerate(edges)
        for t in edge
        for n in [rows[t]]
    }
    is_leaf = sum(tables - 1 in edge for edge in edges) == 1
    missing = tables - 1 if outer and is_leaf and draw(st.booleans()) else None
    join = Join(edges, keys, rows, missing)
    assume(join.joined)
    return join


def words_of(join: Join, table: int, scores, point, name="1 scores"):
    return ScoreMasks(point, join.masks(table)).words(scores, slice(None), name)


@settings(deadline=None, max_examples=150)
@given(joins(list(SHAPES), outer=True), st.integers(1, 9), st.integers(0, 99))
def test_masks_cancel_in_every_joined_row(join, outputs, seed):
    rng = default_rng(seed)
    point = FixedPoint.for_scores(1.0, len(join.rows))
    scores = [rng.normal(size=(n, outputs)) for n in join.rows]
    columns = enumerate(zip(*join.joined, strict=True))
    mapping = TableMapping({str(t): table_rows(of, join.rows[t]) for t, of in columns})
    words = {str(t): words_of(join, t, own, point) for t, own in enumerate(scores)}
    total = point.numbers(mapping.expand(words))
    # exactly: of the fixed points themselves
    rounded = [np.rint(own * 2**point.bits) for own in scores]
    for j, row_of in enumerate(join.joined):
        expected = sum(rounded[t][row] for t, row in enumerate(row_of) if row >= 0)
        assert (total[j] * 2**point.bits == expected).all()


def rank(matrix: list[list[int]]) -> int:
    """The rank of a small matrix of -1, 0 and 1: its singular values are 0 or large."""
    return int(np.linalg.matrix_rank(matrix)) if np.size(matrix) else 0


def ranks(join: Join) -> tuple[int, int]:
    """What the server can form of the words without a mask, and of the joined sums."""
    joined = [{(t, r) for t, r in enumerate(of) if r >= 0} for of in join.joined]
    used = sorted(set().union(*joined))
    sums = [[int(row in rows) for row in used] for rows in joined]
    signs = [signs_of(join, *row) for row in used]
    masks = sorted(set().union(*signs))
    weights = [[own.get(mask, 0) for mask in masks] for own in signs]
    return len(used) - rank(weights), rank(sums)


def signs_of(join: Join, table: int, row: int) -> dict[tuple[int, int], int]:
    """The sign of every mask on a row, by equality and key."""
    return {
        (edge, key): 1 if table == left else -1
        for edge, (left, right) in enumerate(join.edges)
        if table in (left, right) and (key := join.key_of(edge, table, row)) is not None
    }


@settings(deadline=None, max_examples=200)
@given(joins(ACYCLIC, outer=True))
def test_the_server_can_form_the_span_of_the_joined_sums_and_no_more(join):
    formed, joined = ranks(join)
    assert formed == joined


def paired(join: Join, divided: int, regions: list[int]) -> Join:
    """The join of pairs of rows and regions of one table, by keys and regions."""
    joined = [
        (of, 3 if of[divided] < 0 else regions[of[divided]]) for of in join.joined
    ]
    pairs = [
        sorted({(of[table], region) for of, region in joined if of[table] >= 0})
        for table in range(len(join.rows))
    ]
    keys = {
        (edge, table): np.array([4 * own[row] + region for row, region in pairs[table]])
        for (edge, table), own in join.keys.items()
    }
    return Join(join.edges, keys, [len(own) for own in pairs], join.outer)


@settings(deadline=None, max_examples=200)
@given(
    joins(ACYCLIC, outer=True),
    st.integers(0, 3),
    st.lists(st.integers(0, 2), min_size=4),
)
def test_of_pairs_it_can_form_as_much_as_of_the_joined_rows(join, divided, regions):
    """Pairs that agree on keys and region are those of a joined row, and no others."""
    pairs = paired(join, divided % len(join.rows), regions)
    assert len(pairs.joined) == len(join.joined)
    formed, joined = ranks(pairs)
    assert formed == joined


def test_of_a_cycle_the_server_can_form_more():
    """A triangle of three tables, found by a search: joins in a circle hide less."""
    keys = {
        (0, 0): [0, 0, 1, 1, 1],
        (0, 1): [0, 1],
        (1, 1): [1, 0],
        (1, 2): [0, 1, 0, 1, 0],
        (2, 0): [1, 0, 0, 1, 0],
        (2, 2): [1, 0, 0, 1, 1],
    }
    arrays = {side: np.array(own) for side, own in keys.items()}
    assert ranks(Join(SHAPES["triangle"], arrays, [5, 2, 5], None)) == (7, 6)


@pytest.mark.parametrize("outputs", [1, 4, 5])
def test_no_two_scores_share_a_mask_and_a_repeat_is_the_same(outputs):
    join = Join([(0, 1)], {(0, 0): np.arange(4), (0, 1): np.arange(4)}, [4, 4], None)
    point = FixedPoint(20, 2)
    scores = np.zeros((4, outputs))
    names = ["1 scores", "2 scores", "1 tested-scores", "11 scores"]
    words = [words_of(join, 0, scores, point, name) for name in names]
    assert_array_equal(words[0], words_of(join, 0, scores, point, names[0]))
    # one word in 2^32 is equal by chance
    together = np.concatenate([own.ravel() for own in words])
    assert len(np.unique(together)) == len(together)


def test_masks_are_uniform_words():
    rows = 1 << 14
    tags = default_rng(0).integers(0, 1 << 63, (rows, 2)).astype(np.uint64)
    mask = JoinMask("", b"k" * 32, tags, np.arange(rows, dtype=np.int32), True)
    words = mask.of_rows(slice(None), 3, "1 scores").copy().ravel()
    bits = np.unpackbits(words.view(np.uint8)).mean()
    assert abs(bits - 0.5) < 5 * 0.5 / math.sqrt(32 * words.size)


@pytest.mark.parametrize("outputs", [1, 5])
def test_a_batch_has_the_masks_of_its_rows(outputs):
    rng = default_rng(0)
    tags = rng.integers(0, 1 << 63, (40, 2)).astype(np.uint64)
    codes = rng.integers(-1, 40, 300).astype(np.int32)
    mask = JoinMask("", b"k" * 32, tags, codes, True)
    every = mask.of_rows(slice(None), outputs, "1 scores")
    assert_array_equal((every == 0).all(axis=1), codes == -1)
    # none, fewer rows than keys, and more
    for size in (0, 10, 100):
        rows = np.sort(rng.choice(300, size, replace=False))
        assert_array_equal(mask.of_rows(rows, outputs, "1 scores"), every[rows])


@pytest.mark.parametrize(("unit", "tables"), [(1.0, 2), (37.5, 3), (1e-6, 7)])
def test_fixed_point_rounds_to_its_last_bit_and_refuses_what_is_out_of_range(
    unit, tables
):
    point = FixedPoint.for_scores(unit, tables)
    assert 512 * unit <= point.limit * tables <= 2048 * unit
    scores = unit * default_rng(1).normal(size=(50, 2))
    back = point.numbers(point.words(scores))
    assert np.abs(back - scores).max() <= 2.0 ** -(point.bits + 1)
    assert np.abs(back - scores).max() < 1e-6 * unit
    largest = np.nextafter(point.limit, 0)
    # the sum of all tables' largest scores does not wrap around
    total = np.uint32(tables) * point.words(np.array([[largest]]))
    assert point.numbers(total)[0, 0] == pytest.approx(tables * largest, rel=1e-5)
    for bad in (point.limit, -point.limit, math.nan, math.inf):
        with pytest.raises(DivergedError, match="fixed point allows up to"):
            point.words(np.array([[0.0], [bad]]))
