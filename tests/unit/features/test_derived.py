import duckdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples.encoding_example import categorical, numeric
from tp_flower.features.columns import cycle_of, number_texts, text_lengths
from tp_flower.features.spec import TIME_PARTS

SQL_PARTS = {part: part for part in ("hour", "minute", "month")}
SQL_PARTS |= {"weekday": "dayofweek", "day-of-year": "dayofyear"}


@settings(deadline=None)
@given(st.lists(st.integers(-(10**11), 10**11), min_size=1, max_size=20))
def test_parts_of_a_time_are_those_of_sql(seconds):
    given_list = ", ".join(map(str, seconds))
    for part, name in SQL_PARTS.items():
        expected = duckdb.sql(
            f"SELECT date_part('{name}', make_timestamp(s * 1000000)) AS part "
            f"FROM (SELECT unnest([{given_list}]::BIGINT[]) AS s)"
        ).fetchnumpy()["part"]
        place, period = cycle_of(part)
        np.testing.assert_array_equal(place(np.array(seconds, float)), expected)
        assert period == TIME_PARTS[part]
    assert SQL_PARTS.keys() == TIME_PARTS.keys()


@pytest.mark.parametrize("argument", [*TIME_PARTS, 12, 0.5])
def test_what_is_missing_has_no_place(argument):
    place, _ = cycle_of(argument)
    actual = place(np.array([np.nan, 3601.5]))
    assert np.isnan(actual).tolist() == [True, False]


@given(st.lists(st.none() | st.text(), max_size=8))
def test_lengths_are_characters(texts):
    expected = [np.nan if text is None else len(text) for text in texts]
    lengths = text_lengths(categorical(*texts))
    np.testing.assert_array_equal(lengths.values, np.array(expected))


@given(st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False)))
def test_numbers_have_one_text_each(numbers):
    column = number_texts(numeric(*numbers))
    read_back = np.append([float(text) for text in column.categories], np.nan)
    np.testing.assert_array_equal(read_back[column.codes], numeric(*numbers).values)
    assert len(set(column.categories)) == len({x for x in numbers if x is not None})
