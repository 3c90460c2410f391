"""A look at the bytes finds every odd number, wherever chunks are cut."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_flower.sources import csv_bytes
from tp_flower.sources.csv_bytes import has_odd_numbers

ODD = re.compile(rb"""[\n\r;"'](?:0[0-9]|[+ ])|[ ][\n\r;"']|[0-9]_[0-9]|[\t\v\f]""")


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet='0079.-_+ e,;"\n\t', max_size=30),
    chunk=st.integers(1, 9),
)
def test_odd_numbers_are_found(tmp_path_factory, text, chunk):
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    path.write_bytes(b"a_b, 007\n" + text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_bytes, "CHUNK_BYTES", chunk)
        found = has_odd_numbers(str(path), ";")
    assert found == bool(ODD.search(b"\n" + text.encode() + b"\n"))


def test_what_cannot_be_looked_at_may_be_odd(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a\n1\n")
    assert not has_odd_numbers(str(path), ",")
    assert has_odd_numbers(str(path), "§")
    assert has_odd_numbers(str(tmp_path / "t.csv.gz"), ",")
