"""What a server and a site on its side make of masked scores."""

from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest

from client_apps.operator.masks import ScoreMasks
from tests.support.federated import SOURCE, WatchedGrid, on_requests, store, train
from tests.support.peers.keyed_sites import stored_keys
from tp_flower.errors import DivergedError, SiteError
from tp_flower.settings import PrivacySettings

SQL = f"SELECT o.qty AS label, c.age {SOURCE}"
CLEAR = PrivacySettings(scores="clear")
NODES = {"orders": 2, "customers": 3, "items": 4}


class Grid(WatchedGrid):
    """A site per table, a server that may change requests, and the sites' keys."""

    def __init__(self, forge=None):
        frames = store(400, 150)
        super().__init__([{name: frames[name]} for name in NODES], self._look)
        self.forge = forge
        self.keys = {}

    def _look(self, seen):
        if seen.action == "query.extract" and seen.is_reply:
            self.keys[seen.node] = stored_keys(self, seen.node)
        if self.forge is not None and not seen.is_reply:
            self.forge(seen)

    def scores(self, table):
        """A table's scores of trained rows, by epoch."""
        sent = [s for s in self.seen if s.is_reply and s.node == NODES[table]]
        arrays = [a for s in sent for (_, name), a in s.arrays.items()]
        return [a for a in arrays if a.dtype in (np.uint32, np.float32)]


def lattice(scores) -> int:
    """How many different scores there are: those of one feature are its values."""
    return len(np.unique(scores))


def test_one_feature_is_read_from_clear_scores_and_not_from_masked_ones():
    grids = [Grid(), Grid()]
    for grid, privacy in zip(grids, (PrivacySettings(), CLEAR), strict=True):
        train(grid, SQL, num_epochs=3, privacy=privacy)
    masked, clear = (grid.scores("customers")[-1] for grid in grids)
    ages = store(400, 150)["customers"]["age"]
    # of equal ages the scores are equal, in the clear
    assert lattice(clear) <= ages.nunique(dropna=False) < len(clear)
    assert lattice(masked) == len(masked)
    numbers = masked.view(np.int32)[:, 0].astype(float)
    assert abs(np.corrcoef(numbers, clear[:, 0])[0, 1]) < 4 / np.sqrt(len(masked))


def test_differences_between_epochs_are_masked_too():
    grid = Grid()
    train(grid, SQL, num_epochs=8)
    epochs = [own for own in grid.scores("customers") if len(own) > 100]
    assert len(epochs) == 8
    for earlier, later in pairwise(epochs):
        changed = (later - earlier).view(np.int32).astype(float) / 2.0**31
        # uniform on (-1, 1): of deviation 1 / sqrt(3)
        assert abs(changed.std() - 3**-0.5) < 0.15


def test_no_two_arrays_of_scores_share_masks(monkeypatch):
    """Nor do those of one message, of which there are a batch's and all rows'."""
    names = []
    words = ScoreMasks.words

    def noted(masks, scores, rows, name):
        sides = tuple((mask.group, mask.is_positive) for mask in masks.joins)
        names.append((sides, name))
        return words(masks, scores, rows, name)

    monkeypatch.setattr(ScoreMasks, "words", noted)
    train(Grid(), SQL, "sgd", batch_size=200)
    assert len({sides for sides, _ in names}) == len(NODES)
    assert len(set(names)) == len(names)


def test_a_site_has_the_keys_of_its_own_joins_only():
    grid = Grid()
    train(grid, SQL, num_epochs=1)
    assert {node: set(keys) for node, keys in grid.keys.items()} == {
        NODES["orders"]: {"run", "join-0", "join-1"},
        NODES["customers"]: {"run", "join-0"},
        NODES["items"]: {"run", "join-1"},
    }
    keys = [key for own in grid.keys.values() for key in own.values()]
    assert len(set(keys)) == 3


def with_joins(seen):
    for part in seen.header["parts"]:
        part["joins"] = [{"group": "join-0", "key": 0, "is-positive": True}]


def without_number(seen):
    seen.header["scores-number"] = 1


@pytest.mark.parametrize(
    ("action", "what", "match"),
    [
        ("train.prepare", with_joins, "it has 'joins', which is not declared"),
        ("train.admm", without_number, "'scores-number' is 1; the run is at 1"),
    ],
)
def test_sites_refuse_to_leave_masks_out_or_to_use_them_twice(action, what, match):
    with pytest.raises(SiteError, match=match):
        train(Grid(on_requests(action)(what)), SQL, num_epochs=2)


def test_scores_beyond_the_fixed_point_stop_the_run_and_name_the_site():
    @on_requests("train.prepare")
    def small(seen):
        seen.header["masking"]["bits"] = 60

    match = "site '.*', table '.*': train.* a score is .*; the run's fixed point allows"
    with pytest.raises(DivergedError, match=match):
        train(Grid(small), SQL, num_epochs=2)


def unmask(table):
    """A server that says of all rows of a table that no join finds a partner for
    them.
    """
    bits = np.packbits(np.ones(len(store(400, 150)[table]), np.bool_))

    @on_requests("train.prepare")
    def lie(seen):
        for part in seen.header["parts"] if seen.node == NODES[table] else ():
            for join in ("join-0", "join-1"):
                seen.arrays[part["id"], f"unmatched/{join}"] = bits

    return lie


LEFT = f"SELECT o.qty AS label, o.online, c.age {SOURCE.replace('JOIN', 'LEFT JOIN')}"


def test_rows_that_are_said_to_have_no_partner_leave_without_that_mask():
    """The limit that PRIVACY.md states: a server may lie about a LEFT JOIN, once."""
    grid = Grid(unmask("orders"))
    with suppress(DivergedError):
        train(grid, LEFT, num_epochs=2)
    words = grid.scores("orders")[-1].view(np.int32)[:, 0]
    assert lattice(words) == 2


@pytest.mark.parametrize(("sql", "table"), [(SQL, "orders"), (LEFT, "customers")])
def test_rows_have_partners_where_the_query_has_no_left_join(sql, table):
    """As the proposal has it: a customer of a LEFT JOIN has orders, or takes no
    part.
    """
    grid = Grid(unmask(table))
    with pytest.raises(
        SiteError, match=r"'unmatched': the run was proposed with \[\], and"
    ):
        train(grid, sql, num_epochs=2)
    assert not grid.scores(table)
