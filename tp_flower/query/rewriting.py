"""SQL that people write, in the form that the parser reads; one rule per function.

A rule changes sqlglot's tree of a query in place and keeps its result. Of a query that
it cannot keep exactly, it or the parser refuses the part.
"""

from collections.abc import Mapping, Sequence

from sqlglot import exp

from tp_flower.errors import QueryError
from tp_flower.query import expressions
from tp_flower.query.lateral import operand, write_as_lateral

_OWNER = "(`sql = ...` in the tables file)"
Pair = tuple[exp.Expr, exp.Expr]  # equal expressions of the query and of its sub-query


def rewrite(select: exp.Select) -> None:
    """Bring a query into the parser's form, in place."""
    for rule in (
        compare_columns,
        flatten_joins,
        inline_ctes,
        inline_windows,
        write_as_lateral,
        join_filters,
        merge_sub_queries,
        turn_right_join,
    ):
        rule(select)


def compare_columns(select: exp.Select) -> None:
    """Write ``(a.x, a.y) = (b.x, b.y)`` as ``a.x = b.x AND a.y = b.y``."""
    for equality in list(select.find_all(exp.EQ)):
        sides = (equality.left, equality.right)
        if not all(isinstance(side, exp.Tuple) for side in sides):
            continue
        left, right = (side.expressions for side in sides)
        if len(left) != len(right):
            raise QueryError(
                f"condition {expressions.shorten(equality.sql(expressions.DIALECT))} "
                f"compares {len(left)} values with {len(right)}"
            )
        pairs = zip(left, right, strict=True)
        equal = [exp.EQ(this=operand(a), expression=operand(b)) for a, b in pairs]
        equality.replace(exp.paren(exp.and_(*equal, copy=False), copy=False))


def flatten_joins(select: exp.Select) -> None:
    """Write joins in parentheses one after the other.

    ::

        (a JOIN b ON p) JOIN c ON q             a JOIN b ON p JOIN c ON q
        a JOIN (b JOIN c ON q) ON p             a, b JOIN c ON q WHERE p
        a LEFT JOIN (b LEFT JOIN c ON q) ON p   a LEFT JOIN b ON p LEFT JOIN c ON q
    """
    for inner in list(select.find_all(exp.Select)):
        if source := inner.args.get("from_"):
            table, joins = _flatten(source.this, inner.args.get("joins", ()), inner)
            source.set("this", table)
            inner.set("joins", joins)


def _flatten(
    source: exp.Expr, joins: Sequence[exp.Join], select: exp.Select
) -> tuple[exp.Expr, list[exp.Join]]:
    """Return the first table of a chain of joins, and the joins of all others."""
    while isinstance(source, exp.Subquery) and isinstance(
        source.this, exp.Table | exp.Subquery
    ):
        if source.alias:
            break
        joins = [*source.args.get("joins", ()), *joins]
        source = source.this
    joins = [*(source.args.pop("joins", None) or ()), *joins]
    chain: list[exp.Join] = []
    for join in joins:
        table, nested = _flatten(join.this, (), select)
        join.set("this", table)
        if nested:
            _release(nested, join, select)
        chain += [join, *nested]
    return source, chain


def _release(nested: Sequence[exp.Join], join: exp.Join, select: exp.Select) -> None:
    """Let joins in parentheses follow the join of their first table, or refuse them."""
    conditions = [part.args.get("on") for part in (join, *nested)]
    is_inner = not join.side and join.kind in ("", "INNER")
    is_left = join.side == "LEFT" and all(part.side == "LEFT" for part in nested)
    # a bare name could mean a column of a table before the parenthesis
    is_named = all(
        on and all(c.table for c in on.find_all(exp.Column)) for on in conditions
    )
    if not is_named or not (is_inner or is_left):
        raise QueryError(
            f"joins in parentheses after {join.side or join.kind or 'a'} JOIN: write "
            "one join after the other, each with ON a.k = b.k"
        )
    if is_inner:
        # WHERE, because ON does not see the tables that come later
        select.where(conditions[0], copy=False)
        join.args = {"this": join.this}


def turn_right_join(select: exp.Select) -> None:
    """Write ``a RIGHT JOIN b`` as ``b LEFT JOIN a``, where it is the first join."""
    source = select.args.get("from_")
    joins = select.args.get("joins")
    if source and joins and joins[0].side == "RIGHT":
        left = source.this
        right = joins[0].this
        source.set("this", right)
        joins[0].set("this", left)
        joins[0].set("side", "LEFT")


def inline_ctes(select: exp.Select) -> None:
    """Write each common table expression where it is named, as a sub-query."""
    with_ = select.args.pop("with_", None) or exp.With()
    if with_.args.get("recursive"):
        raise QueryError(
            f"WITH RECURSIVE is not supported: let a table's owner compute it {_OWNER}"
        )
    bodies: dict[str, exp.Expr] = {}
    for cte in with_.expressions:
        if cte.args["alias"].args.get("columns"):
            raise QueryError(
                f"WITH {cte.alias} (...): name its columns with AS in its SELECT"
            )
        # an expression sees those before it, and not itself
        _place(cte, bodies)
        bodies[cte.alias.lower()] = cte.this
    _place(select, bodies)


def _place(tree: exp.Expr, bodies: Mapping[str, exp.Expr]) -> None:
    """Replace each table that WITH names by its sub-query."""
    for table in list(tree.find_all(exp.Table)):
        body = bodies.get(table.name.lower())
        if body is not None and expressions.clauses_of(table) <= {"this", "alias"}:
            alias = table.args.get("alias") or exp.TableAlias(this=table.this)
            table.replace(exp.Subquery(this=body.copy(), alias=alias.copy()))


def inline_windows(select: exp.Select) -> None:
    """Write the windows that a WINDOW clause names where OVER names them."""
    for inner in select.find_all(exp.Select):
        named: dict[str, exp.Window] = {}
        for window in inner.args.pop("windows", None) or ():
            _fill_window(window, named)
            named[window.name.lower()] = window
        for window in inner.find_all(exp.Window):
            if window.parent_select is inner:
                _fill_window(window, named)


def _fill_window(window: exp.Window, named: Mapping[str, exp.Window]) -> None:
    """Replace the name in OVER by the clauses behind it, beside those of its own."""
    alias = window.args.get("alias")
    if alias is None:
        return
    if alias.name.lower() not in named:
        raise QueryError(f"OVER {alias.name}: no WINDOW of that name")
    base = named[alias.name.lower()]
    for clause in ("partition_by", "order", "spec"):
        if not base.args.get(clause):
            continue
        if window.args.get(clause):
            raise QueryError(
                f"OVER ({alias.name} ...) says again what WINDOW {alias.name} says: "
                "write one of them"
            )
        window.set(clause, base.copy().args[clause])
    window.set("alias", None)


def join_filters(select: exp.Select) -> None:
    """Write IN and EXISTS over another table as a join with its distinct keys.

    ::

        x IN (SELECT k FROM t WHERE p)
            -> JOIN (SELECT DISTINCT k FROM t WHERE p) ON x = k
        EXISTS (SELECT 1 FROM t WHERE t.k = a.x)
            -> JOIN (SELECT DISTINCT k FROM t) ON a.x = k

    A row meets one key at most, and NULL meets none: IN is true for the same rows.
    """
    where = select.args.pop("where", None)
    for part in list(expressions.conjuncts(where.this)) if where else ():
        if isinstance(part, exp.Not) and _sub_query(part.this.unnest()):
            raise QueryError(
                f"condition {expressions.shorten(part.sql(expressions.DIALECT))} is "
                "not supported: rows without a match are not at any site; let a "
                f"table's owner mark them or leave them out {_OWNER}"
            )
        if _sub_query(part):
            number = len(select.args.get("joins", ())) + 1
            select.append("joins", _semi_join(part, f"in_{number}"))
        else:
            select.where(part, copy=False)


def _sub_query(tree: exp.Expr) -> exp.Expr | None:
    query = tree.this if isinstance(tree, exp.Exists) else tree.args.get("query")
    if not isinstance(query, exp.Query):
        return None
    return query.unnest()


def _semi_join(part: exp.Expr, alias: str) -> exp.Join:
    """Return the join that keeps the rows which a condition IN or EXISTS accepts."""
    element = f"condition {expressions.shorten(part.sql(expressions.DIALECT))}"
    query = _sub_query(part)
    if not isinstance(query, exp.Select) or not query.args.get("from_"):
        raise QueryError(f"{element}: its sub-query is one SELECT over one table")
    items = [item.unalias() for item in query.expressions if not item.is_star]
    for item in items:
        expressions.check_expression(item, element, aggregates=False)
    is_in = isinstance(part, exp.In)
    pairs = [
        *_take_correlations(query, element),
        *(_compared_pairs(part, items, element) if is_in else ()),
    ]
    if not pairs:
        raise QueryError(
            f"{element} compares no column with the query: write t.k = a.k in its WHERE"
        )
    if group := query.args.get("group"):
        if not is_in or not set(group.expressions) <= set(items):
            raise QueryError(
                f"{element}: write IN (SELECT k FROM ... GROUP BY k), with the same k"
            )
    elif not query.args.get("distinct"):
        query.set("distinct", exp.Distinct())
    names = [f"{alias}_key_{number}" for number in range(1, len(pairs) + 1)]
    query.set(
        "expressions",
        [exp.alias_(k, n) for (_, k), n in zip(pairs, names, strict=True)],
    )
    keys = [exp.column(name, alias) for name in names]
    equal = [
        exp.EQ(this=operand(v), expression=k)
        for (v, _), k in zip(pairs, keys, strict=True)
    ]
    join = exp.Join(
        this=query.subquery(alias, copy=False), on=exp.and_(*equal, copy=False)
    )
    join.meta["is_filter"] = True
    return join


def _compared_pairs(
    part: exp.Expr, items: Sequence[exp.Expr], element: str
) -> list[Pair]:
    """Return the pairs of values and columns that IN compares."""
    values = part.this.expressions if isinstance(part.this, exp.Tuple) else [part.this]
    if len(values) != len(items):
        raise QueryError(
            f"{element} compares {len(values)} values with {len(items)} columns"
        )
    return list(zip(values, items, strict=True))


def _take_correlations(query: exp.Select, element: str) -> list[Pair]:
    """Take the equalities with the query around a sub-query out of its WHERE."""
    pairs: list[Pair] = []
    name = query.args["from_"].this.alias_or_name.lower()
    where = query.args.pop("where", None)
    for condition in list(expressions.conjuncts(where.this)) if where else ():
        if isinstance(condition, exp.EQ):
            sides = [condition.left, condition.right]
        else:
            sides = [condition]
        tables = [
            {c.table.lower() or name for c in side.find_all(exp.Column)}
            for side in sides
        ]
        inner = [
            side for side, names in zip(sides, tables, strict=True) if names == {name}
        ]
        outer = [
            side
            for side, names in zip(sides, tables, strict=True)
            if names and name not in names
        ]
        if set().union(*tables) <= {name}:
            query.where(condition, copy=False)
        elif inner and outer:
            pairs.append((outer[0], inner[0]))
        else:
            raise QueryError(
                f"{element}: {expressions.shorten(condition.sql(expressions.DIALECT))} "
                f"is no equality of a column of {name} with one of the query"
            )
    return pairs


def merge_sub_queries(select: exp.Select) -> None:
    """Merge a sub-query that only filters, computes or joins into its outer SELECT.

    One of a single table in the query itself is left to the parser.
    """
    for outer in reversed(list(select.find_all(exp.Select, bfs=True))):
        source = outer.args.get("from_")
        query = source.this if source else None
        inner = None
        if isinstance(query, exp.Subquery) and query.alias:
            inner = query.this
        if (
            not source
            or not isinstance(inner, exp.Select)
            or not _can_merge(outer, inner)
        ):
            continue
        has_stars = any(item.is_star for item in inner.expressions)
        if outer is select:
            is_kept = not inner.args.get("joins")
        else:
            is_kept = has_stars and len(inner.expressions) > 1
        if is_kept:
            continue
        _merge_columns(outer, inner, source.this.alias)
        source.set("this", inner.args["from_"].this)
        outer.set("joins", [*inner.args.get("joins", ()), *outer.args.get("joins", ())])
        if where := inner.args.get("where"):
            outer.where(where.this, copy=False)


def _can_merge(outer: exp.Select, inner: exp.Select) -> bool:
    """Return whether the outer SELECT can read the tables of the inner one itself."""
    items = (*outer.expressions, *inner.expressions)
    names = [
        item.alias_or_name.lower() for item in inner.expressions if not item.is_star
    ]
    return (
        {"from_"}
        <= expressions.clauses_of(inner)
        <= {"expressions", "from_", "joins", "where"}
        and len(names) == len(set(names))
        and not any(map(expressions.has_aggregate, inner.expressions))
        and not any(item.find(exp.Window) for item in inner.expressions)
        and not any(
            join.args.get("using") or join.method
            for join in outer.args.get("joins", ())
        )
        and not any(
            item.is_star and expressions.clauses_of(item.find(exp.Star))
            for item in items
        )
    )


def _merge_columns(outer: exp.Select, inner: exp.Select, alias: str) -> None:
    """Replace the columns and stars of a sub-query by its expressions."""
    stars = [item for item in inner.expressions if item.is_star]
    plain = [item for item in inner.expressions if not item.is_star]
    values = {item.alias_or_name.lower(): item.unalias() for item in plain}
    for value in values.values():
        expressions.check_expression(
            value,
            f"sub-query {alias!r}: {expressions.shorten(value.sql())}",
            aggregates=False,
        )
    # before any is replaced: the expressions have columns of the same names
    columns = [
        column
        for column in outer.find_all(exp.Column)
        if column.parent_select is outer and column.table.lower() in ("", alias.lower())
        if not column.is_star
    ]
    named = {item.alias.lower() for item in outer.expressions}
    is_alone = all(join.meta.get("is_filter") for join in outer.args.get("joins", ()))
    absent = outer.meta.setdefault("absent", [])
    outer.set("expressions", [_add_name(item, values) for item in outer.expressions])
    for column in columns:
        name = column.name.lower()
        table = column.table.lower()
        if name in values:
            # an engine may take such a column for that of the star: the binder refuses
            # both
            absent += [
                (star.table if isinstance(star, exp.Column) else "", name)
                for star in stars
            ]
            column.replace(operand(values[name]))
        elif stars and (table or is_alone):
            column.set("table", stars[0].args.get("table") if len(stars) == 1 else None)
        elif table or name not in named:
            raise QueryError(
                f"sub-query {alias!r} has no column {name!r}; columns: "
                f"{', '.join(values)}; write the columns of other tables with their "
                "names, t.x"
            )
    for item in outer.expressions:
        table = item.table.lower() if isinstance(item, exp.Column) else ""
        if item.is_star and (table == alias.lower() or (is_alone and not table)):
            item.replace([part.copy() for part in inner.expressions])


def _add_name(item: exp.Expr, values: Mapping[str, exp.Expr]) -> exp.Expr:
    """Return an item under its name, if that of the expression behind it is another."""
    value = None
    if isinstance(item, exp.Column):
        value = values.get(item.name.lower())
    is_renamed = value is not None and value.name.lower() != item.name.lower()
    if is_renamed:
        return exp.alias_(item, item.this.copy(), copy=False)
    return item
