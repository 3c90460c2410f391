"""The text of a fragment for the owner of its table: a line for each piece.

Fragments that ask the same have one text, without the alias and sorted. Others differ:
no line has a character that could begin another one or hide a part of it.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256

from tp_flower.duckdb_engine import quote_name
from tp_flower.errors import QueryError
from tp_flower.query.expressions import render
from tp_flower.query.fragment import Feature, Fragment, Piece, SubQuery


def fragment_text(fragment: Fragment) -> str:
    r"""Return a fragment's text; pieces that do not parse are left as they came.

    >>> day = Feature("day", "upper(day)")
    >>> print(fragment_text(Fragment("a", "visits", (day,), (("id",),), "y", ("x",))))
    table "visits"
    feature "day": UPPER("day")
    label: "y"
    filter: "x"
    join key: "id"
    """
    with suppress(QueryError):
        fragment = _render(fragment)
    inner = fragment.subquery or SubQuery(())
    lines = [
        f"table {printable(quote_name(fragment.name))}",
        *_feature_lines("sub-query column", inner.columns),
        *_piece_lines("sub-query filter", inner.filters),
        *_group_lines(inner),
        *_piece_lines("sub-query HAVING", inner.having),
        *_piece_lines(
            "sub-query cutoffs", [str(inner.cutoffs)] if inner.cutoffs else []
        ),
        *(f"sub-query last by: {printable(sql)}" for sql in inner.last),
        *_piece_lines("sub-query QUALIFY", inner.qualify),
        *_feature_lines("feature", fragment.features),
        *_piece_lines("label", [fragment.label]),
        *(f"{role}: {printable(sql)}" for role, sql in fragment.numbers.items()),
        *_piece_lines("filter", fragment.filters),
    ]
    for key in sorted(fragment.keys):
        lines += _piece_lines("join key", key[:1])
        lines += [f"  and: {printable(sql)}" for sql in key[1:]]
    return "\n".join(lines)


def text_digest(text: str) -> str:
    """Return the SHA-256 of a fragment's text, with its name."""
    return f"sha256:{sha256(text.encode()).hexdigest()}"


def _render(fragment: Fragment) -> Fragment:
    # as it would run: without comments, every name quoted
    def render_piece(piece: Piece) -> str:
        return render(piece.parse(), quote=True, copy=False)

    subquery = fragment.subquery and fragment.subquery.map(render_piece)
    return replace(fragment.map(render_piece), subquery=subquery)


def _group_lines(inner: SubQuery) -> list[str]:
    # of pairs with a cutoff, the number of a key is the name by which it is joined
    if inner.cutoffs is None:
        return _piece_lines("sub-query group", inner.groups)
    keys = map(Feature, inner.pair_names, inner.groups)
    return _feature_lines("sub-query key", [*keys])


def _feature_lines(role: str, features: Sequence[Feature]) -> list[str]:
    return [
        f"{role} {printable(quote_name(feature.name))}: {printable(feature.sql)}"
        for feature in sorted(features, key=lambda feature: (feature.name, feature.sql))
    ]


def _piece_lines(role: str, pieces: Sequence[str | None]) -> list[str]:
    texts = sorted(sql for sql in pieces if sql is not None)
    return [f"{role}: {printable(sql)}" for sql in texts]


def printable(text: str) -> str:
    """Return a text with backslashes, line ends and invisible characters escaped."""
    escaped = []
    for character in text:
        if character.isprintable() and character != "\\":
            escaped.append(character)
        else:
            escaped.append(character.encode("unicode_escape").decode())
    return "".join(escaped)
