"""What the messages of a run tell together: later ones about other rows than earlier
ones.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from strategies import Personalised
from tests.support import federated
from tests.support.peers import lying
from tests.support.peers.lying import Federation
from tests.support.peers.lying_sites import OWN_LABELS, SQL, STRICT, quick, tables
from tests.support.peers.told import foreign
from tp_flower.protocol.packet import Packet, pack_bits, unpack_bits

__all__ = ["quick"]
SHOP = 2
US = 3
SELF_JOIN = (
    "SELECT o.qty AS label, o.price, o.day, c.age, f.pay FROM orders o "
    "JOIN customers c ON o.cust = c.id JOIN customers f ON o.friend = f.id"
)


def one_row_fewer(packet: Packet) -> Packet:
    """Leave out the first row that is trained on, of each part of a request."""
    arrays = dict(packet.arrays)
    for part, name in packet.arrays:
        if name != "trained":
            continue
        size = 8 * len(packet.arrays[part, name])
        rows = unpack_bits(packet.arrays[part, name], size)
        rows[np.flatnonzero(rows)[0]] = False
        arrays[part, name] = pack_bits(rows)
        if (part, "multiplicity") in arrays:
            arrays[part, "multiplicity"] = arrays[part, "multiplicity"][1:]
    return Packet(packet.header, arrays)


def once(sql, method, grid, **settings):
    return federated.train(grid, sql, method, num_epochs=1, **settings)


RUNS = {
    "cg": partial(once, SQL, "cg"),
    "drawing": partial(once, SQL, "admm", coreset_size=8),
    "personalised": partial(once, OWN_LABELS, Personalised, test_fraction=0.4),
}


@pytest.mark.parametrize(
    ("run", "action", "node"),
    [
        ("cg", "query.statistics", SHOP),
        ("cg", "train.prepare", SHOP),
        ("drawing", "train.measure", SHOP),
        ("personalised", "train.personalise", US),
    ],
)
def test_no_two_messages_of_a_run_are_of_rows_that_differ_in_one(
    tmp_path, run, action, node
):
    """The columns of an encoder, or a sum, of all rows but one, and of all, would tell
    that one.
    """
    lied = Federation(tmp_path, tables()).run(
        RUNS[run], {(action, node): [one_row_fewer]}
    )
    assert "training rows of part" in lied.error
    assert "are not those of an earlier message of the run" in lied.error


@pytest.mark.parametrize("policies", [None, STRICT], ids=["default", "strict"])
def test_two_roles_of_a_table_tell_sums_of_joined_rows_alone(tmp_path, policies):
    """A customer's scores in two roles have masks of their own, under any number."""
    run = partial(federated.train, sql=SELF_JOIN, method="cg", num_epochs=2)
    honest = Federation(tmp_path, tables(), policies).run(run)
    assert not honest.error
    joined = lying.joined_rows(honest)
    for words in honest.told.words.values():
        assert foreign(words, joined) == 0


def test_the_reader_of_sums_finds_masks_that_cancel(tmp_path):
    """Else the tests of this folder prove nothing: one mask less, and one table's sums
    are read.
    """
    honest = Federation(tmp_path, tables()).run(RUNS["cg"])
    joined, (words, *_) = lying.joined_rows(honest), honest.told.words.values()
    assert foreign(words, joined) == 0
    bare = [*words[:-1], replace(words[-1], masks=())]
    assert foreign(bare, joined) == 1
    again = [*words, replace(words[0], value=7.0)]
    assert foreign(again, joined) == 1
