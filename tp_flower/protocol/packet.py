"""The messages that pass between the server and the sites.

A message carries one JSON header and any number of named arrays, all packed into one
run of bytes, because in deployment the number of arrays in a message costs more than
their bytes. Every array belongs to a *part*: one shard of one table of the query. One
message carries all the parts that a site hosts.

Layout on the wire: ``ConfigRecord["header"]`` is the JSON header,
``ConfigRecord["layout"]`` lists ``[part, name, dtype, shape]`` per array. The payload
holds the arrays one after the other, each starting at a multiple of 8 bytes: a small
payload is ``ConfigRecord["payload"]``, a large one a Flower ``Array`` of bytes, which
is sent in chunks. Nothing is ever unpickled. Numbers per row travel as float32, all
others as they were computed.
"""

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from tp_flower.arrays import AnyArray
from tp_flower.errors import ReplyError
from tp_flower.protocol.fields import Document, between, one_of

ArrayKey = tuple[int, str]

ALIGNMENT_BYTES = 8
WIRE_DTYPES = frozenset(
    {"uint8", "uint32", "uint64", "int32", "int64", "float32", "float64"}
)

SMALL_BYTES = 1 << 20
"""Payloads up to this size are a value of the config record: each additional Flower
object costs more than copying them, and in deployment additional calls."""

_Shape = Annotated[
    list[Annotated[int, between(0, (1 << 63) - 1)]],
    # of longer ones the product alone could take minutes
    msgspec.Meta(max_length=8),
]
_Entry = tuple[int, str, Annotated[str, one_of(*WIRE_DTYPES)], _Shape]

MESSAGE = "message"
ARRAYS = "arrays"
HEADER = "header"
LAYOUT = "layout"
PAYLOAD = "payload"

# made once: json.dumps makes an encoder per call
_JSON: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_DTYPES: Final = {name: np.dtype(name) for name in sorted(WIRE_DTYPES)}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Packet:
    """The content of one message; arrays are keyed by (part, name)."""

    header: Document = field(default_factory=dict)
    arrays: Mapping[ArrayKey, AnyArray] = field(default_factory=dict)

    def payload_bytes(self) -> dict[int, int]:
        """Return the bytes of the arrays by part, as they travel."""
        sizes: dict[int, int] = {}
        for (part, _), array in self.arrays.items():
            sizes[part] = sizes.get(part, 0) + array.nbytes
        return sizes


def pack(packet: Packet) -> RecordDict:
    """Pack a packet into Flower records; the arrays are copied once."""
    entries: list[str] = []
    arrays: list[AnyArray] = []
    size = 0
    for (part, name), array in packet.arrays.items():
        dtype = _NAMES.get(array.dtype)
        if dtype is None:
            raise ValueError(f"array {name!r} has dtype {array.dtype}, not in {_NAMES}")
        shape = ",".join(map(str, array.shape))
        entries.append(f'[{part},{encode_basestring_ascii(name)},"{dtype}",[{shape}]]')
        arrays.append(array)
        size += array.nbytes + (-array.nbytes % ALIGNMENT_BYTES)
    return _records(
        _JSON.encode(packet.header), f"[{','.join(entries)}]", _join(arrays, size)
    )


def unpack(content: RecordDict) -> Packet:
    """Return the packet in Flower records; the arrays are read-only views."""
    record = _record(content)
    header = _document(record, HEADER, dict)
    layout = _document(record, LAYOUT, list)
    if not layout:
        if PAYLOAD in record or ARRAYS in content:
            raise ReplyError("malformed message: it has a payload but no layout")
        return Packet(header)
    return Packet(header, _views(layout, _payload(content, record)))


def header_of(content: RecordDict) -> Document:
    """Return the header alone of a packet in Flower records; see ``unpack``."""
    header: Document = _document(_record(content), HEADER, dict)
    return header


class Parcel(NamedTuple):
    """A message's content as bytes, to be stored in a file."""

    header: bytes | memoryview
    layout: bytes | memoryview
    payload: bytes | memoryview


def parcel_of(content: RecordDict) -> Parcel:
    """Return a packed message as bytes, without a copy of the arrays."""
    record = _record(content)
    try:
        header = str(record[HEADER])
        layout = str(record[LAYOUT])
    except KeyError as error:
        raise ReplyError(f"malformed message: it has no {error}") from None
    payload = b"" if layout == "[]" else _payload(content, record)
    return Parcel(header.encode("utf-8"), layout.encode("utf-8"), payload)


def open_parcel(parcel: Parcel) -> RecordDict:
    """Return a packed message from its bytes."""
    header = str(bytes(parcel.header), "utf-8")
    layout = str(bytes(parcel.layout), "utf-8")
    return _records(header, layout, bytes(parcel.payload))


def content_bytes(content: RecordDict) -> bytes:
    """Return a message's content as one run of bytes; see ``content_of``."""
    return msgspec.msgpack.encode(tuple(map(bytes, parcel_of(content))))


def content_of(content: bytes) -> RecordDict:
    """Return the content that ``content_bytes`` wrote; ValueError if malformed."""
    kind = tuple[bytes, bytes, bytes]
    try:
        return open_parcel(Parcel(*msgspec.msgpack.decode(content, type=kind)))
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None


def bytes_of(packet: Packet) -> bytes:
    """Return a packet as one run of bytes, which ``packet_of`` reads back."""
    return content_bytes(pack(packet))


def packet_of(content: bytes) -> Packet:
    """Return the packet in a run of bytes; the arrays are read-only views."""
    return unpack(content_of(content))


def message_bytes(content: RecordDict) -> int:
    """Return the size of a message's records on the wire, in bytes.

    Foreign records count, too, whatever they contain: Flower's count of a record fails
    on empty values.
    """
    size = 0
    for record in content.values():
        if isinstance(record, ArrayRecord):
            size += record.count_bytes()
        elif isinstance(record, ConfigRecord):
            size += sum(len(k) + _value_bytes(value) for k, value in record.items())
    return size


def _value_bytes(value: object) -> int:
    if isinstance(value, list):
        return sum(map(_value_bytes, value))
    if isinstance(value, str | bytes):
        return len(value)
    return 1 if isinstance(value, bool) else 8


def _records(header: str, layout: str, payload: bytes) -> RecordDict:
    """Return a message's content as Flower's records; a small payload is a value."""
    record = ConfigRecord({HEADER: header, LAYOUT: layout})
    content = RecordDict({MESSAGE: record})
    if 0 < len(payload) <= SMALL_BYTES:
        record[PAYLOAD] = payload
    elif layout != "[]":  # arrays without any number have a payload of no bytes
        content[ARRAYS] = ArrayRecord(
            {PAYLOAD: Array("uint8", (len(payload),), "bytes", payload)}
        )
    return content


def _join(arrays: list[AnyArray], size: int) -> bytes:
    """Return the arrays, padded; each is copied once, whatever its order.

    The zeros are not written until something else is, and CPython hands them out
    without a copy while nobody else has seen them.
    """
    buffer = io.BytesIO(bytes(size))
    with buffer.getbuffer() as view:
        offset = 0
        for array in arrays:
            target = np.ndarray(array.shape, array.dtype, view, offset)
            target[...] = array
            del target  # the buffer stays locked as long as it exists
            offset += array.nbytes + (-array.nbytes % ALIGNMENT_BYTES)
    return buffer.getvalue()


def _payload(content: RecordDict, record: ConfigRecord) -> memoryview:
    """Return the bytes of the arrays, from the record or beside it."""
    if isinstance(small := record.get(PAYLOAD), bytes):
        return memoryview(small)
    try:
        array = content.array_records[ARRAYS][PAYLOAD]
    except KeyError:
        raise ReplyError("malformed message: it has a layout but no payload") from None
    return memoryview(array.data)


def _record(content: RecordDict) -> ConfigRecord:
    """Return the record of a message; Flower's views by type take longer."""
    record = content.get(MESSAGE)
    if not isinstance(record, ConfigRecord):
        raise ReplyError(f"malformed message: it has no ConfigRecord {MESSAGE!r}")
    return record


def _document(record: ConfigRecord, name: str, kind: type) -> Any:
    """Return the JSON of an entry; ReplyError unless it has the right type."""
    try:
        document = json.loads(str(record[name]))
    except (KeyError, ValueError, RecursionError) as error:
        raise ReplyError(f"malformed message: {type(error).__name__}") from None
    if not isinstance(document, kind):
        raise ReplyError("malformed message: header or layout has the wrong type")
    return document


def _views(layout: list[Any], view: memoryview) -> dict[ArrayKey, AnyArray]:
    """Return the arrays as views of the payload, which the layout must fill."""
    arrays: dict[ArrayKey, AnyArray] = {}
    offset = 0
    try:
        entries = msgspec.convert(layout, list[_Entry])
    except msgspec.ValidationError:
        raise ReplyError("malformed message: bad entry in the layout") from None
    for part, name, dtype, shape in entries:
        stored = _DTYPES[dtype]
        if (part, name) in arrays:
            raise ReplyError(f"malformed message: array {name!r} is there twice")
        size = math.prod(shape) * stored.itemsize
        if offset + size > len(view):
            raise ReplyError(f"malformed message: array {name!r} exceeds the payload")
        try:
            array: AnyArray = np.ndarray(shape, stored, view, offset)
        except (ValueError, OverflowError):  # one that is too long beside a 0
            raise ReplyError(
                f"malformed message: array {name!r} has a bad shape"
            ) from None
        arrays[part, name] = array
        offset += size + (-size % ALIGNMENT_BYTES)
    if offset != len(view):
        raise ReplyError("malformed message: the payload exceeds its layout")
    return arrays


def row_numbers(values: AnyArray) -> npt.NDArray[np.float32]:
    """Return numbers per row as they travel; those beyond float32 become infinite."""
    # the receiver refuses infinite numbers, and says what to do
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float32)


def pack_bits(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """Return a mask (n,) as (ceil(n / 8),) bytes."""
    return np.packbits(mask)


def unpack_bits(packed: AnyArray, count: int) -> npt.NDArray[np.bool_]:
    """Return the mask (count,) that ``pack_bits`` packed."""
    if packed.dtype != np.uint8 or packed.shape != (-(-count // 8),):
        raise ReplyError(f"malformed message: not a mask of {count} rows")
    return np.unpackbits(packed, count=count).astype(np.bool_)
