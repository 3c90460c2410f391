"""Packets: round trips, refusals, and no byte is copied twice."""

import json
import tracemalloc

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_array_equal

from tests.support.files import case_table
from tp_flower.errors import ReplyError
from tp_flower.protocol.packet import (
    SMALL_BYTES,
    WIRE_DTYPES,
    Packet,
    message_bytes,
    pack,
    pack_bits,
    row_numbers,
    unpack,
    unpack_bits,
)

dtypes = st.sampled_from(sorted(WIRE_DTYPES)).map(np.dtype)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
arrays = st.tuples(dtypes, shapes).flatmap(lambda pair: hnp.arrays(*pair))
keys = st.tuples(st.integers(0, 9), st.text(max_size=8))
values = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=5)
names = st.text(max_size=5)
nested = st.lists(values, max_size=3) | st.dictionaries(names, values, max_size=3)
headers = st.dictionaries(names, values | nested, max_size=4)
LARGE = np.arange(2e6).reshape(1000, 2000)
EIGHT = Array("uint8", (8,), "bytes", bytes(8))
NO_LAYOUT = RecordDict({"message": ConfigRecord({"header": "{}"})})


def packet_of(**arrays: np.ndarray) -> Packet:
    """Arrays of part 0, by name."""
    return Packet({}, {(0, name): array for name, array in arrays.items()})


def over_the_wire(content: RecordDict) -> RecordDict:
    return recorddict_from_proto(recorddict_to_proto(content))


@given(headers, st.dictionaries(keys, arrays, max_size=5))
def test_packets_round_trip(header, given_arrays):
    received = unpack(over_the_wire(pack(Packet(header, given_arrays))))
    assert received.header == header
    sent, arrived = (
        [(key, a.dtype, a.shape, a.tobytes()) for key, a in arrays.items()]
        for arrays in (given_arrays, received.arrays)
    )
    # bits, so that NaN and -0.0 count
    assert arrived == sent


def test_numbers_per_row_travel_as_float32():
    values = np.array([[1 / 3], [-1e300], [1e300], [np.nan], [0.0]])
    received = row_numbers(values)
    assert received.dtype == np.float32
    expected = [[np.float32(1 / 3)], [-np.inf], [np.inf], [np.nan], [0.0]]
    assert_array_equal(received, expected)


def test_payload_bytes_by_part():
    packet = packet_of(a=np.zeros(3, np.float32), b=np.zeros(5, np.uint8))
    packet.arrays[2, "a"] = np.zeros((2, 2))
    for same in (packet, unpack(pack(packet))):
        assert same.payload_bytes() == {0: 17, 2: 32}


@pytest.mark.parametrize("size", [SMALL_BYTES - 8, SMALL_BYTES, SMALL_BYTES + 8])
def test_payloads_of_either_kind_round_trip(size):
    array = np.arange(size, dtype=np.uint64).astype(np.uint8)
    content = pack(Packet({}, {(0, "x"): array, (1, "none"): np.zeros((0, 2))}))
    assert bool(content.array_records) == (size > SMALL_BYTES)
    received = unpack(over_the_wire(content))
    assert_array_equal(received.arrays[0, "x"], array)
    assert received.arrays[1, "none"].shape == (0, 2)


def test_overhead_does_not_grow_with_the_arrays():
    sizes = {}
    for rows in (10_000, 99_999):
        array = np.zeros((rows, 1), np.float32)
        content = pack(Packet({"kappa": 0.5}, {(0, "target"): array}))
        sizes[rows] = message_bytes(content) - array.nbytes
    # padding to 8 bytes
    assert abs(sizes[10_000] - sizes[99_999]) <= 8
    assert sizes[10_000] < 500


@pytest.mark.parametrize("rows", [1000, SMALL_BYTES])
def test_unpacked_arrays_are_read_only_views_of_one_buffer(rows):
    packet = Packet({}, {(0, "x"): np.zeros(rows), (1, "y"): np.ones(rows)})
    one, other = unpack(pack(packet)).arrays.values()
    assert not one.flags.writeable
    assert not one.flags.owndata
    # the second array starts where the first ends: nobody copied it
    start = one.__array_interface__["data"][0]
    assert other.__array_interface__["data"][0] == start + one.nbytes


def peak_of(function):
    """Return the result, and the most bytes that were held on the way to it."""
    tracemalloc.start()
    try:
        return function(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("array", [LARGE, LARGE.T, LARGE[:, ::2], LARGE[::-1]])
def test_packing_copies_once_and_unpacking_never(array):
    """Beside the arrays themselves only the payload is made, whatever their order."""
    packet = packet_of(x=array, y=array)
    size = packet.payload_bytes()[0]
    content, peak = peak_of(lambda: pack(packet))
    assert size < peak < 1.1 * size
    received, peak = peak_of(lambda: unpack(content))
    assert peak < 100_000
    assert received.payload_bytes() == {0: size}
    assert_array_equal(received.arrays[0, "y"], array)


@pytest.mark.parametrize(
    "dtype", ["bool", "complex128", "int16", "float16", ">f4", "object", "<U3"]
)
def test_other_dtypes_do_not_travel(dtype):
    with pytest.raises(ValueError, match=r"array 'x' has dtype .*, not in"):
        pack(packet_of(x=np.zeros(2, dtype)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_headers_are_strict_json(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        pack(Packet({"x": value}))


def records(header="{}", layout="[]", payload=None, small=None) -> RecordDict:
    text = ConfigRecord({"header": header, "layout": layout})
    if small is not None:
        text["payload"] = small
    content = RecordDict({"message": text})
    if payload is not None:
        content["arrays"] = ArrayRecord({"payload": payload})
    return content


def one_array(dtype, shape, **payload) -> RecordDict:
    return records(layout=json.dumps([[0, "x", dtype, shape]]), **payload)


def eight(payload) -> RecordDict:
    return one_array("uint8", [8], payload=payload)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (RecordDict(), "it has no ConfigRecord"),
        (NO_LAYOUT, "message: KeyError"),
        (RecordDict({"message": ArrayRecord()}), "it has no ConfigRecord"),
        (records(header="{"), "malformed message: JSONDecodeError"),
        (records(layout="nonsense"), "malformed message: JSONDecodeError"),
        (records(header="[]"), "header or layout has the wrong type"),
        (records(layout="{}"), "header or layout has the wrong type"),
        (one_array("uint8", [1]), "a layout but no payload"),
        (one_array("uint8", [8], small="12345678"), "a layout but no payload"),
        (one_array("uint8", [8], small=bytes(7)), "exceeds the payload"),
        (one_array("uint8", [8], small=bytes(16)), "exceeds its layout"),
        *(
            (records(layout=f"[{entry}]", payload=EIGHT), "bad entry in the lay")
            for entry in case_table(__file__)["entries"]
        ),
        *(
            (one_array("uint8", shape, payload=EIGHT), "array 'x' exceeds the payload")
            for shape in ([9], [3, 3], [10**6, 10**6], [2**62, 4])
        ),
        *(
            (one_array("float32", shape, small=bytes(8)), "array 'x' exceeds the pay")
            for shape in ([3], [2, 2], [2**62, 4])
        ),
        (one_array("float32", [0, 2**62], small=b""), "array 'x' has a bad shape"),
        (eight(Array("uint8", (8,), "bytes", bytes(7))), "exceeds the payload"),
        (eight(Array("uint8", (8,), "bytes", b"")), "exceeds the payload"),
        # with a header of NumPy's
        (eight(Array(np.zeros(8, np.uint8))), "exceeds its layout"),
    ],
)
def test_malformed_records_are_refused(content, message):
    with pytest.raises(ReplyError, match=message):
        unpack(content)


def test_a_cut_payload_is_refused():
    whole = pack(packet_of(x=np.zeros(SMALL_BYTES)))
    array = whole.array_records["arrays"]["payload"]
    cut = Array(array.dtype, array.shape, array.stype, array.data[:-8])
    whole["arrays"] = ArrayRecord({"payload": cut})
    with pytest.raises(ReplyError, match="array 'x' exceeds the payload"):
        unpack(whole)


@given(hnp.arrays(np.bool_, st.integers(0, 40)))
def test_masks_round_trip(mask):
    packed = pack_bits(mask)
    assert packed.nbytes == -(-len(mask) // 8)
    assert_array_equal(unpack_bits(packed, len(mask)), mask)


@pytest.mark.parametrize(
    ("shape", "dtype"), [(1, np.uint8), (3, np.uint8), (2, float), ((2, 1), np.uint8)]
)
def test_masks_of_another_length_are_refused(shape, dtype):
    with pytest.raises(ReplyError, match="not a mask of 9 rows"):
        unpack_bits(np.zeros(shape, dtype), 9)


def test_bytes_are_counted_as_flower_counts_them_and_of_empty_values_too():
    record = ConfigRecord({"a": "text", "b": b"12", "c": True, "d": 3, "e": [1.0, 2.0]})
    arrays = ArrayRecord({"x": Array(np.zeros(5))})
    content = RecordDict({"one": record, "two": arrays})
    assert message_bytes(content) == record.count_bytes() + arrays.count_bytes()
    assert message_bytes(RecordDict({"r": ConfigRecord({"f": "", "g": []})})) == 2
