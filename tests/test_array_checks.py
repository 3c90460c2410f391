"""Arrays of messages are checked by whoever receives them: the server, and a site."""

import numpy as np
import pytest

from client_apps.orders import real_numbers, whole_numbers
from strategies.exchange import Part, Replies
from strategies.received import array_of, read_key
from tp_flower.errors import ReplyError, SiteError
from tp_flower.protocol import Packet

PART = Part(0, "orders", "us", 3, 0)
GOOD = np.array([[1.0], [2.0]], np.float32)
BAD_VALUES = [np.nan, np.inf, -np.inf]


def with_value(value):
    array = GOOD.copy()
    array[1, 0] = value
    return array


def replied(**arrays):
    header = {"parts": [{"id": 0, "keys": ["number"]}]}
    packed = {(0, name.replace("_", "-")): array for name, array in arrays.items()}
    return Replies({3: Packet(header)}, packed)


@pytest.mark.parametrize("value", [*BAD_VALUES, 2e30, -2e30])
def test_the_server_takes_moderate_numbers_only(value):
    assert array_of(replied(scores=GOOD), PART, "scores", (2, 1)) is GOOD
    with pytest.raises(ReplyError, match=r"site 'us' .*'scores' with values that are"):
        array_of(replied(scores=with_value(value)), PART, "scores", (2, 1))


@pytest.mark.parametrize("array", [GOOD[:1], GOOD.T, GOOD[:, 0], GOOD.astype(np.int64)])
def test_the_server_takes_the_shape_and_type_that_it_asked_for(array):
    with pytest.raises(
        ReplyError, match=r"expected float32 or float64 of shape \(2, 1"
    ):
        array_of(replied(scores=array), PART, "scores", (2, 1))


@pytest.mark.parametrize("code", [-2, 1])
def test_the_server_takes_codes_that_have_a_hash(code):
    hashes = np.ones((1, 2), np.uint64)
    codes = np.array([-1, 0], np.int32)
    read_key(replied(codes_0=codes, hashes_0=hashes), PART, 0, 2)
    codes = np.array([code, 0], np.int32)
    with pytest.raises(ReplyError, match="codes of join key 0 that name no hash"):
        read_key(replied(codes_0=codes, hashes_0=hashes), PART, 0, 2)


@pytest.mark.parametrize("value", BAD_VALUES)
def test_a_site_takes_finite_numbers_only(value):
    assert real_numbers(GOOD, "target", (2, 1)).dtype == np.float64
    with pytest.raises(SiteError, match="array 'target' must hold finite numbers"):
        real_numbers(with_value(value), "target", (2, 1))


@pytest.mark.parametrize("array", [GOOD[:1], GOOD.T, GOOD[:, 0], GOOD.astype(np.int64)])
def test_a_site_takes_the_shape_and_type_that_it_needs(array):
    with pytest.raises(SiteError, match="but must be 2 x 1 numbers"):
        real_numbers(array, "target", (2, 1))


@pytest.mark.parametrize("number", [-1, 3])
def test_a_site_takes_whole_numbers_of_a_range(number):
    assert whole_numbers(np.array([0, 2]), "rows", low=0, high=2).tolist() == [0, 2]
    with pytest.raises(SiteError, match="'rows' must hold numbers from 0 to 2"):
        whole_numbers(np.array([0, number]), "rows", low=0, high=2)
