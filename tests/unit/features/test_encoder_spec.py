import unicodedata

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_flower.errors import SchemaError, SettingsError
from tp_flower.features.choice import (
    TableChoice,
    choose_encoders,
    parse_entries,
    render_entries,
)
from tp_flower.features.spec import (
    DEFAULTS,
    ENCODERS,
    KINDS,
    TIME_PARTS,
    EncoderSpec,
    Need,
)


def normal(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def quoted(texts: list[str]) -> str:
    return ", ".join('"' + text.replace('"', '""') + '"' for text in texts)


counts = st.integers(2, 1000)
arguments = {
    "one-hot": st.just("") | counts,
    "hash": counts,
    "bins": counts,
    "quantile-bins": counts,
    "cyclic": st.sampled_from(sorted(TIME_PARTS))
    | counts
    | st.floats(1e-3, 1e6, allow_nan=False),
    "range": st.sampled_from(
        ["1, 12", "-0.5,1e9", "1950-01-01, 2013-12-31", "2013-01-01T06:00, 2014-01-01"]
    ),
    "categories": st.lists(st.text(), min_size=1, unique_by=normal).map(quoted)
    | st.sampled_from(["AA, UA", "1, 2.5", "1,1.0", 'a b, "c;d=e"', "true, false"]),
}


@st.composite
def specs(draw: st.DrawFn) -> EncoderSpec:
    kind = draw(st.sampled_from(ENCODERS))
    argument = str(draw(arguments.get(kind, st.just(""))))
    rules = ["mean", "median", "most-frequent", "middle", "zero"]
    for missing in draw(st.permutations(rules)):
        try:
            return EncoderSpec(kind, argument, missing, draw(st.booleans()))
        except ValueError:
            continue
    raise AssertionError


@given(specs())
def test_text_is_read_back(spec: EncoderSpec) -> None:
    assert EncoderSpec.parse(str(spec)) == spec


@given(specs(), st.sampled_from(KINDS))
def test_a_full_spec_stays_as_it_is(spec: EncoderSpec, kind: str) -> None:
    try:
        full = spec.for_kind(kind, 9)
    except SchemaError:
        return
    assert full.for_kind(kind, 10) == full
    assert full.missing


@pytest.mark.parametrize(
    ("kind", "text", "needs"),
    [
        ("number", "min-max", {Need.RANGE, Need.MOMENTS}),
        ("number", "min-max missing=zero", {Need.RANGE}),
        ("number", "robust", {Need.QUANTILES, Need.MOMENTS}),
        ("number", "quantile-bins(4)", {Need.QUANTILES}),
        ("number", "bins(4) missing=median", {Need.RANGE, Need.QUANTILES}),
        ("number", "hash(4)", set()),
        ("number", "cyclic(7)", set()),
        ("number", "range(1, 12)", set()),
        ("number", "categories(1, 2) indicator", set()),
        # the default of a kind
        ("number", "standard missing=mean", {Need.MOMENTS}),
        ("boolean", "standard missing=mean", {Need.MOMENTS}),
        ("time", "standard missing=mean", {Need.MOMENTS}),
        ("text", "one-hot(9) missing=most-frequent", {Need.CATEGORIES}),
        ("vector", "none missing=zero", set()),
    ],
)
def test_needs(kind: str, text: str, needs: set[Need]) -> None:
    spec = EncoderSpec.parse(text).for_kind(kind, 9)
    assert spec.needs_of(kind) == needs
    is_default = text.startswith(("standard", "one-hot", "none"))
    assert (EncoderSpec.parse(DEFAULTS[kind]).for_kind(kind, 9) == spec) == is_default


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not of the form"),
        ("(3)", "is not of the form"),
        ("onehot(3)", "'onehot' is no encoder: it must be one of standard, min-max"),
        ("standard(3)", r"standard takes no argument, not \(3\)"),
        ("one-hot(1)", r"one-hot needs a whole number from 2 to .*, not \(1\)"),
        ("one-hot(many)", r"one-hot needs a whole number .*, not \(many\)"),
        ("hash", r"hash needs a whole number .* as in hash\(16\), not \(\)"),
        ("bins(2.5)", r"bins needs a whole number .*, not \(2.5\)"),
        ("cyclic", r"cyclic needs a period above 0 or one of hour, minute"),
        ("cyclic(0)", r"cyclic needs a period above 0 .*, not \(0\)"),
        ("cyclic(nan)", r"cyclic needs a period above 0 .*, not \(nan\)"),
        ("cyclic(12) missing=mean", "missing=mean does not go with cyclic: .* zero"),
        ("range", r"\(\) is not a low and a high end: write two numbers, as in range"),
        ("range(1)", r"\(1\) is not a low and a high end"),
        ("range(1, 2, 3)", r"\(1, 2, 3\) is not a low and a high end"),
        ("range(1, 2000-01-01)", "is not a low and a high end: .* or two dates, as in"),
        ("range(5, 5)", r"\(5, 5\) does not run from low to high"),
        ("range(1, inf)", r"\(1, inf\) does not run from low to high"),
        ("range(-1e308, 1e308)", "does not run from low to high"),
        ("range(1, 2) missing=mean", "missing=mean does not go with range: .* mid"),
        ("categories", r"\(\) is not a list of categories, as in categories\(AA, UA\)"),
        ("categories(a,,b)", r"\(a,,b\) is not a list of categories"),
        ("categories(a, b, a)", r"\(a, b, a\) names a category twice"),
        ('categories("a", a)', "names a category twice"),
        ('categories("a" b)', "is not a list of categories"),
        ("categories(a", "is not of the form"),
        ("standard missing=", "'missing=' is not an option"),
        ("standard indicator indicator", "'indicator' is not an option, or given"),
        ("standard x", "'x' is not an option, or given twice: options are missing="),
    ],
)
def test_refuses_what_is_no_spec(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EncoderSpec.parse(text)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("standard", "text", "fit a text: use categories, one-hot, hash, length$"),
        ("range(1, 2)", "time", r"write dates, as in range\(1950-01-01, 2013-12-31\)$"),
        ("range(2000-01-01, 2001-01-01)", "number", r"write numbers, as in range"),
        ("range(1, 2)", "text", "does not fit a text"),
        ("categories(a)", "number", "does not fit a number: 'a' is not a number"),
        ("categories(1, 1.0)", "number", "names a number twice"),
        ("categories(yes)", "boolean", "does not fit a boolean: 'yes' is not a number"),
        ("categories(1)", "time", "does not fit a time"),
        ("length", "number", r"fit a number: use standard, min-max, .*, hash, none$"),
        ("cyclic(12)", "boolean", "does not fit a boolean"),
        ("cyclic(month)", "number", r"needs a time: give a number a period"),
        ("bins(3)", "vector", "does not fit a vector: use none$"),
        ("none missing=mean", "vector", "missing=mean does not fit a vector: .* zero"),
    ],
)
def test_refuses_what_does_not_fit(text: str, kind: str, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        EncoderSpec.parse(text).for_kind(kind, 9)


names = st.text(min_size=1).filter(lambda name: name.strip() == name)


@given(st.lists(st.tuples(names, names, specs().map(str)), max_size=4))
def test_entries_are_read_back(entries: list[tuple[str, str, str]]) -> None:
    assert parse_entries(render_entries(entries)) == tuple(entries)


FEATURES = {"f": ["month", "x"], "p": ["model"]}


def test_entries_find_tables_and_columns_without_case() -> None:
    actual = choose_encoders((("F", "Month", "cyclic(12)"),), FEATURES, 7)
    assert actual["f"] == TableChoice("f", {"month": "cyclic(12)", "x": None}, 7)
    assert str(actual["p"].spec_for("model", "text")).startswith("one-hot(7) ")
    for choice in actual.values():
        assert msgspec.convert(msgspec.to_builtins(choice), TableChoice) == choice


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (("g", "x", "none"), "names table 'g'; the query has f, p"),
        (("f", "y", "none"), "column 'y' of table 'f', whose features are month, x"),
    ],
)
def test_refuses_entries_about_nothing(entry: tuple[str, ...], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        choose_encoders((entry,), FEATURES)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("x", r"encoder of f\.x: encoder length does not"),
        ("y", r"encoder of f\.y: there is no such feature"),
    ],
)
def test_errors_name_the_feature(column: str, message: str) -> None:
    (table,) = choose_encoders((("f", "x", "length"),), {"f": ["x"]}).values()
    with pytest.raises(SchemaError, match=message):
        table.spec_for(column, "number")
