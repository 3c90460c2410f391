"""The columns of a table that each piece of a fragment reads, and their role.

A site's policy is about the columns of its table; the pieces outside a sub-query name
the sub-query's columns, and are followed to what these are made of.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sqlglot import exp

from tp_flower.query.fragment import Fragment, Piece, Role


@dataclass(frozen=True)
class Read:
    """One column that a piece reads.

    Attributes:
        role: its purpose. A column of a sub-query is read as ``INNER``, and again by
            each piece outside that uses it.
        what: the piece, for messages.
        column: of the base table, as the piece spells it.
        is_plain: whether the piece is the column itself, but for its type and, of a
            text, its case and the spaces around it: no condition on its values.
        is_bare: whether it is plain and keeps the type: it fails on no value.
    """

    role: Role
    what: str
    column: str
    is_plain: bool
    is_bare: bool


def reads(fragment: Fragment) -> Iterator[Read]:
    """Yield every read of a column by a fragment, which may not be checked yet.

    A name outside a sub-query that is none of its columns yields nothing:
    :meth:`Fragment.check` refuses it.
    """
    subquery = fragment.subquery
    if subquery is None:
        for piece in fragment.pieces():
            yield from _reads_of(piece)
        return
    inner: dict[str, list[Read]] = {}
    for piece in subquery.pieces():
        yield from _reads_of(piece)
    columns = [piece for piece in subquery.pieces() if piece.role is Role.INNER]
    for name, piece in zip(subquery.names, columns, strict=True):
        inner[name.lower()] = list(_reads_of(piece))
    for piece in fragment.pieces():
        for read in _reads_of(piece):
            for origin in inner.get(read.column.lower(), ()):
                is_plain = read.is_plain and origin.is_plain
                is_bare = read.is_bare and origin.is_bare
                yield Read(read.role, read.what, origin.column, is_plain, is_bare)


def _reads_of(piece: Piece) -> Iterator[Read]:
    tree = piece.parse()
    is_plain = _is_plain(tree)
    is_bare = is_plain and tree.find(exp.Cast) is None
    for name in dict.fromkeys(column.name for column in tree.find_all(exp.Column)):
        yield Read(piece.role, piece.what, name, is_plain, is_bare)


def _is_plain(tree: exp.Expr) -> bool:
    """Return whether an expression is a column, but for its type, case and spaces."""
    while not isinstance(tree, exp.Column):
        if type(tree) is exp.Cast:
            # a truth value would be a condition on the column
            is_kept = not tree.to.is_type(exp.DType.BOOLEAN)
        else:
            is_kept = type(tree) in (exp.Paren, exp.Lower, exp.Upper, exp.Trim)
            is_kept = is_kept and {k for k, v in tree.args.items() if v} == {"this"}
        if not is_kept:
            return False
        tree = tree.this
    return True
