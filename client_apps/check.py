"""A site's part in the cross-check of the alignment: digests of the keys it holds."""

import numpy as np

from client_apps.site import Site
from tp_flower.errors import SiteError
from tp_flower.privacy.keyed_hash import HashArray
from tp_flower.protocol import AnyArray, ArrayKey, Packet


def check(site: Site, request: Packet) -> Packet:
    """Reply with the count and the digest of the keys behind the rows that are named.

    A digest is sum_r weight_r * hash(key of row r) mod 2**64, per 64 bits of the hash;
    both sides of a join must come to the same. The bits are others than those that left
    the site with the join keys.
    """
    parts, hasher = [], site.join_hasher()
    arrays: dict[ArrayKey, AnyArray] = {}
    for number, order in site.orders(request):
        extracted = site.extracted(number)
        # several joins may be on one key
        keys = [key.hashed_whole(hasher) for key in extracted.keys]
        counts = {}
        for join, key in order["joins"].items():
            rows = request.array(number, f"rows-{join}")
            weights = request.array(number, f"weights-{join}")
            if len(rows) != len(weights) or not _are_rows(rows, extracted.rows):
                raise SiteError(f"the rows to check of join {join} are not the shard's")
            codes, hashes = keys[int(key)]
            counts[join], digest = _digest(codes[rows], hashes[:, 2:], weights)
            arrays[number, f"digest-{join}"] = digest
        parts.append({"id": number, "counts": counts})
    return Packet({"parts": parts}, arrays)


def _digest(
    codes: AnyArray, hashes: HashArray, weights: AnyArray
) -> tuple[int, HashArray]:
    """Return how many of the rows have a key, and the digest of these keys, (2,)."""
    found = codes >= 0
    weighted = hashes[codes[found]] * weights[found].astype(np.uint64)[:, None]
    # unsigned numbers wrap around: the sum is one mod 2**64
    return int(np.count_nonzero(found)), weighted.sum(axis=0, dtype=np.uint64)


def _are_rows(rows: AnyArray, count: int) -> bool:
    return bool(rows.min(initial=0) >= 0 and rows.max(initial=-1) < count)
