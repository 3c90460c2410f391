"""The text by which a query is reviewed: one for the same query, others for others."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.files import case_table
from tests.support.tables.fragments import features, plain_features
from tp_flower.query import Feature, Fragment, SubQuery
from tp_flower.query.cutoffs import CutoffGrid, Cutoffs
from tp_flower.terms.fragment_text import fragment_text

VISITS = Fragment(
    "v",
    "visits",
    features=features(day='"day"', late='"hour" > 20'),
    keys=(('"ward"', '"bed"'), ('"patient"',)),
    label='"hiv"',
    filters=('"day" > 3', "\"ward\" = 'a'"),
    weight='"days"',
)
AVERAGES = features(mean='AVG("day")', p='"patient"')
INNER = SubQuery(AVERAGES, ('"day" > 3',), ('"patient"',), ("COUNT(*) > 1",))
MONTHS = CutoffGrid("1 month", "2015-01-01", "2020-12-31", "DATE")
LAST = SubQuery(
    features(x='"x"'),
    ('"day" < "(cutoff)"',),
    ('"ward"', '"patient"'),
    cutoffs=Cutoffs(grid=MONTHS),
    last=('"day"', '"hour"'),
)
BEFORE = Fragment("v", "visits", plain_features("x"), subquery=LAST)
GROUPED = Fragment("v", "visits", plain_features("mean"), subquery=INNER)
CASES = case_table(__file__)
TEXT = CASES["plain"]


def test_a_text_has_a_line_for_every_piece():
    texts = [TEXT, CASES["grouped"], CASES["before"]]
    assert [*map(fragment_text, (VISITS, GROUPED, BEFORE))] == texts


def test_the_same_query_has_one_text():
    filters = ("/* fine */ ward='a' -- really", "day > 3")
    again = replace(VISITS, table="another", filters=filters, label="hiv")
    again = replace(again, features=again.features[::-1], keys=again.keys[::-1])
    assert fragment_text(again) == TEXT


@CASES.each("hostile", "hostile", "line")
def test_no_piece_forges_a_line_or_hides_a_part(hostile, line):
    text = fragment_text(Fragment("v", "visits", filters=(hostile,)))
    assert text.split("\n") == ['table "visits"', line]


# texts that could be taken for the words around them
WORDS = st.text('ab":\\ \n', min_size=1, max_size=6) | st.sampled_from(
    ["label: b", 'a": "b', "x\nfilter: y", "\\n", "  and: a", "\u2028", "\ud800"]
)
FEATURES = st.lists(st.builds(Feature, WORDS, WORDS), max_size=3).map(tuple)
PIECES = st.lists(WORDS, max_size=3).map(tuple)
SOME = st.lists(WORDS, min_size=1, max_size=3).map(tuple)
GRIDS = st.builds(CutoffGrid, WORDS, WORDS, WORDS, WORDS)
CUTOFFS = st.builds(Cutoffs, WORDS) | st.builds(Cutoffs, grid=GRIDS)
SUBQUERIES = st.builds(SubQuery, FEATURES, PIECES, SOME, PIECES) | st.builds(
    SubQuery, FEATURES, PIECES, SOME, PIECES, CUTOFFS, PIECES
)
FRAGMENTS = st.builds(
    Fragment,
    table=st.just(""),
    name=WORDS,
    features=FEATURES,
    keys=st.lists(SOME, max_size=3).map(tuple),
    label=st.none() | WORDS,
    filters=PIECES,
    subquery=st.none() | SUBQUERIES,
    weight=st.none() | WORDS,
)


def ordered(query: Fragment) -> Fragment:
    """The query in a form that is equal for any order of its pieces."""

    def lists(part, *names):
        return {name: tuple(sorted(getattr(part, name), key=repr)) for name in names}

    inner = query.subquery
    if inner is not None:
        names = ("columns", "filters", "groups", "having")
        inner = replace(inner, **lists(inner, *names))
    return replace(query, subquery=inner, **lists(query, "features", "keys", "filters"))


@given(FRAGMENTS, FRAGMENTS)
@example(
    Fragment("", "a", filters=("x\nlabel: b",)),
    Fragment("", "a", filters=("x",), label="b"),
)
def test_distinct_fragments_never_share_a_text(first, second):
    """Of pieces that are no SQL, too, which are left as they came."""
    with pytest.MonkeyPatch.context() as raw:
        raw.setattr("tp_flower.terms.fragment_text._render", lambda query: query)
        is_same = fragment_text(first) == fragment_text(second)
        assert is_same == (ordered(first) == ordered(second))
