"""Blocks of second moments that the label's site reads in place of the server.

The server computes blocks from what the tables send, as ever. What the label's table
sends of each block has one more pad, Z, whose key its site alone has: the server gets
S + Z of a table's own block and S - Z of two tables', and hands both to the site, which
takes Z off. Z is uniform, so that the words of a block are uniform whatever S is: the
server's view is the same for all data of equal structure.

A pad hides and does not bind: who adds a word to S + Z has added it to S. So each table
has one column more, its *check*: the sum of its columns times secret words u_t, that
its sites share with the label's. A block of tables i and k is then

    [ S_ik        S_ik u_k       ]
    [ u_i^T S_ik  u_i^T S_ik u_k ]

and the label's site compares. A server that alters S_ik by Delta must alter the last
column by Delta u_k, and knows nothing of u_k: where 2^v is the largest power of two in
all of a row of Delta, it guesses right with probability 2^(v - 64) at most. Whether the
comparison fails depends on Delta and u alone, so that a refusal tells nothing of S.

Notation:
    d_t  columns of table t        u_t  (d_t,), the weights of its check
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tp_flower.errors import SiteError
from tp_flower.methods.moments.tree import Pair
from tp_flower.methods.moments.words import WordArray
from tp_flower.randomness import key_stream

_READER: Final = b"tp_flower moments reader pad v1 "
_CHECK: Final = b"tp_flower moments check v1 "
ALTERED_BLOCKS: Final = (
    "the moments that the server has brought are not those of the sites' sums: it has "
    "altered words, or told a site other counts than the others"
)


@dataclass(frozen=True)
class ReaderPads:
    """The pads Z of the label's site.

    Attributes:
        key: new in every run, which nobody else has.
    """

    key: bytes = field(repr=False)

    def of_block(self, pass_name: str, pair: Pair, shape: tuple[int, ...]) -> WordArray:
        """Return Z of a block in a pass, uniform words of a shape."""
        name = "\0".join((pass_name, *pair)).encode()
        return _words(self.key, _READER + name, shape)


def check_weights(key: bytes, table: str, columns: int) -> WordArray:
    """Return u_t, (d_t,), from the key of the table's sites and the label's."""
    return _words(key, _CHECK + table.encode(), (columns,))


def _words(key: bytes, purpose: bytes, shape: tuple[int, ...]) -> WordArray:
    """Return uniform words of a shape, the same of equal keys and purposes."""
    derived = hmac.digest(key, purpose, hashlib.sha256)
    size = int(np.prod(shape))
    stream = key_stream(derived).update(bytes(8 * size))
    return np.frombuffer(stream, "<u8").astype(np.uint64).reshape(shape)


def checked_widths(columns: Mapping[str, int]) -> dict[str, int]:
    """Return the columns of every table with its check.

    >>> checked_widths({"a": 3})
    {'a': 4}
    """
    return {table: width + 1 for table, width in columns.items()}


def with_check(words: WordArray, weights: WordArray) -> WordArray:
    """Return words (n, d) with their check, (n, d + 1).

    >>> with_check(np.array([[1, 2]], np.uint64), np.array([5, 3], np.uint64)).tolist()
    [[1, 2, 11]]
    """
    return np.concatenate([words, words @ weights[:, None]], axis=1)


def block_with_checks(block: WordArray, weights: WordArray) -> WordArray:
    """Return a table's own block (d, d) with its check in rows and columns."""
    return with_check(with_check(block, weights).T, weights).T


def read_blocks(
    blocks: Mapping[Pair, WordArray],
    pads: ReaderPads,
    pass_name: str,
    weights: Mapping[str, WordArray],
) -> dict[Pair, WordArray]:
    """Return S by pair of tables, (d_i, d_k), of the blocks that the server brings.

    Args:
        blocks: S + Z and S - Z, (d_i + 1, d_k + 1).
        pads: of the label's site.
        pass_name: of the pass.
        weights: of every table's check.

    Raises:
        SiteError: a block is not what the sites' sums make.
    """
    read = {}
    for pair, padded in blocks.items():
        pad = pads.of_block(pass_name, pair, padded.shape)
        # the server takes what tables send of two off a product, and adds up their own
        block = padded - pad if pair[0] == pair[1] else padded + pad
        first, second = (weights[table] for table in pair)
        moments = block[:-1, :-1]
        columns_agree = np.array_equal(with_check(moments, second), block[:-1])
        rows_agree = np.array_equal(with_check(block[:-1].T, first).T, block)
        if not (columns_agree and rows_agree):
            raise SiteError(ALTERED_BLOCKS)
        read[pair] = moments
    return read
