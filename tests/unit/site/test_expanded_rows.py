"""The row lists of VFL at a site: by hand, hostile ones, and those a policy forbids."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_apps.handlers import training_rows
from strategies import TablePuppetSGD, VflADMM, VflSGD
from tests.support.examples.site_examples import body
from tests.support.peers import hostile
from tests.support.peers.hostile import arrays
from tests.support.peers.hostile_runs import answers_to, check_all_refused, refused
from tp_flower.protocol.packet import pack_bits
from tp_flower.settings import PrivacySettings, Settings

TRAINED, TESTED = "expanded-trained", "expanded-tested"
few_rows = hostile.array(hostile.ORDERS, TRAINED, lambda rows: rows % 2)


def listed(trained, tested=(), rows=4):
    """The rows of a part that is sent these lists, of 5 joined rows and 2 held out."""
    arrays = (np.array(rows, np.int32) for rows in (trained, tested))
    lists = dict(zip((TRAINED, TESTED), arrays, strict=True))
    return training_rows.expanded(body(5, lists, **{"held-out-rows": 2}), rows)


def test_lists_by_hand():
    rows = listed([2, 0, 2], [3])
    assert rows.positions.tolist() == [0, 2, 3]
    assert rows.place.tolist() == [1, 0, 1, 2]
    # the rows behind the joined rows again
    assert rows.positions[rows.place].tolist() == [2, 0, 2, 3]
    assert rows.multiplicity.tolist() == [1, 1, 1]
    assert rows.tested.tolist() == [False, False, False, True]
    assert (rows.trained, rows.trained_positions) == (3, 2)
    # a part may have no row
    none = listed((), (), rows=0)
    assert (len(none.positions), none.trained, none.trained_positions) == (0, 0, 0)
    batches = training_rows.Batches(np.zeros(3, np.int64), np.zeros(0, np.int64))
    assert none.table_rows_by_batch(batches).tolist() == [0, 0]


def test_masks_by_hand():
    arrays = {
        "trained": pack_bits(np.array([True, False, True, False])),
        "tested": pack_bits(np.array([False, False, True, True])),
        "multiplicity": np.array([3, 1], np.int32),
    }
    rows = training_rows.once_each(body(4, arrays), 4)
    assert rows.positions.tolist() == [0, 2, 3]
    assert rows.place is None
    assert rows.tested.tolist() == [False, True, True]
    assert rows.trained_positions == rows.trained == 2
    batches = training_rows.Batches(np.array([0, 2, 3]), np.array([0, 1, 0]))
    assert rows.table_rows_by_batch(batches).tolist() == [2, 1]


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=5),
    st.integers(0, 3),
)
def test_a_batch_has_as_many_rows_as_are_different(batches, further):
    behind = [row for batch in batches for row in batch]
    used = sorted(set(behind) | set(range(further)))
    rows = training_rows.TrainingRows(
        positions=np.array(used, np.int64),
        place=np.array([used.index(row) for row in behind], np.int64),
        multiplicity=np.ones(len(behind), np.int64),
        tested=np.zeros(len(behind), np.bool_),
    )
    plan = training_rows.Batches(
        np.cumsum([0, *map(len, batches)]), np.arange(len(behind))
    )
    assert rows.table_rows_by_batch(plan).tolist() == [len(set(b)) for b in batches]


def weigh(packet):
    weights = np.full(len(packet.arrays[hostile.ORDERS, TRAINED]), -1.0, np.float32)
    return arrays(hostile.ORDERS, masses=weights)(packet)


HOSTILE = {
    "0/expanded-trained gone": "it has no 'trained'",
    "0/expanded-tested gone": "it has no 'expanded-tested'",
    "0/expanded-trained[0] = -1": "'expanded-trained' has numbers .* from 0 to inf",
    "0/expanded-trained twice": r"has \d+ rows, but there are \d+ joined rows to list",
    "0/expanded-tested twice": r"'expanded-tested' has \d+ rows, but there are \d+ jo",
    "0/expanded-trained[0] = 12": "'expanded-trained' must hold numbers from 0 to 11",
    "0/expanded-tested[0] = 12": "'expanded-tested' must hold numbers from 0 to 11",
    "part.held-out-rows gone": "it has no 'held-out-rows'",
    few_rows: r"\(min-rows\) refuses: the model of table 'o' would be of too few rows",
    weigh: "'masses' must hold weights above 0",
}


def test_hostile_lists_are_refused(tmp_path):
    changes = {
        match: change if callable(change) else hostile.change_of(change)
        for change, match in HOSTILE.items()
    }
    answers = answers_to(tmp_path, "train.prepare", hostile.SHOP, changes, VflADMM)
    assert len(answers) == len(HOSTILE)
    check_all_refused(answers)


def lonely(*rows):
    """Two batches of two joined rows each, over these rows of the US shard."""
    start, numbers = np.array([0, 2, 4], np.int32), np.arange(4, dtype=np.int32)
    own = {"expanded_trained": np.array(rows, np.int32)}
    return arrays(hostile.US_PART, batch_start=start, batch_rows=numbers, **own)


def test_a_row_that_is_repeated_does_not_make_a_batch_of_many(tmp_path):
    changes = {"alone": lonely(0, 0, 1, 2), "both": lonely(0, 1, 0, 2)}
    how = {"policies": {"customers": "min-rows = 2"}, "batch_size": 12}
    alone, both = answers_to(
        tmp_path, "train.prepare", hostile.US, changes, VflSGD, **how
    )
    alone.check_nothing_left()
    assert "a batch's gradient of table 'c' would be of too few rows" in alone.error
    assert not both.error


def test_a_run_on_lists_has_no_accounts(tmp_path):
    """The accounts are not of sums over joined rows, which a row may change often."""
    change = hostile.header("outline", "strategy", value="vfl-admm")
    for node, key, value in (
        (hostile.SHOP, "features", "statistics"),
        (hostile.US, "predictions", 1.0),
    ):
        (folder := tmp_path / key).mkdir()
        privacy = PrivacySettings(**{key: value})
        error = refused(folder, "train.prepare", node, change, privacy=privacy)
        assert f"privacy.{key} is for methods that send a row of a table once" in error
    # noise on labels counts the rows of the label's own table
    labels = PrivacySettings(labels="laplace", label_noise=1.0, label_range=(0.0, 1.0))
    Settings(strategy="vfl-admm", privacy=labels)


def test_features_that_lie_in_files_train_alike(tmp_path):
    plain, tables = (
        hostile.train(hostile.HostileGrid(tmp_path), method, batch_size=5).report
        for method in (VflSGD, TablePuppetSGD)
    )
    assert plain.final_train == pytest.approx(tables.final_train, rel=1e-4)
    assert plain.final_test == pytest.approx(tables.final_test, rel=1e-4)
