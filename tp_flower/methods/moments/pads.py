"""One-time pads of sums by join key, which the two ends of a join share.

Pads are words of AES-256 under a key that is derived from that of the join's group, K_e
and a *digest* of all that the two ends must agree on: the keys that joined rows have,
both ends' counts of each, the tables' columns and the pass.
A server that tells the ends different things gets sums under pads that nothing takes
off again. K_e is new in every run, and a site answers one request of a run: no pad
covers two sums.

Notation:
    k  keys of the edge that joined rows have, in an order of either end's choice
"""

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB

from tp_flower.arrays import IntArray
from tp_flower.keyed_hash import HashArray
from tp_flower.methods.moments.words import WordArray
from tp_flower.randomness import key_stream

_PURPOSE: Final = b"tp_flower moments pad v1 "
_BLOCK_BYTES: Final = 16
_WORDS: Final = _BLOCK_BYTES // 8


def edge_digest(
    tags: HashArray,
    counts: tuple[IntArray, IntArray],
    columns: Mapping[str, int],
    name: str,
) -> bytes:
    """Return the digest of an edge in one pass, the same at both ends.

    Args:
        tags: (k, 2), of the keys that joined rows have.
        counts: of the edge's left and of its right end, (k,) each.
        columns: of every table.
        name: of the pass.
    """
    order = np.lexsort((tags[:, 1], tags[:, 0]))
    stated = json.dumps([name, sorted(columns.items())])
    digest = hashlib.sha256(stated.encode())
    for array in (tags, *counts):
        digest.update(np.ascontiguousarray(array[order]).tobytes())
    return digest.digest()


@dataclass(frozen=True, eq=False)
class EdgePads:
    """The pads of an edge in one pass.

    Attributes:
        key: K_e.
        digest: of what the two ends agree on.
        tags: uint64 (k, 2), keyed hashes of the keys.
    """

    key: bytes = field(repr=False)
    digest: bytes
    tags: HashArray

    def of_sums(self, side: str, source: str, columns: int) -> WordArray:
        """Return the pads of the sums of a table's columns, (k, columns).

        ``source`` is the table, ``side`` the end of the edge on whose side it lies.
        """
        blocks = -(-columns // _WORDS)
        name = hashlib.sha256(json.dumps([side, source]).encode()).digest()
        inputs = self.tags ^ np.frombuffer(name[:_BLOCK_BYTES], "<u8")
        inputs = np.repeat(inputs[:, None, :], blocks, axis=1)
        inputs[:, :, 1] ^= np.arange(blocks, dtype=np.uint64)
        cipher = Cipher(AES(self._derived("sums")), ECB()).encryptor()
        text = cipher.update(np.ascontiguousarray(inputs, "<u8").tobytes())
        words = np.frombuffer(text, "<u8").reshape(len(self.tags), blocks * _WORDS)
        return words[:, :columns]

    def of_products(self, first: str, second: str, shape: tuple[int, int]) -> WordArray:
        """Return the pad of a block of moments of two tables, or of one, (d, d')."""
        key = self._derived(json.dumps([first, second]))
        words = key_stream(key).update(bytes(8 * shape[0] * shape[1]))
        return np.frombuffer(words, "<u8").reshape(shape)

    def _derived(self, purpose: str) -> bytes:
        named = _PURPOSE + self.digest + purpose.encode()
        return hmac.digest(self.key, named, hashlib.sha256)

    @cached_property
    def keys(self) -> int:
        """The number of keys, k."""
        return len(self.tags)
