"""The rows of a part that train: by hand, and what a site refuses of them."""

import numpy as np

from client_apps.handlers import training_rows
from tests.support.examples.site_examples import body
from tests.support.peers import hostile
from tests.support.peers.hostile_runs import refused
from tp_flower.protocol.packet import pack_bits
from tp_flower.settings import PrivacySettings


def test_masks_by_hand():
    arrays = {
        "trained": pack_bits(np.array([True, False, True, False])),
        "tested": pack_bits(np.array([False, False, True, True])),
        "multiplicity": np.array([3, 1], np.int32),
    }
    rows = training_rows.read_rows(body(4, arrays), 4, is_private=False)
    assert rows.positions.tolist() == [0, 2, 3]
    assert rows.tested.tolist() == [False, True, True]
    assert rows.trained == 2
    trained, tested = rows.masks(4)
    assert trained.tolist() == [True, False, True, False]
    assert tested.tolist() == [False, False, True, True]


def test_a_run_on_rows_in_the_clear_has_no_accounts(tmp_path):
    """The accounts are of noise on what is made of rows, not of the rows."""
    change = hostile.header("outline", "strategy", value="coreset-ridge")
    for node, key, value in (
        (hostile.SHOP, "features", "statistics"),
        (hostile.US, "predictions", 1.0),
    ):
        (folder := tmp_path / key).mkdir()
        privacy = PrivacySettings(**{key: value})
        error = refused(folder, "train.prepare", node, change, privacy=privacy)
        assert f"privacy.{key} is for methods that send a row of a table once" in error
