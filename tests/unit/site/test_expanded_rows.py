"""The row lists of VFL at a site: by hand, hostile ones, and those a policy forbids."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_apps.handlers.training_rows import (
    Batches,
    TrainingRows,
    expanded,
    once_each,
)
from strategies import TablePuppetADMM, VflADMM, VflSGD
from tests.support.examples.requests import body
from tests.support.peers.hostile import (
    FOREIGN,
    ORDERS,
    SHOP,
    US,
    US_PART,
    HostileGrid,
    StoppedError,
    array,
    header,
    train,
    wrong_arrays,
    wrong_headers,
)
from tests.support.peers.hostile_runs import once, refused, spread
from tp_flower.errors import MessageError, SettingsError, SiteError
from tp_flower.protocol import Packet, pack_bits
from tp_flower.settings import PrivacySettings, Settings

EMPTY = np.zeros(0, np.int32)


def listed(trained, tested=EMPTY, *, rows=4, joined_rows=5, held_out=2):
    """The rows of a part that is told these lists."""
    lists = {
        f"expanded-{name}": np.array(values, np.int32)
        if type(values) is list
        else values
        for name, values in (("trained", trained), ("tested", tested))
    }
    return expanded(body(joined_rows, lists, **{"held-out-rows": held_out}), rows)


def test_lists_by_hand():
    found = listed([2, 0, 2], [3])
    assert found.own.tolist() == [0, 2, 3]
    assert found.place.tolist() == [1, 0, 1, 2]
    # the rows behind the joined rows again
    assert found.own[found.place].tolist() == [2, 0, 2, 3]
    assert found.multiplicity.tolist() == [1, 1, 1]
    assert found.tested.tolist() == [False, False, False, True]
    assert (found.trained, found.trained_own) == (3, 2)


def test_a_part_may_have_no_row():
    found = listed(EMPTY, EMPTY, rows=0)
    assert (len(found.own), found.trained, found.trained_own) == (0, 0, 0)
    none = Batches(np.zeros(3, np.int64), np.zeros(0, np.int64))
    assert found.own_by_batch(none).tolist() == [0, 0]


def test_masks_by_hand():
    arrays = {
        "trained": pack_bits(np.array([True, False, True, False])),
        "tested": pack_bits(np.array([False, False, True, True])),
        "multiplicity": np.array([3, 1], np.int32),
    }
    found = once_each(body(4, arrays), 4)
    assert found.own.tolist() == [0, 2, 3]
    assert found.place is None
    assert found.tested.tolist() == [False, True, True]
    assert found.trained_own == found.trained == 2
    assert found.own_by_batch(
        Batches(np.array([0, 2, 3]), np.array([0, 1, 0]))
    ).tolist() == [2, 1]


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=5),
    st.integers(0, 3),
)
def test_a_batch_has_as_many_rows_as_are_different(batches, further):
    behind = [row for batch in batches for row in batch]
    own = sorted(set(behind) | set(range(further)))
    rows = TrainingRows(
        own=np.array(own, np.int64),
        place=np.array([own.index(row) for row in behind], np.int64),
        multiplicity=np.ones(len(behind), np.int64),
        tested=np.zeros(len(behind), np.bool_),
    )
    plan = Batches(
        np.cumsum([0, *map(len, batches)]), np.arange(len(behind), dtype=np.int64)
    )
    assert rows.own_by_batch(plan).tolist() == [len(set(batch)) for batch in batches]


@pytest.mark.parametrize(
    ("lists", "match"),
    [
        (([4], EMPTY), "'expanded-trained' must hold numbers from 0 to 3"),
        (([-1], EMPTY), "'expanded-trained' has numbers .* allowed: from 0 to inf"),
        (([0], np.array([1 << 40])), "'expanded-tested' is int64 .* allowed: int32"),
        ((np.zeros(1), EMPTY), "'expanded-trained' is float64 .* allowed: int32 of"),
        (([[0]], EMPTY), r"'expanded-trained' is int32 of shape \(1, 1\); allowed"),
        (([0] * 6, EMPTY), "'expanded-trained' has 6 rows, but there are 5 joined"),
        (([0], [1] * 3), "'expanded-tested' has 3 rows, but there are 2 joined rows"),
    ],
)
def test_lists_that_are_none_are_refused(lists, match):
    with pytest.raises((MessageError, SiteError), match=match):
        listed(*lists)


# hostile servers: the orders' policy wants three rows at least


@pytest.mark.parametrize(
    ("node", "change", "match"),
    [
        (SHOP, array(ORDERS, "expanded-trained"), "it has no 'trained'"),
        (SHOP, array(ORDERS, "expanded-tested"), "it has no 'expanded-tested'"),
        (
            SHOP,
            array(ORDERS, "expanded-trained", lambda a: np.concatenate([a, a])),
            r"'expanded-trained' has \d+ rows, but there are \d+ joined rows to list",
        ),
        (
            SHOP,
            array(ORDERS, "expanded-tested", lambda a: a + 12),
            "'expanded-tested' must hold numbers from 0 to 11",
        ),
        (
            SHOP,
            array(ORDERS, "expanded-trained", lambda a: a % 2),
            r"\(min-rows\) refuses: the model of table 'o' would be of too few rows",
        ),
        (SHOP, header("parts", 0, "held-out-rows"), "it has no 'held-out-rows'"),
        (
            SHOP,
            header("parts", 0, "held-out-rows", value=-1),
            "'held-out-rows' is -1; allowed: a whole number, at least 0",
        ),
    ],
)
def test_hostile_lists_are_refused(tmp_path, node, change, match):
    error = refused(tmp_path, "train.prepare", node, change, VflADMM)
    assert re.search(match, error)


def lonely(*rows):
    """Two batches of two joined rows each, over these rows of the US shard."""

    def change(packet):
        arrays = {
            **packet.arrays,
            (US_PART, "expanded-trained"): np.array(rows, np.int32),
            (US_PART, "batch-start"): np.array([0, 2, 4], np.int32),
            (US_PART, "batch-rows"): np.arange(4, dtype=np.int32),
        }
        return Packet(packet.header, arrays)

    return change


def test_a_row_that_is_repeated_does_not_make_a_batch_of_many(tmp_path):
    changes = once(
        "train.prepare", US, alone=lonely(0, 0, 1, 2), both=lonely(0, 1, 0, 2)
    )
    rules = {"customers": "min-rows = 2"}
    grid = HostileGrid(tmp_path, changes, rules, stops=True)
    with pytest.raises(StoppedError):
        train(grid, VflSGD, batch_size=12)
    alone, both = grid.answers
    alone.check_nothing_left()
    assert "a batch's gradient of table 'c' would be of too few rows" in alone.error
    assert not both.error


def test_a_run_on_lists_has_no_accounts(tmp_path):
    """What a row changes in a sum over joined rows is not what the accounts are of."""
    change = header("outline", "strategy", value="vfl-admm")
    privacy = PrivacySettings(features="statistics")
    error = refused(
        tmp_path, "train.prepare", SHOP, change, TablePuppetADMM, privacy=privacy
    )
    assert "privacy.features is of methods that send a row of a table once" in error
    privacy = PrivacySettings(predictions=1.0)
    error = refused(
        tmp_path, "train.prepare", US, change, TablePuppetADMM, privacy=privacy
    )
    assert "privacy.predictions is of methods" in error


@pytest.mark.parametrize("strategy", ["vfl-admm", "vfl-sgd"])
@pytest.mark.parametrize(
    "private",
    [{"features": "dp-sgd"}, {"features": "statistics"}, {"predictions": 1.0}],
)
def test_settings_refuse_mechanisms_that_do_not_count(strategy, private):
    (key,) = private
    family = strategy.removeprefix("vfl-")
    match = rf"privacy.{key}: strategy '{strategy}' is for comparisons.* Use {family}"
    with pytest.raises(SettingsError, match=match):
        Settings(strategy=strategy, privacy=PrivacySettings(**private))


def test_labels_may_be_private():
    privacy = PrivacySettings(labels="laplace", label_noise=1.0, label_range=(0.0, 1.0))
    Settings(strategy="vfl-admm", privacy=privacy)


def test_a_malformed_request_is_refused_and_changes_nothing(tmp_path):
    def hostile(action, node, packet):
        if (action, node) == ("train.prepare", US):
            yield from spread(wrong_headers(packet), 3, 23)
            yield from spread(wrong_arrays(packet), 0, 3)

    grid = HostileGrid(tmp_path, hostile)
    fuzzed = train(grid, VflSGD, batch_size=5)
    assert sum(bool(answer.error) for answer in grid.answers) > 20
    for answer in grid.answers:
        assert not FOREIGN.match(answer.error), answer
        if answer.error:
            answer.check_nothing_left()
    (plain := tmp_path / "plain").mkdir()
    # no refusal has changed anything, and features that lie in files train alike
    assert (
        fuzzed.report.final_train
        == train(HostileGrid(plain), VflSGD, batch_size=5).report.final_train
    )


def weigh(number, value):
    def change(packet):
        count = len(packet.arrays[number, "expanded-trained"])
        weights = np.full(count, value, np.float32)
        return Packet(packet.header, {**packet.arrays, (number, "masses"): weights})

    return change


def test_weights_of_joined_rows_are_checked_too(tmp_path):
    error = refused(tmp_path, "train.prepare", SHOP, weigh(ORDERS, -1.0), VflADMM)
    assert "'masses' must hold weights above 0" in error


def test_features_that_lie_in_files_train_as_those_of_the_tables(tmp_path):
    own, twin = (
        train(HostileGrid(tmp_path), method) for method in (TablePuppetADMM, VflADMM)
    )
    assert twin.report.final_train == pytest.approx(own.report.final_train, rel=1e-4)
    assert twin.report.final_test == pytest.approx(own.report.final_test, rel=1e-4)
