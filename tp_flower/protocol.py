"""The messages that pass between the server and the sites.

A message carries one JSON header and any number of named arrays, all packed into a
single Flower ``Array``: in deployment the number of arrays in a message costs more than
their bytes. Every array belongs to a *part*: one shard of one table of the query. One
message carries all the parts that a site hosts.

Layout on the wire: ``ConfigRecord["header"]`` is the JSON header,
``ConfigRecord["layout"]`` lists ``[part, name, dtype, shape]`` per array, and the
payload holds the arrays one after the other, each starting at a multiple of 8 bytes.
Nothing is ever unpickled.
"""

import io
import json
import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from tp_flower.errors import ReplyError

AnyArray = npt.NDArray[Any]
ArrayKey = tuple[int, str]

ALIGNMENT_BYTES = 8
WIRE_DTYPES = frozenset(
    {"uint8", "uint32", "uint64", "int32", "int64", "float32", "float64"}
)

NPY_MAGIC = b"\x93NUMPY\x01\x00"
NPY_HEADER_BYTES = 128
"""What NumPy writes before a flat array of bytes of any length."""

MESSAGE = "message"
ARRAYS = "arrays"
HEADER = "header"
LAYOUT = "layout"
PAYLOAD = "payload"


class Action(StrEnum):
    """The Flower message type of every request that a site answers."""

    DESCRIBE = "query.describe"
    SEAL = "query.seal"
    EXTRACT = "query.extract"
    STATISTICS = "query.statistics"
    CHECK = "query.check"
    PREPARE = "train.prepare"
    ADMM = "train.admm"
    CONSENSUS = "train.consensus"
    SGD = "train.sgd"
    STEP = "train.step"
    FINISH = "query.finish"


@dataclass(frozen=True)
class Packet:
    """What one message says.

    Attributes:
        header: JSON-able settings of the request or facts of the reply.
        arrays: arrays by (part, name), of one of the dtypes in ``WIRE_DTYPES``.
    """

    header: dict[str, Any] = field(default_factory=dict)
    arrays: dict[ArrayKey, AnyArray] = field(default_factory=dict)

    def array(self, part: int, name: str) -> AnyArray:
        """Return one array.

        Raises:
            ReplyError: if the message does not carry it.
        """
        try:
            return self.arrays[part, name]
        except KeyError:
            present = sorted(f"{key[0]}/{key[1]}" for key in self.arrays)
            raise ReplyError(
                f"the message lacks array {name!r} of part {part}; it has {present}"
            ) from None

    def payload_bytes(self) -> dict[int, int]:
        """Return the bytes of the arrays by part."""
        sizes: dict[int, int] = {}
        for (part, _), array in self.arrays.items():
            sizes[part] = sizes.get(part, 0) + array.nbytes
        return sizes


def pack(packet: Packet) -> RecordDict:
    """Pack a packet into Flower records; the arrays are copied once.

    Raises:
        ValueError: if an array has a dtype that does not travel.
    """
    layout: list[list[Any]] = []
    chunks: list[bytes | memoryview] = []
    size = 0
    for (part, name), array in packet.arrays.items():
        dtype = array.dtype.name
        if dtype not in WIRE_DTYPES:
            raise ValueError(f"array {name!r} has dtype {dtype}, not in {WIRE_DTYPES}")
        layout.append([part, name, dtype, list(array.shape)])
        padding = -array.nbytes % ALIGNMENT_BYTES
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        chunks += [flat.data, bytes(padding)]
        size += array.nbytes + padding
    record = ConfigRecord(
        {
            HEADER: json.dumps(packet.header, separators=(",", ":"), allow_nan=False),
            LAYOUT: json.dumps(layout, separators=(",", ":")),
        }
    )
    content = RecordDict({MESSAGE: record})
    if layout:
        data = b"".join([_npy_header(size), *chunks])
        payload = Array("uint8", (size,), "numpy.ndarray", data)
        content[ARRAYS] = ArrayRecord({PAYLOAD: payload})
    return content


def unpack(content: RecordDict) -> Packet:
    """Return the packet in Flower records; the arrays are read-only views.

    Raises:
        ReplyError: if the records are not what ``pack`` makes.
    """
    try:
        record = content.config_records[MESSAGE]
        header = json.loads(str(record[HEADER]))
        layout = json.loads(str(record[LAYOUT]))
    except (KeyError, ValueError, RecursionError) as error:
        raise ReplyError(f"malformed message: {type(error).__name__}") from None
    if not isinstance(header, dict) or not isinstance(layout, list):
        raise ReplyError("malformed message: header or layout has the wrong type")
    if not layout:
        return Packet(header)
    return Packet(header, _views(layout, _payload(content)))


def message_bytes(content: RecordDict) -> int:
    """Return the size of a message's records on the wire, in bytes."""
    total = 0
    for records in content.array_records.values():
        total += records.count_bytes()
    for record in content.config_records.values():
        total += record.count_bytes()
    return total


def _npy_header(size: int) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": "|u1", "fortran_order": False, "shape": (size,)}
    )
    return buffer.getvalue()


def _payload(content: RecordDict) -> memoryview:
    try:
        array = content.array_records[ARRAYS][PAYLOAD]
    except KeyError:
        raise ReplyError("malformed message: it has a layout but no payload") from None
    # compared, not parsed: NumPy's own parsing takes longer than the rest of unpacking
    view = memoryview(array.data)[NPY_HEADER_BYTES:]
    if array.data[: len(NPY_MAGIC)] != NPY_MAGIC:
        raise ReplyError("malformed message: the payload is not an array")
    if array.data[:NPY_HEADER_BYTES] != _npy_header(len(view)):
        raise ReplyError("malformed message: the payload has the wrong size")
    return view


def _views(layout: list[Any], view: memoryview) -> dict[ArrayKey, AnyArray]:
    arrays: dict[ArrayKey, AnyArray] = {}
    offset = 0
    for entry in layout:
        part, name, dtype, shape = _layout_entry(entry)
        count = math.prod(shape)
        size = count * np.dtype(dtype).itemsize
        if offset + size > len(view):
            raise ReplyError(f"malformed message: array {name!r} exceeds the payload")
        flat = np.frombuffer(view, dtype, count, offset)
        try:
            arrays[part, name] = flat.reshape(shape)
        except ValueError:  # too many dimensions, or one too long beside a 0
            raise ReplyError(f"malformed message: shape of array {name!r}") from None
        offset += size + (-size % ALIGNMENT_BYTES)
    if offset != len(view):
        raise ReplyError("malformed message: the payload exceeds its layout")
    return arrays


def _layout_entry(entry: Any) -> tuple[int, str, str, tuple[int, ...]]:
    match entry:
        case [int(part), str(name), str(dtype), [*shape]] if dtype in WIRE_DTYPES:
            if all(type(size) is int and size >= 0 for size in shape):
                return part, name, dtype, tuple(shape)
    raise ReplyError("malformed message: bad entry in the layout")


class Update(StrEnum):
    """How the shards of one table are trained together (learning over unions).

    LOCAL: the shard is the whole table. GRAM: the sites send sufficient statistics, the
    server solves. CONSENSUS: consensus ADMM. SUM: the sites send gradients, the server
    sums (SGD).
    """

    LOCAL = "local"
    GRAM = "gram"
    CONSENSUS = "consensus"
    SUM = "sum"


def pack_bits(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """Return a mask (n,) as (ceil(n / 8),) bytes."""
    return np.packbits(mask)


def unpack_bits(packed: AnyArray, count: int) -> npt.NDArray[np.bool_]:
    """Return the mask (count,) that ``pack_bits`` packed.

    Raises:
        ReplyError: if the bytes are not those of ``count`` bits.
    """
    if packed.dtype != np.uint8 or packed.shape != (-(-count // 8),):
        raise ReplyError(f"malformed message: not a mask of {count} rows")
    return np.unpackbits(packed, count=count).astype(np.bool_)
