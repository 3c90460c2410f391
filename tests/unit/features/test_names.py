"""The names of encoded columns: which a site may show, and of how many rows."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tests.support.examples.encoding_example import (
    HASHER,
    categorical,
    encoder_of,
    names_with_texts,
    numeric,
    vectors,
)
from tp_flower.features.names import UNNAMED, name_columns

COLUMNS = {
    "c": categorical(*"aaabbz", None),
    "n": numeric(1, 1, 1, 2, 2, 2, None),
    "v": vectors([1, 2], *[[0, 1]] * 6),
}
SPECS = {"c": "one-hot(9)", "n": "one-hot(9)"}


def names_of(encoder, columns, least):
    return name_columns(encoder, columns.__getitem__, least)


def test_categories_are_called_by_their_texts():
    found = names_of(encoder_of(COLUMNS, **SPECS), COLUMNS, 1)
    texts = names_with_texts(encoder_of(COLUMNS, **SPECS), COLUMNS)
    assert found.merged == tuple(name.removesuffix(".0") for name in texts)
    assert {"c=a", "c=(missing)", "n=1", "n=2", "v[0]"} <= {*found.merged}
    assert {*found.declared} == {UNNAMED, "v[0]", "v[1]"}


@pytest.mark.parametrize("least", [2, 3, 4])
def test_a_category_of_fewer_rows_has_no_name(least):
    encoder = encoder_of(COLUMNS, **SPECS)
    found = names_of(encoder, COLUMNS, least)
    counts = {"c=a": 3, "c=b": 2, "c=z": 1, "c=(missing)": 1, "n=1": 3, "n=2": 3}
    expected = {name for name, count in counts.items() if count >= least}
    assert {name for name in found.merged if "=" in name} == expected
    assert len(found.merged) == encoder.encoder.width


def test_nothing_of_rows_is_named_without_a_release():
    columns = {**COLUMNS, "x": numeric(0, 1, 2, 3, 4, 5, None)}
    how = {**SPECS, "x": "bins(3) indicator"}
    found = names_of(encoder_of(columns, **how), columns, None)
    assert not any(found.of_values)
    assert {*found.declared} == {UNNAMED, "v[0]", "v[1]", "x is missing"}


def test_declared_categories_have_their_names_whatever_the_rows_are():
    columns = {"c": categorical("a", "q"), "n": numeric(1, 2), "h": categorical("a")}
    specs = {"c": "categories(a, b)", "n": "categories(2, 3)", "h": "hash(2)"}
    found = names_of(encoder_of(columns, **specs), columns, None)
    assert found.merged == ("c=a", "c=b", "n=2", "n=3", UNNAMED, UNNAMED)
    assert not any(found.of_values)


def test_the_ends_of_bins_are_values_of_single_rows():
    columns = {"x": numeric(*range(7))}
    encoder = encoder_of(columns, x="bins(3)")
    shown = names_of(encoder, columns, 1)
    assert shown.merged == ("x below 2", "x from 2 to 4", "x from 4")
    assert shown.declared == (UNNAMED,) * 3
    assert names_of(encoder, columns, 2).merged == (UNNAMED,) * 3


def test_levels_have_a_slope_and_their_numbers():
    columns = {"x": numeric(*[0, 1, 2] * 100, *[None] * 9)}
    found = names_of(encoder_of(columns), columns, 5)
    assert found.merged[0] == "x"
    assert {*found.merged[1:]} == {"x=0", "x=1", "x=2", "x=(missing)"}


@pytest.mark.parametrize("text", ["a\nb", "a\u202eb", "x" * 250, "(missing)"])
def test_a_text_that_misleads_or_fits_no_table_is_no_name(text):
    columns = {"c": categorical(text, text, "b", "b", None, None)}
    found = names_of(encoder_of(columns, c="one-hot(9)"), columns, 1)
    assert "c=b" in found.merged
    assert not any(text in name for name in found.merged)


def test_a_shard_names_what_it_has_itself():
    union = {"c": categorical(*"aaabbb")}
    own = {"c": categorical(*"aab")}
    found = names_of(encoder_of(union), own, 2)
    assert sorted(found.merged) == [UNNAMED, "c=a"]


def test_rows_are_counted_by_their_value_not_by_the_column_they_share():
    """Another shard's encoder may let missing rows share the column of a rare value."""
    columns = {"c": categorical("rare", *[None] * 20)}
    honest = encoder_of({"c": categorical("rare", "b")}).encoder
    (encoding,) = honest.encodings
    for fill in range(2):
        forged = replace(
            honest, encodings=(msgspec.structs.replace(encoding, fill=fill),)
        ).for_site(HASHER)
        assert names_of(forged, columns, 10).merged == (UNNAMED, UNNAMED)
        assert {*names_of(forged, columns, 1).merged} == {UNNAMED, "c=rare"}


def test_the_rest_is_named_by_the_same_rule():
    columns = {"c": categorical(*"aaaaabbbbcd", None, None)}
    encoder = encoder_of(columns, c="one-hot(3) missing=zero")
    for least, named in ((2, True), (3, False)):
        found = names_of(encoder, columns, least).merged
        assert ("c=(other)" in found) == named
        assert np.isin(["c=a", "c=b"], found).all()
