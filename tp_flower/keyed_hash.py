"""Keyed hashes of texts: HMAC-SHA-256, one key per purpose.

The sites of a run share a secret that the server does not have. Values to be compared
across sites (join keys, group keys, categories) leave them as keyed hashes: without the
secret nobody can test a guess. Distinct values are hashed, never rows.
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

HashArray = npt.NDArray[np.uint64]

KEY_BYTES: Final = 32
FEW_TEXTS: Final = 1000  # to hash them one by one takes no longer than to begin a query
RUN_GROUP: Final = "run"  # all sites of a run, which share the key of its hashes
_BLOCK_BYTES: Final = 64  # of SHA-256
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


def hex_texts(hashes: HashArray) -> "pa.Array":
    """Return 32 hexadecimal digits per hash, uint64 (n, 2), as texts.

    >>> hex_texts(np.array([[1, 255]], np.uint64)).to_pylist()
    ['000000000000000100000000000000ff']
    """
    import pyarrow as pa

    digits = hashes.astype(">u8").tobytes().hex().encode()
    return pa.array(np.frombuffer(digits, "S32")).cast(pa.string())
