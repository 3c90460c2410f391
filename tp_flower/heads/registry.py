"""The heads: the only list of them.

A subclass of :class:`Head` in a file of its own makes a head, with a line here.
"""

from typing import Final

from tp_flower.heads.head import Head
from tp_flower.heads.sum import Sum

HEADS: Final[dict[str, type[Head]]] = {Sum.name: Sum}
"""By name, as manifests name them."""


def head_of(name: str) -> type[Head]:
    """Return the head of a name.

    >>> head_of("sum").is_linear
    True

    Raises:
        ValueError: there is none of that name.
    """
    if name not in HEADS:
        names = ", ".join(map(repr, HEADS))
        raise ValueError(f"head {name!r} is unknown here; known: {names}")
    return HEADS[name]
