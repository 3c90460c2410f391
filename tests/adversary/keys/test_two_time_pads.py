"""A site loses its state in mid-run, and a server asks for the numbers again, changed.

The keys of the masks are in the database and so outlive the cache: what left before and
what leaves now would have the same masks, and the server would read the difference.
Each attack is also made on sites that keep no record of what masks have hidden, where
it succeeds.
"""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message

from client_apps.data.run_store import SiteStore
from client_apps.methods.coreset import drawing
from strategies.training.saving import make_manifest
from tests.support.federated import SOURCE, LocalGrid, store, train, write_site
from tests.support.ledgers import ledger_lines
from tests.support.peers.faulty_grid import forget_processes, rows_in
from tests.support.peers.hostile import StoppedError, header, like
from tests.support.predicted import predicting, unlabelled
from tp_flower.privacy.score_masks import ScoreMasks
from tp_flower.privacy.sealed_sums import ShardUnion, read_words
from tp_flower.protocol.packet import Packet, pack, unpack

SQL = f"SELECT o.qty AS label, o.day, c.age, c.region, i.price, i.weight {SOURCE}"
ORDERS = 2
CUSTOMERS = 3
ITEMS = 5


def write_sites(folder: Path) -> dict[str, Path]:
    """Write a site per table, and a second one for half of the customers."""
    frames = store(400, 150)
    customers = frames["customers"]
    tables = {
        "shop": {"orders": frames["orders"]},
        "us": {"customers": customers[:75]},
        "uk": {"customers": customers[75:]},
        "maker": {"items": frames["items"]},
    }
    return {site: write_site(folder / site, own) for site, own in tables.items()}


class ForgetfulGrid(LocalGrid):
    """A site loses its cache after its n-th reply to an action, and is asked again.

    All rounds are sent again as they were, but for the last one. ``first`` and
    ``second`` are the replies to that one before and after, ``in_both`` what masks hide
    in them.
    """

    def __init__(
        self, folder: Path, action: str, node: int, times: int, change
    ) -> None:
        super().__init__(write_sites(folder))
        self.hidden: list[np.ndarray] = []
        names = ("shop", "us", "uk", "maker")
        for site, own in zip(names, self.contexts, strict=True):
            self.keep_state(own, folder / site / "state")
            self.contexts[own].node_config["keys"] = "unchecked"
        self._action = action
        self._node = node
        self._left = times
        self._change = change
        self._asked: list[Message] = []

    def _deliver(self, message):
        self.hidden.clear()
        reply = super()._deliver(message)
        if message.metadata.dst_node_id != self._node:
            return reply
        if message.metadata.message_type != "query.describe":
            self._asked.append(message)
        if message.metadata.message_type == self._action:
            self._left -= 1
            if not self._left:
                self.first = unpack(reply.content)
                before = [*self.hidden]
                self._lose_state(message)
                self.hidden[:] = before
                self.second = self._send(message, self._change(unpack(message.content)))
                self.in_both = [*self.hidden]
                raise StoppedError
        return reply

    def _lose_state(self, message):
        """Remove the cache and restart the process; send again what came before."""
        forget_processes()
        state = self.state_dir(self._node)
        shutil.rmtree(state / "cache")
        number = unpack(message.content).header["round"]
        answer = self._send(
            message, header("round", value=number + 1)(unpack(message.content))
        )
        if "error" not in answer.header or answer.header["kind"] != "behind":
            # it had no need of the cache: as if the database were restored
            run = self.site(self._node).store.run
            rows_in(
                state / "site.db",
                "DELETE FROM entries WHERE run = ? AND name LIKE '.%'",
                run,
            )
        for earlier in self._asked[:-1]:
            again = unpack(super()._deliver(earlier).content)
            assert "error" not in again.header, again.header

    def _send(self, message: Message, packet: Packet) -> Packet:
        return unpack(super()._deliver(like(message, pack(packet))).content)


def other_steps(packet: Packet) -> Packet:
    """Ask for other numbers: those of a step of the server's own."""
    arrays = {}
    for key, array in packet.arrays.items():
        step = np.random.default_rng(5).normal(size=array.shape).astype(array.dtype)
        arrays[key] = step if key[1] in ("step", "messages") else array
    return Packet(packet.header, arrays)


def reversed_rows(packet: Packet) -> Packet:
    return Packet(
        packet.header, {key: array[::-1] for key, array in packet.arrays.items()}
    )


@pytest.fixture
def hidden(monkeypatch):
    """What the masks hide, in order: numbers that the server should not learn."""
    numbers: list[np.ndarray] = []

    def watched(owner, name, place, read):
        real = getattr(owner, name)

        def call(*arguments):
            numbers.append(read(arguments[place]))
            return real(*arguments)

        monkeypatch.setattr(owner, name, call)

    watched(ScoreMasks, "words", 1, np.ravel)
    watched(ShardUnion, "share", 1, np.ravel)
    watched(drawing, "to_fixed", 0, np.copy)
    return numbers


@pytest.fixture
def without_record(monkeypatch):
    """Let sites keep no record of what masks have hidden."""
    return lambda: monkeypatch.setattr(SiteStore, "record_masked", lambda *_: None)


def trained_twice(folder: Path) -> list:
    """Two models of the sites; the second has other parameters."""
    manifests = []
    for l2 in (1e-4, 10.0):
        with ForgetfulGrid(folder, "", 0, 0, None) as grid:
            manifests.append(make_manifest(train(grid, SQL, num_epochs=2, l2=l2)))
    return manifests


def scores_of_another_model(manifests) -> Callable[[Packet], Packet]:
    first, second = manifests
    change = header("model-version", value=second.model.version)
    digest = second.table("o").parts[0].digest

    def other(packet):
        return header("parts", 0, "digest", value=digest)(change(packet))

    assert digest != first.table("o").parts[0].digest
    return other


# run, its settings, the action, the site, the reply to it that is asked for again, how
# the difference of words is read, what the server asks for
ATTACKS = {
    "scores of admm": ("admm", {}, "train.admm", ORDERS, 2, "scores", other_steps),
    "scores of cg": ("cg", {}, "train.descent", ORDERS, 2, "scores", other_steps),
    "scores of sgd": (
        "sgd",
        {"batch_size": 400},
        "train.sgd",
        ORDERS,
        2,
        "scores",
        other_steps,
    ),
    "sums over shards": ("admm", {}, "train.admm", CUSTOMERS, 2, "sums", other_steps),
    "sensitivities": (
        *("admm", {"coreset_size": 60}, "train.weigh", ORDERS, 1, "sensitivities"),
        reversed_rows,
    ),
    "predictions": ("predict", {}, "query.score", ORDERS, 1, "scores", None),
}
READINGS = {
    "scores": lambda words: words.view(np.int32).astype(float),
    "sums": lambda words: read_words(words[:-1].view(np.int64)),
    "sensitivities": lambda words: words.view(np.int64).astype(float),
}


def attack(folder: Path, name: str, hidden: list) -> ForgetfulGrid:
    """Return a grid that has asked for numbers again, once the state was lost."""
    method, settings, action, node, times, _, change = ATTACKS[name]
    manifests = trained_twice(folder) if method == "predict" else []
    if manifests:
        change = scores_of_another_model(manifests)
    with ForgetfulGrid(folder, action, node, times, change) as grid:
        grid.hidden = hidden
        with suppress(StoppedError):
            if manifests:
                predicting(manifests[0], unlabelled(SQL)).start(grid)
            else:
                train(grid, SQL, method, num_epochs=3, **settings)
        return grid


@pytest.mark.cases("scores of cg", "sums over shards", "sensitivities", "predictions")
@pytest.mark.parametrize("name", ATTACKS)
def test_masks_hide_nothing_else_after_a_site_has_lost_its_state(tmp_path, name):
    answer = attack(tmp_path, name, []).second
    assert "have hidden other numbers in this run" in answer.header["error"]
    assert answer.header["kind"] == "refused"
    assert not answer.arrays


@pytest.mark.cases("scores of cg", "sums over shards", "sensitivities", "predictions")
@pytest.mark.parametrize("name", ATTACKS)
def test_without_the_record_the_server_reads_the_difference(
    tmp_path, name, hidden, without_record
):
    without_record()
    grid = attack(tmp_path, name, hidden)
    first = grid.first
    second = grid.second
    assert "error" not in second.header
    (key, *_) = [
        key for key in first.arrays if first.arrays[key].dtype in (np.uint32, np.uint64)
    ]
    words = second.arrays[key] - first.arrays[key]
    difference = READINGS[ATTACKS[name][5]](words).ravel()
    before, after = (own for own in grid.in_both if own.size == difference.size)
    correlation = np.corrcoef(difference, after - before)[0, 1]
    assert 1.0 - correlation < 1e-9


def test_masks_hide_no_other_rows_either(tmp_path):
    """The table has changed while the cache was lost; the requests are the same."""

    class ChangedGrid(ForgetfulGrid):
        def _lose_state(self, message):
            table = store(400, 150)["orders"]
            table.assign(day=table["day"].to_numpy()[::-1]).to_csv(
                tmp_path / "shop" / "orders.csv", index=False
            )
            super()._lose_state(message)

    grid = ChangedGrid(tmp_path, "train.admm", ORDERS, 1, lambda packet: packet)
    with grid, suppress(StoppedError):
        train(grid, SQL)
    error = grid.second.header["error"]
    assert "the masks of scores 1 have hidden other numbers" in error
    assert not grid.second.arrays
    # what was refused is in the ledger, with its reason
    (refusal,) = ledger_lines(tmp_path / "shop" / "state", "refuse")
    assert (refusal["action"], refusal["part"]) == ("train.admm", 0)
    assert "have hidden other numbers" in refusal["reason"]
