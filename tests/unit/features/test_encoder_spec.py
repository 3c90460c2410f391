import unicodedata

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.files import case_table
from tp_flower.errors import SchemaError, SettingsError
from tp_flower.features.choice import (
    TableChoice,
    choose_encoders,
    parse_entries,
    render_entries,
)
from tp_flower.features.spec import DEFAULTS, ENCODERS, KINDS, TIME_PARTS, EncoderSpec

CASES = case_table(__file__)
names = st.text(min_size=1).filter(lambda name: name.strip() == name)
FEATURES = {"f": ["month", "x"], "p": ["model"]}


def normal(text):
    return unicodedata.normalize("NFC", text)


def quoted(texts):
    return ", ".join('"' + text.replace('"', '""') + '"' for text in texts)


RANGES = ["1, 12", "-0.5,1e9", "1950-01-01, 2013-12-31", "2013-01-01T06:00, 2014-01-01"]
counts = st.integers(2, 1000)
arguments = {
    "one-hot": st.just("") | counts,
    "hash": counts,
    "levels": counts,
    "bins": counts,
    "cyclic": st.sampled_from(sorted(TIME_PARTS)) | counts | st.floats(1e-3, 1e6),
    "range": st.sampled_from(RANGES),
    "categories": st.lists(st.text(), min_size=1, unique_by=normal).map(quoted)
    | st.sampled_from(["AA, UA", "1, 2.5", "1,1.0", 'a b, "c;d=e"', "true, false"]),
}


@st.composite
def specs(draw):
    kind = draw(st.sampled_from(ENCODERS))
    argument = str(draw(arguments.get(kind, st.just(""))))
    for missing in draw(
        st.permutations(["mean", "category", "middle", "zero", "apart"])
    ):
        try:
            return EncoderSpec(kind, argument, missing, draw(st.booleans()))
        except ValueError:
            continue
    raise AssertionError


@given(specs(), st.sampled_from(KINDS))
def test_text_is_read_back_and_a_full_spec_stays(spec, kind):
    assert EncoderSpec.parse(str(spec)) == spec
    try:
        full = spec.for_kind(kind, 9)
    except SchemaError:
        return
    assert full.for_kind(kind, 10) == full
    assert full.missing


@CASES.each("needs", "kind", "text", "needs")
def test_needs(kind, text, needs):
    spec = EncoderSpec.parse(text).for_kind(kind, 9)
    assert " ".join(sorted(spec.needs_of(kind))) == needs
    is_default = text.startswith(("standard missing", "levels", "one-hot", "none"))
    assert (EncoderSpec.parse(DEFAULTS[kind]).for_kind(kind, 9) == spec) == is_default


@CASES.each("malformed", "text", "message")
def test_refuses_what_is_no_spec(text, message):
    with pytest.raises(ValueError, match=message):
        EncoderSpec.parse(text)


@CASES.each("unfit", "text", "kind", "message")
def test_refuses_what_does_not_fit(text, kind, message):
    with pytest.raises(SchemaError, match=message):
        EncoderSpec.parse(text).for_kind(kind, 9)


@given(st.lists(st.tuples(names, names, specs().map(str)), max_size=4))
def test_entries_are_read_back(entries):
    assert parse_entries(render_entries(entries)) == tuple(entries)


def test_entries_find_tables_and_columns_without_case():
    actual = choose_encoders((("F", "Month", "cyclic(12)"),), FEATURES, 7)
    assert actual["f"] == TableChoice("f", {"month": "cyclic(12)", "x": None}, 7)
    assert str(actual["p"].spec_for("model", "text")).startswith("one-hot(7) ")
    for choice in actual.values():
        assert msgspec.convert(msgspec.to_builtins(choice), TableChoice) == choice


def test_errors_name_the_table_or_the_feature():
    for entry, message in (
        (("g", "x", "none"), "names table 'g'; the query has f, p"),
        (("f", "y", "none"), "column 'y' of table 'f', whose features are month, x"),
    ):
        with pytest.raises(SettingsError, match=message):
            choose_encoders((entry,), FEATURES)
    (table,) = choose_encoders((("f", "x", "length"),), {"f": ["x"]}).values()
    with pytest.raises(SchemaError, match=r"encoder of f\.x: encoder length does not"):
        table.spec_for("x", "number")
    with pytest.raises(SchemaError, match=r"encoder of f\.y: there is no such feature"):
        table.spec_for("y", "number")
