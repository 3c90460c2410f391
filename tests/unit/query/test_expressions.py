"""Expressions: what DuckDB runs is what was written, or it is refused by name."""

from functools import partial

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlglot import exp

from tests.support.sql_pairs import ACCEPTED
from tp_flower.errors import QueryError
from tp_flower.query.expressions import (
    AGGREGATE_NODES,
    ALLOWED_FUNCTIONS,
    ALLOWED_NODES,
    MAX_EXPRESSION_CHARACTERS,
    check_expression,
    parse_expression,
    parse_statements,
    render,
)

TEXTS = """
abs(i); @i; ceil(x); ceiling(x); floor(x); round(x, 1); trunc(x); sign(x);
sqrt(abs(x)); cbrt(x); exp(x); ln(x); log(x); log10(x); log2(x); log(2, x); pow(x, 2);
x ** 2; x ^ 2; sin(x); cos(x); tan(x); asin(x / 10); acos(x / 10); atan(x);
atan2(x, 1); degrees(x); radians(x); pi() * x; mod(i, 4); i % 4; i // 2; i / 2; i / 0;
fmod(i, 4); greatest(x, i); least(x, i, 1); coalesce(x, 0); ifnull(x, 0);
nullif(i, 3); if(b, 1, 0); case when b then 1 else 0 end; case i when 3 then 'a' end;
isnan(x); isinf(x); isfinite(x); even(x); gcd(i, 6); lower(s); ucase(s); length(s);
strlen(s); trim(s); ltrim(s, 'A'); rtrim(s); trim(both 'A' from s);
substring(s, 1, 2); substr(s, 2); left(s, 1); right(s, 1); replace(s, 'A', 'b');
reverse(s); concat(s, 'x'); concat_ws('-', s, 'x'); s || 'x'; contains(s, 'b');
starts_with(s, 'A'); prefix(s, 'A'); suffix(s, 'c'); ends_with(s, 'c'); s ^@ 'A';
instr(s, 'b'); position('b' in s); split_part(s, ' ', 1); regexp_matches(s, '[bz]');
regexp_replace(s, 'b', 'x', 'g'); regexp_extract(s, '(b)', 1);
regexp_full_match(s, '.*'); s ~ 'A.*'; s like 'A%'; s ilike 'a%'; s not like 'A%';
s like 'A!%' escape '!'; s similar to 'A.*'; s glob 'A*'; levenshtein(s, 'x');
strip_accents(s); year(ts); month(ts); day(ts); hour(ts); minute(ts); second(ts);
quarter(ts); week(ts); weekofyear(ts); isodow(ts); dayofweek(ts); weekday(ts);
dayofyear(ts); yearweek(ts); dayname(ts); monthname(ts); extract(dow from ts);
extract(epoch from ts); extract('hour' from ts); extract(year from d);
date_part('hour', ts); date_trunc('day', ts); date_diff('day', d, ts);
datediff('hour', d, ts); date_sub('day', d, ts); d + interval 1 day;
d - interval (i) day; d + 1; d - date '2013-01-01'; ts - timestamp '2013-01-01';
age(ts, timestamp '2013-01-01'); epoch(ts); epoch_ms(ts); strftime(ts, '%Y');
strptime('2013', '%Y') > ts; make_date(2013, 1, 2) < d; last_day(d);
time_bucket(interval '1 day', ts); julian(ts); date(ts);
date_trunc('month', ts::date); cast(s as varchar); try_cast(s as int); i::double;
i::decimal(10, 2); ts::date; d::timestamp; i::hugeint; i::float; b::int;
i between 1 and 3; i not between 1 and 3; i in (1, 3); s not in ('a', 'xyz');
i is null; i is not null; i isnull; b is true; b is not false; i is distinct from 3;
i == 3; i <> 3; not b; b and i > 0; b or i > 0; i & 1; i | 1; ~i; -i; +i; i - -1;
i - (1 - x); (i + 1) * 2; n * 1.5; -i ^ 2; 2 ^ i ^ 2; i & 1 + 1; s ~ 'a' || 'b';
not i = 3; i % 5 * 2; -i::int; i > 2 is true; 'a' || i; mod(i + 1, 4) * 2;
(i > 1) = b; d + interval '1 day 2 hours'; i + 1_000; s = 'it''s'; i > .5; 1e3 * i;
i /* note */ + 1;
i >= 3; i <= 3; i is not distinct from 3; dayofmonth(d); d + to_days(2);
date_add(d, interval 1 day); make_timestamp(2013, 1, 2, 3, 4, 5.5) < ts; lcm(i, 4);
jaccard(s, 'ab'); jaro_similarity(s, 'ab'); damerau_levenshtein(s, 'ab');
nfc_normalize(s); millisecond(ts); isoyear(ts); datepart('year', ts);
datesub('month', d, ts); epoch_us(ts); epoch_ns(ts); ts + to_hours(2);
try_strptime('2013', '%Y') < ts
"""
PIECES = [piece.strip() for piece in TEXTS.split(";")]


@pytest.fixture(scope="module")
def database():
    with duckdb.connect() as connection:
        connection.execute(
            """CREATE TABLE t AS SELECT * FROM (VALUES
            (3, 2.5::DOUBLE, 'Ab c', TIMESTAMP '2013-01-02 03:04:05',
             DATE '2013-01-02', true, 1.25),
            (-7, 0.25, 'xyz', TIMESTAMP '2020-02-29 23:59:59',
             DATE '2020-02-29', false, 10.5),
            (NULL, NULL, NULL, NULL, NULL, NULL, NULL)) v(i, x, s, ts, d, b, n)"""
        )
        yield connection


@pytest.mark.parametrize("text", PIECES)
def test_a_rendered_expression_is_a_fixed_point_with_the_same_values(database, text):
    rendered = render(parse_expression(text, "feature"), quote=True)
    assert render(parse_expression(rendered, "feature"), quote=True) == rendered
    query = "SELECT typeof({0}), ({0}) FROM t"
    expected = database.execute(query.format(text)).fetchall()
    assert database.execute(query.format(rendered)).fetchall() == expected


def test_everything_that_is_allowed_was_run():
    trees = [parse_statements(f"SELECT {piece}")[0].expressions[0] for piece in PIECES]
    trees += [parse_expression(piece, "feature") for piece in PIECES]
    nodes = [node for tree in trees for node in tree.walk()]
    assert {type(node) for node in nodes} >= ALLOWED_NODES
    names = {node.name.lower() for node in nodes if isinstance(node, exp.Anonymous)}
    assert names == ALLOWED_FUNCTIONS
    # every accepted pair runs in DuckDB and is compared with its answer
    trees = [tree for pair in ACCEPTED for tree in parse_statements(pair["sql"])]
    assert {type(node) for tree in trees for node in tree.walk()} >= AGGREGATE_NODES
    assert exp.AnyValue not in AGGREGATE_NODES


FORBIDDEN = """
read_text('/etc/passwd'); "read_text"(x); read_csv('x.csv'); current_setting('x');
getenv('HOME'); product(x); query('SELECT 1'); nextval('s'); error('x'); random();
uuid(); now(); current_date; unnest([1, 2]); range(1000000000);
repeat(s, 1000000000); lpad(s, 1000000000, 'x'); printf('%1000000000d', x)
"""


@pytest.mark.parametrize("text", [text.strip() for text in FORBIDDEN.split(";")])
def test_functions_that_are_not_allowed(text):
    name = text.split("(")[0].strip('"')
    message = f"feature 'f' is refused: .*function '{name}' is not among"
    with pytest.raises(QueryError, match=message):
        parse_expression(text, "feature 'f'")


REFUSED = [
    ("(SELECT 1)", "sub-queries are not supported"),
    ("x IN (SELECT y FROM secrets)", "sub-queries are not supported"),
    ("EXISTS (SELECT 1)", "sub-queries are not supported"),
    ("x > ALL (SELECT 1)", "construct All is not among"),
    ("row_number() OVER ()", "window functions are not supported"),
    ("*", r"name the columns instead of \*|\* stands inside COUNT alone"),
    ("t.*", r"name the columns instead of \*"),
    ("glob('/*')", "is not among those supported"),
    ("COLUMNS('.*')", r"name the columns instead of \*"),
    ("$1", "parameters are not supported"),
    ("?", "parameters are not supported"),
    ("x AS y", "an alias has no place here"),
    ("x, y", "not one expression: x, y"),
    ("x FROM secrets", "not one expression"),
    ("DISTINCT x", "not one expression"),
    ("x; DROP TABLE t", "not one expression"),
    ("x UNION SELECT 1", "not one expression"),
    ("", "not one expression"),
    ("-- nothing", "not one expression"),
    ("x +", "line 1, column 10: Required keyword: 'expression' missing for Add"),
    ("x'", "does not parse"),
    ("{AS: ,}", "cannot be read"),
    ("main.abs(x)", "construct Dot is not among"),
    ("s.upper()", "construct Dot is not among"),
    ("list_transform([1], lambda v: v)", "is not among those supported"),
    ("{'a': x}", "function Struct is not among"),
    ("x COLLATE nocase", "function Collate is not among"),
    ("x::foo", "this type is not among those supported: foo"),
    ("x::INT[]", "this type is not among those supported"),
    ("x::JSON", "this type is not among those supported"),
    ("date_trunc('DAY'', getenv(x)) || date_trunc(''DAY', x)", "part or unit"),
    ("date_diff(y, x, x)", "no unambiguous form in SQL"),
    ("regexp_replace(s, 'a', 'b', 'zz')", "not expressible in DuckDB"),
    ("x < y = z", "write chained comparisons with AND or in parentheses: x < y"),
    ("x IN y", "IN takes a list of values: x IN y"),
    ("x IN UNNEST([1])", "IN takes a list of values"),
    ("db.t.x", "write a column as table.column: db.t.x"),
    ("x + " * MAX_EXPRESSION_CHARACTERS + "1", "characters, at most 20000"),
    ("(" * 3000 + "x" + ")" * 3000, "nested too deeply"),
    ("$$text$$", "construct RawString is not among"),
]
AGGREGATES = ["sum(x)", "count(*)", "any_value(x)", "sum(x) FILTER (WHERE x > 1)"]


@pytest.mark.parametrize("aggregates", [False, True])
@pytest.mark.parametrize(("text", "reason"), REFUSED)
def test_refused(aggregates, text, reason):
    with pytest.raises(QueryError, match=f"feature 'f' is refused: .*({reason})"):
        parse_expression(text, "feature 'f'", aggregates=aggregates)


@pytest.mark.parametrize("text", AGGREGATES)
def test_aggregates_outside_of_sub_queries(text):
    with pytest.raises(QueryError, match="aggregate functions are not supported: "):
        parse_expression(text, "feature 'f'")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sum(count(*))", r"an aggregate cannot stand inside another: COUNT\(\*\)"),
        ("sum(max(amount) + 1)", "an aggregate cannot stand inside another"),
        ("sum(amount) FILTER (WHERE max(id) > 1)", "cannot stand inside another"),
        ("sum(count(*) FILTER (WHERE id > 1))", "cannot stand inside another"),
        ("abs(amount) FILTER (WHERE id > 1)", "follows an aggregate"),
        ("sum(DISTINCT amount)", r"COUNT\(DISTINCT x\) alone"),
        ("count(DISTINCT amount, id)", r"COUNT\(DISTINCT x\) alone, with one"),
        ("sum(*)", r"\* stands inside COUNT alone"),
        ("count(* EXCLUDE (id))", r"\* stands inside COUNT alone"),
        ("count()", "this form of an aggregate is not supported"),
        ("max(amount, 3)", "this form of an aggregate is not supported"),
        ("quantile_cont(amount, 2)", "a quantile is a number from 0 to 1"),
        ("quantile_cont(amount, '0.5')", "a quantile is a number from 0 to 1"),
        ("quantile_cont(amount, [0.5])", "a quantile is a number from 0 to 1"),
        ("sum(p.*)", r"name the columns instead of \*"),
    ],
)
def test_refused_aggregates(text, reason):
    with pytest.raises(QueryError, match=f"column 'f' is refused: .*{reason}"):
        parse_expression(text, "column 'f'", aggregates=True)


def test_a_condition_belongs_to_a_filter():
    with pytest.raises(QueryError, match="WHERE stands inside FILTER alone"):
        check_expression(exp.Where(this=exp.column("x")), "column 'f'", aggregates=True)


TOKENS = """
x y s 1 2.5 'a' ( ) ( ) , ; + - * / = < IN AND OR NOT IS NULL CASE WHEN THEN ELSE END
SELECT FROM t . :: INT [ ] sum( abs( lower( -- /* */ " ' $1 ? LIKE INTERVAL DAY CAST(
EXTRACT( AS DATE BETWEEN : -> { } OVER UNION DROP SET COUNT( COUNT(*) AVG( MAX(
DISTINCT FILTER (WHERE ) QUANTILE_CONT( 0.5 ORDER BY MEDIAN( GROUP HAVING ANY_VALUE(
BOOL_OR(
"""


@pytest.mark.parametrize("aggregates", [False, True])
@settings(max_examples=300)
@given(
    st.one_of(
        st.text(max_size=30),
        st.lists(st.sampled_from(TOKENS.split()), max_size=12).map(" ".join),
    )
)
def test_anything_is_refused_or_has_one_form(aggregates, text):
    parse = partial(parse_expression, what="piece", aggregates=aggregates)
    try:
        once = render(parse(text), quote=True)
    except QueryError:
        return
    assert render(parse(once), quote=True) == once
