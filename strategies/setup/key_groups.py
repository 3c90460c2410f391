"""Which join keys of a query are compared with each other.

Every site is told a name for each of its join keys, and hashes keys of one name alike.
Keys that no join compares have different names, so that nobody can tell whether a
person's number in one column is an article's number in another.
"""

from tp_flower.query import BoundQuery


def key_groups(bound: BoundQuery) -> dict[str, list[str]]:
    """Return, by table, the group of each of its join keys.

    Keys are of one group if joins connect them: the groups are the components of the
    graph whose edges are the joins.
    """
    keys = [
        (table, number)
        for table in bound.tables
        for number in range(len(bound.fragments_of(table)[0].keys))
    ]
    group = {key: number for number, key in enumerate(keys)}
    for join in bound.joins:
        ends = {group[join.left, join.left_key], group[join.right, join.right_key]}
        group = {key: min(ends) if own in ends else own for key, own in group.items()}
    found: dict[str, list[str]] = {table: [] for table in bound.tables}
    for (table, _), own in group.items():
        found[table].append(f"group-{own}")
    return found
