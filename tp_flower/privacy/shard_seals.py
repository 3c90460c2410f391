"""Seals of what the shards of one table tell each other by way of the server.

The sites of a table's shards share a key that the server does not have. A text is
sealed with ChaCha20-Poly1305 under a key that is derived for this purpose alone. The
run, the table, the numbers of all its shards, and which document of which shard it is
are associated data: the recipient states them, the server cannot change them.

**Guarantee.** The server learns the length, rounded up, and who sends to whom. It can
leave a text out, or send it to nobody; any other text than the one that belongs in a
place is refused: one of its own, of another run or table, of another shard, or of the
same shards beside others. None against the table's own shards, which all have the key.

The nonce is a pseudo-random function of the text, its place and the request that it
answers: a message that is answered again is the same bytes, and two requests with equal
answers get different ones, so that nobody can tell that they are equal.

Reference:
    RFC 8439, "ChaCha20 and Poly1305 for IETF Protocols". The nonce is that of Rogaway
    and Shrimpton 2006, "A provable-security treatment of the key-wrap problem" (SIV).
"""

import hashlib
import hmac
import json
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from tp_flower.arrays import AnyArray
from tp_flower.errors import SiteError
from tp_flower.keyed_hash import KeyedHasher

STATISTICS: Final = "statistics"
ENCODER: Final = "encoder"
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
LEAST_BYTES: Final = 1 << 10
_END: Final = b"\x80"


@dataclass(frozen=True)
class ShardSeal:
    """Seals and opens the documents of one table's shards in one run.

    >>> one, other = (ShardSeal(bytes(32), "run", "t", (0, 2)) for _ in range(2))
    >>> sealed = one.seal(b"text", STATISTICS, 2, "digest")
    >>> other.open(sealed, STATISTICS, 2)
    b'text'

    Attributes:
        key: of the table, ``KEY_BYTES``.
        shards: the numbers of all shards of the table.
    """

    key: bytes = field(repr=False)
    run: str
    table: str
    shards: tuple[int, ...]

    def seal(self, text: bytes, document: str, shard: int, request: str) -> AnyArray:
        """Seal a shard's document, in answer to the request with this digest.

        Returns:
            uint8: nonce and ciphertext, as long for texts of almost the same length.
        """
        context = self._place(document, shard)
        padded = pad(text)
        named = context + request.encode() + padded
        nonce = hmac.digest(self._purpose("nonce"), named, hashlib.sha256)[:NONCE_BYTES]
        return np.frombuffer(
            nonce + self._cipher.encrypt(nonce, padded, context), np.uint8
        )

    def open(self, sealed: AnyArray, document: str, shard: int) -> bytes:
        """Return the document of a shard; SiteError for any other bytes."""
        content = sealed.tobytes()
        context = self._place(document, shard)
        nonce = content[:NONCE_BYTES]
        text = content[NONCE_BYTES:]
        try:
            padded = self._cipher.decrypt(nonce, text, context)
        except (InvalidTag, ValueError):
            raise SiteError(
                f"the sealed {document} of part {shard} cannot be opened: no shard of "
                f"table {self.table!r} has sealed them in this run, for parts "
                f"{', '.join(map(str, self.shards))}"
            ) from None
        return padded.rstrip(b"\0")[: -len(_END)]

    @property
    def _cipher(self) -> ChaCha20Poly1305:
        return ChaCha20Poly1305(self._purpose("text"))

    def _purpose(self, name: str) -> bytes:
        return KeyedHasher(self.key).purpose(f"shard seal v1: {name}").secret

    def _place(self, document: str, shard: int) -> bytes:
        """Return the associated data: JSON has one reading."""
        return json.dumps([self.run, self.table, self.shards, document, shard]).encode()


def sealed_bytes(size: int) -> int:
    """Return the bytes of a sealed text of some bytes.

    >>> seal = ShardSeal(bytes(32), "run", "t", (0, 2))
    >>> len(seal.seal(bytes(5000), STATISTICS, 0, "digest")) == sealed_bytes(5000)
    True
    """
    return NONCE_BYTES + len(pad(bytes(size))) + TAG_BYTES


def pad(text: bytes) -> bytes:
    """Pad a text to a length that tells its own within an eighth, at most.

    >>> [len(pad(bytes(size))) for size in (0, 1023, 1024, 9000)]
    [1024, 1024, 2048, 9216]
    """
    size = len(text) + len(_END)
    step = max(LEAST_BYTES, 1 << size.bit_length() >> 4)
    return (text + _END).ljust(-(-size // step) * step, b"\0")
