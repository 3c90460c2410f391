"""How each kind of expression is translated for a database.

See :mod:`tp_flower.databases.translation` for what a translation must keep.
"""

import re
from typing import Final

from sqlglot import exp

from tp_flower.databases import dialects
from tp_flower.databases.translation import (
    NUMBERS,
    TIMES,
    NotTranslatedError,
    Rule,
    Translator,
    is_constant,
)
from tp_flower.databases.types import named
from tp_flower.sources.sql_text import quote_name

_PLAIN_NUMBER: Final = re.compile(r"\d+(\.\d+)?|\.\d+")
_PART_NODES: Final[dict[type[exp.Expr], str]] = {
    exp.Year: "year",
    exp.Quarter: "quarter",
    exp.Month: "month",
    exp.Day: "day",
    exp.DayOfMonth: "day",
    exp.Hour: "hour",
    exp.Minute: "minute",
    exp.DayOfYear: "doy",
    exp.DayOfWeek: "dow",
    exp.DayOfWeekIso: "isodow",
}
_PART_NAMES: Final = {
    **{name: name for name in dialects.PARTS},
    "dayofyear": "doy",
    "dayofweek": "dow",
    "weekday": "dow",
    "dayofmonth": "day",
}
_COMPARISONS: Final = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE)


def _column(translator: Translator, tree: exp.Expr) -> exp.Expr:
    column = translator.columns[tree.name]
    if not column.is_exact:
        raise NotTranslatedError(
            f"column {quote_name(tree.name)} of type {column.type}"
        )
    return named(tree.name)


def _literal(translator: Translator, tree: exp.Expr) -> exp.Expr:
    text = tree.name
    if tree.is_string:
        literal = dialects.text_literal(text, translator.dialect)
        if literal is None:
            raise NotTranslatedError(tree.sql("duckdb"))
        return literal
    if not _PLAIN_NUMBER.fullmatch(text):
        raise NotTranslatedError(tree.sql("duckdb"))
    translator.need_exact([tree] if translator.dialect == "mysql" else [])
    return exp.Literal.number(text)


def _null(_translator: Translator, _tree: exp.Expr) -> exp.Expr:
    return exp.Null()


def _boolean(_translator: Translator, tree: exp.Expr) -> exp.Expr:
    return exp.Boolean(this=bool(tree.this))


def _paren(translator: Translator, tree: exp.Expr) -> exp.Expr:
    return dialects.inner(translator.translate(tree.this))


def _negative(translator: Translator, tree: exp.Expr) -> exp.Expr:
    if translator.family(tree.this) not in NUMBERS:
        raise NotTranslatedError(tree.sql("duckdb"))
    value = translator.translate(tree.this)
    return exp.Paren(this=exp.Neg(this=dialects.inner(value)))


def _arithmetic(translator: Translator, tree: exp.Expr) -> exp.Expr:
    # SQLite's integers become inexact, and its inf - inf NULL, without a word
    operands = [tree.this, tree.expression]
    families = {translator.family(operand) for operand in operands}
    if translator.dialect == "sqlite" or not families <= NUMBERS | {"null"}:
        raise NotTranslatedError(tree.sql("duckdb"))
    left, right = translator.as_results(operands, tree)
    return type(tree)(this=dialects.inner(left), expression=dialects.inner(right))


def _quotient(translator: Translator, tree: exp.Expr) -> exp.Expr:
    divisor = tree.expression.unnest()
    bare = divisor.this if isinstance(divisor, exp.Neg) else divisor
    is_nonzero = (
        isinstance(bare, exp.Literal) and not bare.is_string and float(bare.name) != 0.0
    )
    if (
        not is_nonzero
        or translator.family(tree) != "double"
        or translator.dialect == "sqlite"
    ):
        raise NotTranslatedError(tree.sql("duckdb"))
    return dialects.divide(
        translator.double(tree.this), translator.double(tree.expression)
    )


def _comparison(translator: Translator, tree: exp.Expr) -> exp.Expr:
    operands = [tree.this, tree.expression]
    families = {translator.family(operand) for operand in operands}
    is_order = not isinstance(tree, exp.EQ | exp.NEQ)
    # texts are ordered by other rules elsewhere
    if is_order and families & {"text", "boolean"} and not families & TIMES:
        raise NotTranslatedError(tree.sql("duckdb"))
    left, right = translator.together(operands)
    return type(tree)(this=dialects.inner(left), expression=dialects.inner(right))


def _between(translator: Translator, tree: exp.Expr) -> exp.Expr:
    operands = [tree.this, tree.args["low"], tree.args["high"]]
    families = {translator.family(operand) for operand in operands}
    if families & {"text", "boolean"} and not families & TIMES:
        raise NotTranslatedError(tree.sql("duckdb"))
    value, low, high = map(dialects.inner, translator.together(operands))
    return exp.Between(this=value, low=low, high=high)


def _in(translator: Translator, tree: exp.Expr) -> exp.Expr:
    value, *listed = translator.together([tree.this, *tree.expressions])
    return exp.In(this=dialects.inner(value), expressions=listed)


def _connector(translator: Translator, tree: exp.Expr) -> exp.Expr:
    return type(tree)(
        this=translator.condition(tree.this),
        expression=translator.condition(tree.expression),
    )


def _not(translator: Translator, tree: exp.Expr) -> exp.Expr:
    return exp.Not(this=dialects.inner(translator.condition(tree.this)))


def _is_null(translator: Translator, tree: exp.Expr) -> exp.Expr:
    if not isinstance(tree.expression, exp.Null):
        raise NotTranslatedError(tree.sql("duckdb"))
    value = dialects.inner(translator.translate(tree.this))
    return exp.Is(this=value, expression=exp.Null())


def _case(translator: Translator, tree: exp.Expr) -> exp.Expr:
    branches = [tree] if isinstance(tree, exp.If) else tree.args["ifs"]
    default = tree.args.get("false" if isinstance(tree, exp.If) else "default")
    subject = None if isinstance(tree, exp.If) else tree.this
    conditions = [
        branch.this
        if subject is None
        else exp.EQ(this=subject.copy(), expression=branch.this.copy())
        for branch in branches
    ]
    results = [branch.args["true"] for branch in branches]
    values = translator.as_results([*results, default or exp.Null()], tree)
    return exp.Case(
        ifs=[
            exp.If(this=translator.condition(condition), true=value)
            for condition, value in zip(conditions, values, strict=False)
        ],
        default=values[-1],
    )


def _coalesce(translator: Translator, tree: exp.Expr) -> exp.Expr:
    first, *others = translator.as_results([tree.this, *tree.expressions], tree)
    return exp.Coalesce(this=first, expressions=others)


def _nullif(translator: Translator, tree: exp.Expr) -> exp.Expr:
    (value,) = translator.as_results([tree.this], tree)
    same = _comparison(translator, exp.EQ(**_copies(tree)))
    return exp.Case(ifs=[exp.If(this=same, true=exp.Null())], default=value)


def _copies(tree: exp.Expr) -> dict[str, exp.Expr]:
    return {"this": tree.this.copy(), "expression": tree.expression.copy()}


def _absolute(translator: Translator, tree: exp.Expr) -> exp.Expr:
    if translator.family(tree.this) not in NUMBERS:
        raise NotTranslatedError(tree.sql("duckdb"))
    return exp.Abs(this=translator.translate(tree.this))


def _cast(translator: Translator, tree: exp.Expr) -> exp.Expr:
    family = translator.family(tree)
    if is_constant(tree) and family in TIMES and translator.dialect != "sqlite":
        return translator.time_constant(tree, family)
    if translator.type(tree) != "DOUBLE":
        raise NotTranslatedError(tree.sql("duckdb"))
    return translator.double(tree.this)


def _date_part(translator: Translator, tree: exp.Expr) -> exp.Expr:
    part, value = _part_and_value(tree)
    family = translator.family(value)
    has_time = family in ("timestamp", "instant")
    if part not in dialects.PARTS or not (
        has_time or (family == "date" and part not in ("hour", "minute"))
    ):
        raise NotTranslatedError(tree.sql("duckdb"))
    if translator.dialect == "sqlite":
        raise NotTranslatedError(tree.sql("duckdb"))
    return dialects.date_part(part, translator.translate(value), translator.dialect)


def _part_and_value(tree: exp.Expr) -> tuple[str, exp.Expr]:
    if type(tree) in _PART_NODES:
        return _PART_NODES[type(tree)], tree.this
    if isinstance(tree, exp.Extract):
        return _PART_NAMES.get(tree.name.lower(), ""), tree.expression
    # the functions date_part, of a name and a value, and weekday, of a value
    *names, value = tree.expressions
    name = names[0].name if names else tree.name
    known = tree.name.lower() in ("date_part", "datepart", "weekday")
    return (_PART_NAMES.get(name.lower(), "") if known else ""), value


RULES: Final[dict[type[exp.Expr], Rule]] = {
    exp.Column: _column,
    exp.Literal: _literal,
    exp.Null: _null,
    exp.Boolean: _boolean,
    exp.Paren: _paren,
    exp.Neg: _negative,
    exp.Add: _arithmetic,
    exp.Sub: _arithmetic,
    exp.Mul: _arithmetic,
    exp.Div: _quotient,
    **dict.fromkeys(_COMPARISONS, _comparison),
    exp.Between: _between,
    exp.In: _in,
    exp.And: _connector,
    exp.Or: _connector,
    exp.Not: _not,
    exp.Is: _is_null,
    exp.Case: _case,
    exp.If: _case,
    exp.Coalesce: _coalesce,
    exp.Nullif: _nullif,
    exp.Abs: _absolute,
    exp.Cast: _cast,
    exp.TryCast: _cast,
    **dict.fromkeys(_PART_NODES, _date_part),
    exp.Extract: _date_part,
    exp.Anonymous: _date_part,
}
