"""What a fragment reads of its table: each column, and in which role.

A site's policy is about the columns of its table. The pieces of a fragment that are
outside of its sub-query name the sub-query's columns; they are traced back here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from sqlglot import exp

from tp_flower.query import windows
from tp_flower.query.cutoffs import CUTOFF, column_of_point, is_reserved
from tp_flower.query.fragment import Fragment, Piece, Role, SubQuery


@dataclass(frozen=True)
class Read:
    """One column of the base table that a piece reads.

    A column of a sub-query is read as ``INNER``, and by each outer piece that uses it;
    what a window partitions by is read as ``GROUP``, as what a sub-query groups by is.

    Attributes:
        is_plain: whether the piece is the column itself, except for its type and, for a
            text, its case and surrounding spaces: it is no condition on its values.
        is_bare: whether it is plain and keeps the type: it fails on no value.
    """

    role: Role
    element: str
    column: str
    is_plain: bool
    is_bare: bool


def reads(fragment: Fragment) -> Iterator[Read]:
    """Yield every column read by a fragment, which may not be checked yet.

    A name outside a sub-query that is not one of its columns yields nothing:
    :meth:`Fragment.check` refuses it.
    """
    subquery = fragment.subquery
    inner: dict[str, tuple[Read, ...]] = {}
    columns = iter(subquery.columns if subquery else ())
    keys = iter(subquery.pair_names if subquery else ())
    for piece in subquery.pieces() if subquery else ():
        piece_reads = _reads_of_table(piece, subquery)
        yield from piece_reads
        if piece.role is Role.INNER:
            inner[next(columns).name.lower()] = tuple(
                read for read in piece_reads if read.role is Role.INNER
            )
        elif piece.role is Role.GROUP:
            inner[next(keys, "").lower()] = piece_reads
    for piece in fragment.pieces():
        for read in _reads_of(piece):
            if subquery is None:
                yield read
            for origin in inner.get(read.column.lower(), ()):
                is_plain = read.is_plain and origin.is_plain
                is_bare = read.is_bare and origin.is_bare
                yield Read(read.role, read.element, origin.column, is_plain, is_bare)


def _reads_of_table(piece: Piece, subquery: SubQuery | None) -> tuple[Read, ...]:
    """Return what a sub-query's piece reads of its table; cutoffs are another's."""
    has_cutoffs = subquery is not None and subquery.cutoffs is not None
    return tuple(
        read
        for read in _reads_of(piece)
        if not (has_cutoffs and is_reserved(read.column))
    )


def reads_of_pairs(fragment: Fragment) -> Iterator[Read]:
    """Yield what a LATERAL sub-query tells of its keys and cutoff, as values.

    Their values are those of the table around it: a feature, label, number or filter
    that is made of them is made of that table's columns. Join keys, and the conditions
    on the sub-query's own rows, compare them.
    """
    subquery = fragment.subquery
    if subquery is None or subquery.cutoffs is None:
        return
    inner = {}
    for column in subquery.columns:
        piece = Piece(Role.INNER, f"column {column.name!r}", column.sql)
        inner[column.name.lower()] = tuple(_reads_of(piece))
    for piece in replace(fragment, keys=()).pieces():
        for read in _reads_of(piece):
            for origin in inner.get(read.column.lower(), (read,)):
                if is_reserved(name := origin.column.lower()):
                    yield Read(read.role, read.element, name, False, False)


def reads_by_conditions(fragment: Fragment) -> Iterator[Read]:
    """Yield what a LATERAL sub-query's answers tell of cutoffs by its conditions.

    These may be of the cutoff alone: where a pair may have no answer, they filter the
    rows of the table around, and any label or number of the answers is made of it.
    """
    subquery = fragment.subquery
    if subquery is None or subquery.cutoffs is None:
        return
    lateral = f"LATERAL sub-query {fragment.table!r}"
    if subquery.having or subquery.last or fragment.filters:
        element = f"whether {lateral} has an answer"
        yield Read(Role.FILTER, element, CUTOFF, is_plain=False, is_bare=False)
    roles = [Role.LABEL] if fragment.label is not None else []
    for role in (*roles, *fragment.numbers):
        element = f"the {role}, of {lateral},"
        yield Read(role, element, CUTOFF, is_plain=False, is_bare=False)


@lru_cache(maxsize=4096)
def _reads_of(piece: Piece) -> tuple[Read, ...]:
    """Return what a piece reads; shards of a table, and checks, repeat the same."""
    tree = piece.parse()
    if piece.role is Role.KEY and (column := column_of_point(tree)):
        # the column itself on a coarser scale, and that it lies on the grid
        return (
            Read(Role.KEY, piece.element, column, is_plain=True, is_bare=True),
            Read(Role.FILTER, piece.element, column, is_plain=False, is_bare=False),
        )
    partitions = windows.take_partitions(tree)
    roles = [(piece.role, tree), *((Role.GROUP, part) for part in partitions)]
    return tuple(
        dict.fromkeys(
            Read(role, piece.element, name, *_forms_of(part))
            for role, part in roles
            for name in dict.fromkeys(c.name for c in part.find_all(exp.Column))
        )
    )


def _forms_of(tree: exp.Expr) -> tuple[bool, bool]:
    """Return whether an expression is a plain column, and a bare one."""
    is_plain = _is_plain(tree)
    return is_plain, is_plain and tree.find(exp.Cast) is None


def _is_plain(tree: exp.Expr) -> bool:
    """Return whether an expression is a column, except for type, case and spaces."""
    while not isinstance(tree, exp.Column):
        if type(tree) is exp.Cast:
            # a truth value would be a condition on the column
            keeps_column = not tree.to.is_type(exp.DType.BOOLEAN)
        else:
            keeps_column = type(tree) in (exp.Paren, exp.Lower, exp.Upper, exp.Trim)
            keeps_column = keeps_column and {k for k, v in tree.args.items() if v} == {
                "this"
            }
        if not keeps_column:
            return False
        tree = tree.this
    return True
