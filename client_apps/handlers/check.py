"""A site's part in the cross-check of the alignment: digests of the keys it holds."""

import numpy as np

from client_apps.privacy.keys import key_groups
from client_apps.rounds.site import Site
from tp_flower.errors import SiteError
from tp_flower.keyed_hash import HashArray
from tp_flower.protocol import (
    AnyArray,
    CheckedPart,
    CheckPart,
    CheckReply,
    CheckRequest,
)


def check(site: Site, request: CheckRequest) -> CheckReply:
    """Reply with the count and the digest of the keys behind the rows that are named.

    A digest is sum_r weight_r * hash(key of row r) mod 2**64, per 64 bits of the hash;
    both sides of a join must come to the same. The bits are others than those that left
    the site with the join keys.
    """
    return CheckReply(
        {
            number: _checked(site, number, body)
            for number, body in site.each(request.parts)
        }
    )


def _checked(site: Site, number: int, body: CheckPart) -> CheckedPart:
    extracted = site.extracted(number)
    # several joins may be on one key
    groups = key_groups(body.key_groups, len(extracted.keys))
    keys = [
        key.hashed_whole(site.join_hasher(group))
        for key, group in zip(extracted.keys, groups, strict=True)
    ]
    counts, digests = {}, {}
    for join, key in body.joins.items():
        rows, weights = body.rows.get(join), body.weights.get(join)
        if rows is None or weights is None or key >= len(keys):
            raise SiteError(
                f"malformed request: join {join} must have rows, weights and one of "
                f"{len(keys)} keys"
            )
        if rows.size and rows.max() >= extracted.rows:
            raise SiteError(
                f"malformed request: array 'rows/{join}' must hold numbers from 0 to "
                f"{extracted.rows - 1}"
            )
        codes, hashes = keys[key]
        counts[join], digests[join] = _digest(codes[rows], hashes[:, 2:], weights)
    return CheckedPart(counts=counts, digest=digests)


def _digest(
    codes: AnyArray, hashes: HashArray, weights: AnyArray
) -> tuple[int, HashArray]:
    """Return how many of the rows have a key, and the digest of these keys, (2,)."""
    found = codes >= 0
    weighted = hashes[codes[found]] * weights[found].astype(np.uint64)[:, None]
    # unsigned numbers wrap around: the sum is one mod 2**64
    return int(np.count_nonzero(found)), weighted.sum(axis=0, dtype=np.uint64)
