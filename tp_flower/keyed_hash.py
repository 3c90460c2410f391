"""Keyed hashes of texts, one key per purpose.

The sites of a run share a secret that the server does not have. Values to be compared
across sites (join keys, group keys, categories) leave them as keyed hashes: without the
secret nobody can test a guess. Distinct values are hashed, never rows.

There are two. Keys of rows, which may be as many as the rows, have an AES-256-CMAC
(NIST SP 800-38B, RFC 4493) of 128 bits: processors have instructions for AES, and a
million keys take a fifth of a second where SHA-256 takes three. What is kept with a
model, or decides which rows and categories take part, has the HMAC-SHA-256 that it has
always had.
"""

import hashlib
import hmac
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa
    from cryptography.hazmat.primitives.ciphers import CipherContext

HashArray = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

KEY_BYTES: Final = 32
FEW_TEXTS: Final = 1000  # to hash them one by one takes no longer than to begin a query
RUN_GROUP: Final = "run"  # all sites of a run, which share the key of its hashes
_BLOCK_BYTES: Final = 64  # of SHA-256
_CIPHER_BYTES: Final = 16  # a block of AES
_FIELD: Final = 0x87  # x^7 + x^2 + x + 1, which x^128 equals in RFC 4493
_TEXTS_AT_ONCE: Final = 1 << 15
"""Hashed together: memory that is new takes longer than AES."""
_KEPT: Final = np.tril(np.full((17, 16), 0xFF, np.uint8), -1)
"""By the bytes of a block that are a text's, a mask of them."""
_PADDING: Final = np.eye(17, 16, dtype=np.uint8) * np.uint8(0x80)
"""By the same, what follows them: a bit, and zeros; nothing behind a whole block."""
_HALVES: Final = ", ".join(
    f"CAST('0x' || substr(digest, {start}, 16) AS UBIGINT) AS half_{index}"
    for index, start in enumerate((1, 17, 33, 49))
)


@dataclass(frozen=True)
class KeyedHasher:
    """Hashes texts with a key for every purpose; its secret is never printed."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES:
            raise ValueError(
                f"the secret has {len(self.secret)} bytes, not {KEY_BYTES}"
            )

    def purpose(self, name: str) -> "KeyedHasher":
        """Return a hasher for one purpose: HKDF-Expand with one block (RFC 5869)."""
        return KeyedHasher(
            hmac.digest(self.secret, name.encode() + b"\x01", hashlib.sha256)
        )

    def tag_texts(self, texts: "pa.Array | pa.ChunkedArray") -> HashArray:
        """Return the AES-256-CMAC of k texts, none NULL: uint64 (k, 2), big-endian."""
        # few messages hash, but all of them may import this module
        import pyarrow as pa

        chunks = texts.chunks if isinstance(texts, pa.ChunkedArray) else [texts]
        encryptor = block_cipher(self.secret)
        tags = [
            _tags(encryptor, *_bytes_of(chunk.slice(start, _TEXTS_AT_ONCE)))
            for chunk in chunks
            for start in range(0, len(chunk), _TEXTS_AT_ONCE)
        ]
        joined = np.concatenate([np.empty((0, _CIPHER_BYTES), np.uint8), *tags])
        return joined.view(">u8").astype(np.uint64)

    def hash_texts(self, texts: "pa.Array | pa.ChunkedArray") -> HashArray:
        """Return the 256-bit HMAC of k texts, none NULL: uint64 (k, 4), big-endian."""
        if len(texts) <= FEW_TEXTS:
            digests = [
                hmac.digest(self.secret, t.encode(), "sha256")
                for t in texts.to_pylist()
            ]
            return (
                np.frombuffer(b"".join(digests), ">u8").reshape(-1, 4).astype(np.uint64)
            )
        # few messages hash, but all of them may import this module
        import pyarrow as pa

        from tp_flower.duckdb_engine import shared_cursor

        # a registered table needs no copy; the secret is not part of any SQL
        with closing(shared_cursor()) as cursor:
            cursor.register("texts", pa.table({"t": texts}))
            halves = cursor.execute(
                f"SELECT {_HALVES} FROM (SELECT sha256(CAST($outer AS BLOB) || unhex("
                "sha256(CAST($inner AS BLOB) || encode(t)))) AS digest FROM texts)",
                {"outer": self._pad(0x5C), "inner": self._pad(0x36)},
            ).fetchnumpy()
        return np.column_stack([halves[f"half_{part}"] for part in range(4)])

    def _pad(self, byte: int) -> bytes:
        """Return the key block of RFC 2104, xor-ed with ipad (0x36) or opad (0x5c)."""
        return bytes(b ^ byte for b in self.secret.ljust(_BLOCK_BYTES, b"\0"))


def order_of_hashes(hashes: HashArray) -> npt.NDArray[np.intp]:
    """Return the positions (k,) at which hashes (k, 2) are in their order."""
    order = np.argsort(hashes[:, 0])
    first_halves = hashes[order, 0]
    if (first_halves[1:] == first_halves[:-1]).any():
        # of different hashes once in 2**64 pairs
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    return order


def block_cipher(key: bytes) -> "CipherContext":
    """Return AES-256 of blocks of 128 bits, each by itself."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import ECB

    return Cipher(AES(key), ECB()).encryptor()


def _bytes_of(texts: "pa.Array") -> tuple[Bytes, npt.NDArray[np.int64]]:
    """Return the bytes of all texts, and where each begins and the last one ends."""
    import pyarrow as pa

    encoded = texts.cast(pa.large_binary())
    _, offsets, content = encoded.buffers()
    ends = np.frombuffer(offsets, np.int64)[encoded.offset :][: len(texts) + 1]
    held = np.frombuffer(content or b"", np.uint8)[ends[0] : ends[-1]]
    return held, ends - ends[0]


def _tags(
    encryptor: "CipherContext", content: Bytes, ends: npt.NDArray[np.int64]
) -> Bytes:
    """Return the CMAC of k texts, (k, 16), a block of all of them at a time."""
    subkey = _doubled(encryptor.update(bytes(_CIPHER_BYTES)))
    subkeys = np.frombuffer(subkey + _doubled(subkey), np.uint8).reshape(2, -1)
    lengths = np.diff(ends)
    blocks = np.maximum(-(-lengths // _CIPHER_BYTES), 1)
    # those of most blocks first: at every block, those that have it come first
    order = np.argsort(-blocks, kind="stable")
    starts = ends[:-1][order]
    lengths = lengths[order]
    # every byte, with those that follow it
    padded = np.concatenate([content, np.zeros(_CIPHER_BYTES, np.uint8)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, _CIPHER_BYTES)
    states = np.zeros((len(lengths), _CIPHER_BYTES), np.uint8)
    for number in range(int(blocks.max(initial=0))):
        going = int(np.searchsorted(-blocks[order], -number))
        left = np.minimum(lengths[:going] - number * _CIPHER_BYTES, _CIPHER_BYTES)
        block = windows[starts[:going] + number * _CIPHER_BYTES] & _KEPT[left]
        is_last = blocks[order][:going] == number + 1
        block[is_last] ^= subkeys[(left[is_last] < _CIPHER_BYTES).astype(np.intp)]
        block ^= _PADDING[left] ^ states[:going]
        text = encryptor.update(block.tobytes())
        states[:going] = np.frombuffer(text, np.uint8).reshape(-1, _CIPHER_BYTES)
    tags = np.empty_like(states)
    tags[order] = states
    return tags


def _doubled(block: bytes) -> bytes:
    """Return a block times x in the field of 2^128 elements (RFC 4493, 2.3)."""
    number = int.from_bytes(block) << 1
    carry = number >> (8 * _CIPHER_BYTES)
    number ^= carry << (8 * _CIPHER_BYTES)
    return (number ^ carry * _FIELD).to_bytes(_CIPHER_BYTES)


def hex_texts(hashes: HashArray) -> "pa.Array":
    """Return 32 hexadecimal digits per hash, uint64 (n, 2), as texts.

    >>> hex_texts(np.array([[1, 255]], np.uint64)).to_pylist()
    ['000000000000000100000000000000ff']
    """
    import pyarrow as pa

    digits = hashes.astype(">u8").tobytes().hex().encode()
    return pa.array(np.frombuffer(digits, "S32")).cast(pa.string())
