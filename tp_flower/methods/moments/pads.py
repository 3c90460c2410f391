"""One-time pads of sums by join key, which the sites on the two sides of a join share.

A pad of a key is made of the key's *state*, 128 bits that hold all that those who share
it must agree on: the key's tag, how many tuples of every shard on either side have it,
the tables' columns, their bits and the pass. The state is a CBC-MAC of these with
AES-256, under a key derived from that of the join's group, K_e. A server that tells two
sites different counts of a key gets sums under pads that nothing takes off again.

Blocks of moments have pads of *all* joins: for every two shards that share keys of an
edge, they follow from the states of these. So a count that two sites were told
differently, wherever in the tree, leaves every block of the run uniform words. (Pads of
the joins between a block's two tables would not do: a server that lies about a table's
other join, and is consistent from there on, would weigh rows as it likes.)

K_e is new in every run, and a site answers one request of a run: no pad covers two
sums.

Notation:
    k  keys of an edge that joined rows of a shard have      J, L  shards on either side
"""

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import CipherContext

from tp_flower.arrays import BoolArray, IntArray
from tp_flower.keyed_hash import HashArray, block_cipher, order_of_hashes
from tp_flower.methods.moments.words import WordArray
from tp_flower.randomness import key_stream

_PURPOSE: Final = b"tp_flower moments pad v1 "
_BLOCK_BYTES: Final = 16
_WORDS: Final = _BLOCK_BYTES // 8
_BLOCK_KEYS: Final = 1 << 11
"""Of which pads are made at once: memory that is new takes longer than AES."""


@dataclass(frozen=True, eq=False)
class SharedKeys:
    """The keys of an edge in one pass, as a shard on one of its sides has them.

    Attributes:
        key: K_e.
        tags: uint64 (k, 2), keyed hashes of the keys, which the server may know.
        sides: the tables on the left and on the right.
        counts: of both sides, (k, J) and (k, L): tuples of every shard with the key.
        columns: of every table.
        pass_name: of the pass.
        bits: after the point of every table's columns, where all know them.
        label_rows: of each shard of the label's table, as the sites are told.
        split_rows: of each shard of another table that is held out at random.
    """

    key: bytes = field(repr=False)
    tags: HashArray
    sides: tuple[str, str]
    counts: tuple[IntArray, IntArray]
    columns: Mapping[str, int]
    pass_name: str
    bits: Mapping[str, int] = field(default_factory=dict)
    label_rows: Sequence[int] = ()
    split_rows: Sequence[int] = ()

    @cached_property
    def states(self) -> WordArray:
        """The state of every key, (k, 2)."""
        shards = [counts.shape[1] for counts in self.counts]
        sizes = [sorted(of.items()) for of in (self.columns, self.bits)]
        of_shards = [list(self.label_rows), list(self.split_rows)]
        told = [self.pass_name, shards, *sizes, *of_shards]
        stated = json.dumps(told)
        encryptor = block_cipher(self._derived(stated))
        states = _encrypted(encryptor, self.tags)
        for counts in self.counts:
            for of_shard in counts.T:
                states = states.copy()
                states[:, 0] ^= of_shard.astype(np.uint64)
                states = _encrypted(encryptor, states)
        return states

    def total(self, side: str, source: str) -> WordArray:
        """Return the sum of the pads of all shards on a side that have the key."""
        total = np.zeros((len(self.tags), self.columns[source]), np.uint64)
        for shard, of_shard in enumerate(self._counts_of(side).T):
            has_key = of_shard > 0
            if has_key.all():
                total += self.of_shard(side, shard, source)
            else:
                total[has_key] += self._select(has_key).of_shard(side, shard, source)
        return total

    def of_shard(self, side: str, shard: int, source: str) -> WordArray:
        """Return the pads of a shard's sums of a table's columns, (k, d).

        ``side`` is the shard's table, on whose side of the edge ``source`` lies.
        """
        columns = self.columns[source]
        blocks = -(-columns // _WORDS)
        name = hashlib.sha256(json.dumps([side, shard, source]).encode()).digest()
        inputs = self.states ^ np.frombuffer(name[:_BLOCK_BYTES], "<u8")
        encryptor = block_cipher(self._derived("sums"))
        words = np.empty((len(self.tags), columns), np.uint64)
        for start in range(0, len(words), _BLOCK_KEYS):
            of_keys = slice(start, start + _BLOCK_KEYS)
            of_blocks = np.repeat(inputs[of_keys, None, :], blocks, axis=1)
            of_blocks[:, :, 1] ^= np.arange(blocks, dtype=np.uint64)
            pads = _encrypted(encryptor, of_blocks)
            words[of_keys] = pads.reshape(len(of_blocks), -1)[:, :columns]
        return words

    def of_block(self, side: str, shard: int, pair: tuple[str, str]) -> WordArray:
        """Return a shard's part of the edge's pad of a block, (d_i, d_k).

        The parts of all shards on both sides add up to 0.
        """
        is_left = side == self.sides[0]
        shape = (self.columns[pair[0]], self.columns[pair[1]])
        total = np.zeros(shape, np.uint64)
        for partner, digest in self._digests[side].items():
            shards = (shard, partner) if is_left else (partner, shard)
            name = json.dumps([*pair, *shards, digest])
            stream = key_stream(self._derived(name)).update(bytes(total.nbytes))
            words = np.frombuffer(stream, "<u8").reshape(shape)
            total += words if is_left else -words
        return total

    @cached_property
    def _digests(self) -> dict[str, dict[int, str]]:
        """By side and shard of the other one, that of the states of its keys."""
        order = order_of_hashes(self.states)
        digests: dict[str, dict[int, str]] = {}
        for side, partners in zip(self.sides, reversed(self.counts), strict=True):
            digests[side] = {}
            for partner, of_partner in enumerate(partners.T):
                shared = self.states[order[of_partner[order] > 0]]
                if len(shared):
                    digest = hashlib.sha256(shared.tobytes()).hexdigest()
                    digests[side][partner] = digest
        return digests

    def _select(self, chosen: BoolArray) -> "SharedKeys":
        """Return some of the keys, by a mask (k,)."""
        left, right = self.counts
        return replace(
            self, tags=self.tags[chosen], counts=(left[chosen], right[chosen])
        )

    def _counts_of(self, side: str) -> IntArray:
        return self.counts[self.sides.index(side)]

    def _derived(self, purpose: str) -> bytes:
        return hmac.digest(self.key, _PURPOSE + purpose.encode(), hashlib.sha256)


def _encrypted(encryptor: CipherContext, blocks: WordArray) -> WordArray:
    """Return blocks of 128 bits, (n, 2), each encrypted."""
    text = encryptor.update(np.ascontiguousarray(blocks, "<u8").tobytes())
    return np.frombuffer(text, "<u8").reshape(-1, _WORDS)
