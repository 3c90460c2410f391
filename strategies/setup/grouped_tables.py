"""A sub-query with GROUP BY over a table in several shards: no group may cross shards.

Each site runs the sub-query on its own rows. That is the sub-query over the whole table
only if all rows of a group are at one site; the sites send keyed hashes of their group
keys, before HAVING and all later filters, and the server looks for one that two sent.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from strategies.run.exchange import Part, Replies
from strategies.run.reply_checks import array_of
from tp_flower.errors import QueryError
from tp_flower.query import Fragment


def split_groups(placed: Mapping[Part, Fragment]) -> list[list[Part]]:
    """Return the parts that run the same sub-query with GROUP BY, if they are several.

    Args:
        placed: the parts of the run with their fragments.
    """
    together: dict[tuple[Fragment, int], list[Part]] = {}
    seen: Counter[tuple[Fragment, int, int]] = Counter()
    for part, fragment in placed.items():
        if fragment.subquery is not None:
            # UNION ALL may name one table twice: each branch groups on its own
            branch = seen[fragment, part.node, part.shard]
            seen[fragment, part.node, part.shard] += 1
            together.setdefault((fragment, branch), []).append(part)
    return [parts for parts in together.values() if len(parts) > 1]


def check_groups(split: Sequence[Sequence[Part]], replies: Replies) -> None:
    """Refuse a sub-query with a group whose rows are in two shards.

    Args:
        split: what :func:`split_groups` found.
        replies: with the hashes of each part's group keys, uint64 (groups, 2).

    Raises:
        QueryError: the sub-query would aggregate parts of groups.
        ReplyError: a part sent no such hashes.
    """
    for parts in split:
        hashes = [
            np.unique(array_of(replies, part, "group_hashes", (None, 2)), axis=0)
            for part in parts
        ]
        distinct, counts = np.unique(np.concatenate(hashes), axis=0, return_counts=True)
        crossing = int(np.count_nonzero(counts > 1))
        if crossing:
            sites = ", ".join(dict.fromkeys(repr(part.site) for part in parts))
            raise QueryError(
                f"the sub-query {parts[0].table!r} aggregates groups that cross shards:"
                f" {crossing} of {len(distinct)} groups have rows at several of the "
                f"sites {sites}. Group by a column that tells the sites apart as well, "
                "or filter the sub-query so that every group is at one site"
            )
