"""Actions in an order that no run has: each is refused, or changes no run."""

import pytest

from tests.support.peers.faulty_runs import same_noise
from tests.support.peers.hostile import US, HostileGrid, train
from tests.support.peers.hostile_runs import check_refusals
from tp_flower.methods.admm.messages import TRAIN_ADMM
from tp_flower.methods.coreset.messages import TRAIN_DRAW, TRAIN_MEASURE, TRAIN_WEIGH
from tp_flower.methods.sgd.messages import TRAIN_SGD, TRAIN_STEP
from tp_flower.protocol.messages import Action
from tp_flower.protocol.packet import Packet

READ = {Action.STATISTICS, Action.FIT, TRAIN_MEASURE, Action.PREPARE}
# where rows may still be read
READING = READ | {TRAIN_DRAW, TRAIN_WEIGH}
# any of them needs what the others need: they may stand in for each other
TRAINING = {TRAIN_ADMM, Action.CONSENSUS, TRAIN_SGD, TRAIN_STEP, Action.FINISH}
__all__ = ["same_noise"]


def requests_of(folder, method, settings):
    """The first request of each action to a site, and how its run ended."""
    found = {}

    def see(action, node, packet):
        if node == US:
            found.setdefault(action, packet)
        return packet

    run = train(HostileGrid(folder, instead=see), method, **settings)
    return found, run.report.final_train


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("admm", {}),
        ("sgd", {"batch_size": 6}),
        ("admm", {"coreset_size": 8}),
    ],
    ids=["admm", "sgd", "coreset"],
)
def test_every_action_at_every_other_point_of_a_run(tmp_path, method, settings):
    (tmp_path / "plain").mkdir()
    known, expected = requests_of(tmp_path / "plain", method, settings)
    at = []

    def others(action, node, packet):
        if node != US or action in at:
            return
        at.append(action)
        here = {name: packet.header.get(name) for name in ("run", "round", "after")}
        for other, first in known.items():
            if other != action:
                yield action, (other, Packet({**first.header, **here}, first.arrays))

    grid = HostileGrid(tmp_path, others)
    disturbed = train(grid, method, **settings)
    assert disturbed.report.final_train == pytest.approx(expected, rel=1e-12)
    assert set(at) == set(known)
    check_refusals(grid.answers)
    assert len(grid.answers) == len(known) * (len(known) - 1)
    accepted = {(a.what, a.action) for a in grid.answers if not a.error}
    # rows are asked for once, nobody trains before that is prepared, or goes back
    assert accepted
    assert all(
        (point in READING and action in READ)
        or {point, action} <= TRAINING
        # another draw of what was measured
        or (point, action) == (TRAIN_WEIGH, TRAIN_DRAW)
        # until a site takes its keys, it makes any number of secrets that nobody uses
        or (action == Action.SEAL and point in (Action.DESCRIBE, Action.EXTRACT))
        for point, action in accepted
    )
