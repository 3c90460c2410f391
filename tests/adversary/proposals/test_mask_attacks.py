"""A server that names joins, masks and groups to its liking, and what sites derive
instead.

The first two attacks read a table's scores exactly, with pinned keys, before sites
derived the sides of their joins and the members of their groups from the proposal. That
they still would is shown by taking the derivation away.
"""

import numpy as np
import pandas as pd
import pytest

from tests.support.federated import train
from tests.support.joined import run as extracted
from tests.support.peers.keyed_sites import KeyedGrid, stored_keys
from tp_flower.errors import SiteError
from tp_flower.keyed_hash import KeyedHasher
from tp_flower.privacy.score_masks import FixedPoint, JoinMask, ScoreMasks
from tp_flower.query import Fragment
from tp_flower.terms.run_terms import RunTerms

ROWS = 150
KEYS = Fragment("table", "table", keys=(('"k"',),))
CHAIN = (
    "SELECT a.y AS label, a.u, b.x, c.z FROM a JOIN b ON a.k = b.k JOIN c ON a.m = c.m"
)


def tables():
    rng = np.random.default_rng(7)
    keys = rng.permutation(ROWS)
    a = pd.DataFrame({"k": keys, "m": keys % 50, "u": rng.normal(size=ROWS)})
    b = pd.DataFrame({"k": np.arange(ROWS), "x": rng.normal(size=ROWS)})
    c = pd.DataFrame({"m": np.arange(50), "z": rng.normal(size=50)})
    a["y"] = a["u"] + b["x"].to_numpy()[keys] + rng.normal(size=ROWS)
    return {"a": a, "b": b, "c": c}


class Server(KeyedGrid):
    """Three sites with pinned keys; a server that may change its requests.

    Attributes:
        words: by node, the last array of masked words that it has sent.
        point: the fixed point of the run's scores.
    """

    def __init__(self, folder, change=lambda _: None):
        super().__init__(folder, tables(), self._look)
        self.pin()
        self.forge = change
        self.words = {}
        self.point = None

    def _look(self, seen):
        if not seen.is_reply:
            self.forge(seen)
            if seen.action == "train.prepare":
                self.point = FixedPoint(seen.header["masking"]["bits"], 3)
        for array in seen.arrays.values() if seen.is_reply else ():
            if array.dtype == np.uint32:
                self.words[seen.node] = array


@pytest.fixture
def computed(monkeypatch):
    """The scores that sites have masked, with the name that each mask has in the
    run.
    """
    scores = []
    words = ScoreMasks.words

    def noted(masks, values, rows, name):
        scores.append((name, values))
        return words(masks, values, rows, name)

    monkeypatch.setattr(ScoreMasks, "words", noted)
    return scores


def error(point, words, computed):
    """The largest error of words that are taken for the scores that a site has
    computed.
    """
    read = point.numbers(words)
    exact = [values for _, values in computed if values.shape == read.shape]
    return min(np.abs(read - values).max() for values in exact)


def replace_sides(monkeypatch, change):
    """Let sites take the sides of their joins as a request of the server once named
    them.
    """
    derived = RunTerms.join_sides
    monkeypatch.setattr(
        RunTerms, "join_sides", lambda terms, n: change(derived(terms, n))
    )


def test_masks_that_are_named_with_both_signs_would_cancel(
    tmp_path, monkeypatch, computed
):
    def of_both_signs(sides):
        return [*sides, *(s._replace(is_positive=not s.is_positive) for s in sides)]

    replace_sides(monkeypatch, of_both_signs)
    grid = Server(tmp_path)
    train(grid, CHAIN, num_epochs=2, test_fraction=0.0)
    # the server reads every score of b, to the rounding of its fixed point
    assert error(grid.point, grid.words[grid.nodes["b"]], computed) < 1e-5


def both_signs(seen):
    """Name every side of every join a second time, with the other sign."""
    for part in seen.header["parts"] if seen.action == "train.prepare" else ():
        sides = part.get("joins") or [
            {"group": "join-0", "key": 0, "is-positive": True}
        ]
        others = [{**side, "is-positive": not side["is-positive"]} for side in sides]
        part["joins"] = [*sides, *others]


def run_group(seen):
    """Name the group of all sites for the masks of a join of two of them."""
    for part in seen.header["parts"] if seen.action == "train.prepare" else ():
        part["joins"] = [{"group": "run", "key": 0, "is-positive": False}]


@pytest.mark.parametrize("forge", [both_signs, run_group])
def test_a_request_names_neither_sides_nor_groups_of_masks(tmp_path, forge):
    grid = Server(tmp_path, forge)
    with pytest.raises(SiteError, match="it has 'joins', which is not declared"):
        train(grid, CHAIN)
    assert not grid.words


def test_the_key_of_all_sites_would_unmask_one_that_they_are_not_joined_to(
    tmp_path, monkeypatch, computed
):
    """Site c is in no join with b, and has the run's key; the keys of b are 0 to
    149.
    """
    replace_sides(
        monkeypatch, lambda sides: [side._replace(group="run") for side in sides]
    )
    grid = Server(tmp_path)
    keys = {}

    def colluding(seen):
        if seen.action == "train.prepare" and seen.node == grid.nodes["c"]:
            keys.update(stored_keys(grid, seen.node))

    grid.forge = colluding
    train(grid, CHAIN, num_epochs=1, test_fraction=0.0)
    assert keys.keys() == {"run", "join-1"}
    # by the hashes of the run it also knows which row has which key: they are in this
    # order
    key = extracted(tables()["b"][["k"]], KEYS).keys[0]
    tagged = key.hashed(KeyedHasher(keys["run"]).purpose("tags of score masks"))
    guess = JoinMask("run", keys["run"], tagged.hashes, tagged.codes, is_positive=True)
    words = grid.words[grid.nodes["b"]]
    names = {name for name, _ in computed}
    unmasked = [words + guess.of_rows(slice(None), 1, name) for name in names]
    assert min(error(grid.point, each, computed) for each in unmasked) < 1e-5
