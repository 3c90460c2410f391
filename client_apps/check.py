"""A site's part in the cross-check of the alignment: digests of the keys it holds."""

from typing import Any, Final

import numpy as np

from client_apps.keys import key_groups
from client_apps.orders import part_orders, whole_numbers
from client_apps.site import Site
from tp_flower.privacy.keyed_hash import HashArray
from tp_flower.protocol import AnyArray, ArrayKey, Packet

MOST_WEIGHT: Final = (1 << 32) - 1


def check(site: Site, request: Packet) -> Packet:
    """Reply with the count and the digest of the keys behind the rows that are named.

    A digest is sum_r weight_r * hash(key of row r) mod 2**64, per 64 bits of the hash;
    both sides of a join must come to the same. The bits are others than those that left
    the site with the join keys.
    """
    parts: list[dict[str, Any]] = []
    arrays: dict[ArrayKey, AnyArray] = {}
    for number, order in part_orders(site, request):
        extracted = site.extracted(number)
        # several joins may be on one key
        groups = key_groups(order, len(extracted.keys))
        keys = [
            key.hashed_whole(site.join_hasher(group))
            for key, group in zip(extracted.keys, groups, strict=True)
        ]
        counts = {}
        joins = order.order("joins")
        for join in joins.names():
            codes, hashes = joins.one_of(join, keys)
            rows, weights = _asked(request, number, join, extracted.rows)
            counts[join], digest = _digest(codes[rows], hashes[:, 2:], weights)
            arrays[number, f"digest-{join}"] = digest
        parts.append({"id": number, "counts": counts})
    return Packet({"parts": parts}, arrays)


def _asked(
    request: Packet, number: int, join: str, count: int
) -> tuple[AnyArray, AnyArray]:
    """Return the rows to check of a join, each one of ``count``, and their weights."""
    of_rows, of_weights = f"rows-{join}", f"weights-{join}"
    rows = whole_numbers(request.array(number, of_rows), of_rows, low=0, high=count - 1)
    weights = whole_numbers(
        request.array(number, of_weights),
        of_weights,
        low=0,
        high=MOST_WEIGHT,
        length=len(rows),
    )
    return rows, weights


def _digest(
    codes: AnyArray, hashes: HashArray, weights: AnyArray
) -> tuple[int, HashArray]:
    """Return how many of the rows have a key, and the digest of these keys, (2,)."""
    found = codes >= 0
    weighted = hashes[codes[found]] * weights[found].astype(np.uint64)[:, None]
    # unsigned numbers wrap around: the sum is one mod 2**64
    return int(np.count_nonzero(found)), weighted.sum(axis=0, dtype=np.uint64)
