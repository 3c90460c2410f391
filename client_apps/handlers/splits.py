"""What a site says of the rows that the columns of its table hold out."""

from collections.abc import Sequence

import numpy as np

from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray
from tp_flower.extraction.extracted import ExtractedKey
from tp_flower.protocol.setup_messages import SplitTerms
from tp_flower.splits import BY_HASH, BY_ORDER, TRAIN, Shares, split_by_hash


def told_split(
    site: Site, terms: SplitTerms | None, keys: Sequence[ExtractedKey]
) -> dict[str, AnyArray]:
    """Return what the last key says of each row: its subset, or its place in time."""
    if terms is None:
        return {}
    key = keys[-1]
    if terms.by == BY_HASH:
        hasher = site.hasher().purpose(f"split {terms.seed}")
        subset = split_by_hash(
            hasher.hash_texts(key.texts), Shares(terms.test, terms.validation)
        )
        # the last value is that of a missing one
        return {"subset": np.append(subset, np.uint8(TRAIN))[key.codes]}
    times = key.numbers()
    if terms.by == BY_ORDER:
        times = np.unique(times, return_inverse=True)[1].astype(np.float64)
    return {"times": np.append(times, np.nan)[key.codes]}
