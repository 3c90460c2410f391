"""Masks of scores: the exact distribution of what a server sees, on tiny joins.

Masks are made in a run, by the sites' code, and added to scores by it. Only their
pseudo-random words are replaced: by all values that there are, together with all
scores, one case in each column. Words are read modulo 2 or 4. Both divide 2^32: the low
bits of a sum are the sum of the low bits, and those of uniform words are uniform.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest

from client_apps.operator.state import Stateless
from tests.support.federated import WatchedGrid, train
from tests.support.files import case_table
from tests.support.reference.information import coded, every_case, information
from tests.support.reference.joins import engine_of
from tp_flower.privacy.score_masks import NO_MASK, JoinMask

WORLDS = case_table(__file__)
TWO_EPOCHS = (2, ["1 scores", "2 scores"])
MODULO_4 = (4, ["1 scores"])


class Grid(WatchedGrid):
    """A site per shard; ``masks`` are those of each participant."""

    def __init__(self, shards):
        super().__init__([{name: [frame]} for name, frame in shards], self._look)
        self.masks = {}

    def _look(self, seen):
        if seen.action == "train.prepare" and seen.is_reply:
            for part in self.site(seen.node).parts(Stateless):
                self.masks[part.number] = part.data.masks


@cache
def world(name):
    """The masks of a world's participants, and the rows behind each joined row.

    Rows are numbered through all participants, without those that are not joined.
    """
    tables = dict(WORLDS[name])
    source = tables.pop("source")
    aliases = [*tables, "c"] if name == "self" else [*tables]
    columns = ", ".join(f"{alias}.f" for alias in aliases)
    shards = [(table, pd.DataFrame(rows)) for table in tables for rows in tables[table]]
    number = 0
    for _, frame in shards:
        frame["f"] = np.arange(len(frame)) + number
        number += len(frame)
    whole = {
        table: pd.concat([frame for of, frame in shards if of == table])
        for table in tables
    }
    with engine_of(whole) as engine:
        rows = engine.execute(f"SELECT {columns} FROM {source}").fetchall()
    behind = [[own for own in enumerate(row) if own[1] is not None] for row in rows]
    used = sorted({row for joined in behind for row in joined})
    grid = Grid(shards)
    sql = f"SELECT a.f + 1 AS label, {columns} FROM {source}"
    train(grid, sql, num_epochs=1, test_fraction=0.0)
    masks = [grid.masks[part] for part in sorted(grid.masks)]
    assert sum(map(rows_of, masks)) == len(used)
    return masks, [[used.index(row) for row in joined] for joined in behind]


def rows_of(masks):
    return len(masks.joins[0].codes)


def words_of(monkeypatch, masks, base, names):
    """The scores (epochs, rows, N), and the words of them that the server receives."""
    tags = {(m.key, *tag) for own in masks for m in own.joins for tag in m.tags}
    cells = sorted((*tag, name) for tag in tags for name in set(names))
    sizes = [rows_of(own) for own in masks]
    digits = every_case(base, len(names) * sum(sizes) + len(cells))
    scores = digits[: -len(cells)].reshape(len(names), sum(sizes), -1)
    of_cell = dict(zip(cells, digits[-len(cells) :], strict=True))

    def of_tags(mask, tags, outputs, name):
        assert outputs == digits.shape[1]
        return np.array([of_cell[mask.key, *tag, name] for tag in tags])

    monkeypatch.setattr(JoinMask, "_key_masks", of_tags)
    units = [replace(own, point=replace(own.point, bits=0)) for own in masks]
    words = [
        own.words(part * 1.0, slice(None), name)
        for epoch, name in zip(scores, names, strict=True)
        for own, part in zip(units, np.split(epoch, np.cumsum(sizes)[:-1]), strict=True)
    ]
    return scores, np.concatenate(words) % base


def sums_of(scores, joined, base):
    """The sum over each joined row, and in each epoch, as one number (N,)."""
    return coded(
        [own[rows].sum(axis=0) % base for own in scores for rows in joined], base
    )


def told(monkeypatch, masks, joined, base, names):
    """In bits, what words tell beyond the sums, and sums beyond the words."""
    scores, words = words_of(monkeypatch, masks, base, names)
    database = coded(np.concatenate(scores), base)
    view = coded(words, base)
    sums = sums_of(scores, joined, base)
    return information(database, view, sums), information(sums, sums, view)


TREES = sorted({*WORLDS} - {"triangle", "ring"})
CASES = [(name, *how) for name in TREES for how in (TWO_EPOCHS, MODULO_4)]


@pytest.mark.parametrize(
    ("name", "base", "names"), [*CASES, ("triangle", 2, ["1 scores"])]
)
def test_databases_look_the_same_if_and_only_if_their_sums_are(
    monkeypatch, name, base, names
):
    assert told(monkeypatch, *world(name), base, names) == (0, 0)


def test_of_a_ring_that_goes_round_twice_the_server_forms_the_sum(monkeypatch):
    """The limit that PRIVACY.md states of cycles: here, rows 0 and 1 of each table."""
    masks, joined = world("ring")
    scores, words = words_of(monkeypatch, masks, 2, ["1 scores"])
    database = coded(scores[0], 2)
    view = coded(words, 2)
    sums, ring = (sums_of(scores, rows, 2) for rows in (joined, [[0, 1, 4, 5, 6, 7]]))
    assert information(database, view, sums) == information(ring, view, sums) == 1
    both = sums * 2 + ring
    assert information(database, view, both) == 0
    assert information(both, both, view) == 0


def changed(masks, **how):
    """The same change of all masks."""
    joins = [tuple(replace(m, **how) for m in own.joins) for own in masks]
    return [replace(own, joins=new) for own, new in zip(masks, joins, strict=True)]


def one_bare_row(masks):
    codes = masks[0].joins[0].codes.copy()
    codes[0] = NO_MASK
    return [*changed(masks[:1], codes=codes), *masks[1:]]


def same_for_all_keys(masks):
    return changed(masks, tags=np.zeros((2, 2), np.uint64))


BROKEN = {
    # rows 0, 1 of a meet b's row 1, row 2 its row 0: differences are formed, not sums
    "signs": (lambda masks: changed(masks, is_positive=True), *MODULO_4, (2, 2)),
    "bare": (one_bare_row, *MODULO_4, (2, 2)),
    # these cancel, and train; but of five rows and one mask, four differences are told
    "keys": (same_for_all_keys, *MODULO_4, (2, 0)),
    # and here five changes from epoch to epoch, of which three are those of sums
    "epochs": (lambda masks: masks, 2, ["1 scores", "1 scores"], (2, 0)),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_masks_tell_more(monkeypatch, broken):
    break_masks, base, names, bits = BROKEN[broken]
    masks, joined = world("two")
    assert told(monkeypatch, break_masks(masks), joined, base, names) == bits
