"""What is appended in any pieces is read back in any pieces."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_flower.extraction import block_files
from tp_flower.extraction.block_files import (
    BlockReader,
    BlockWriter,
    FolderFiles,
    MemoryFiles,
)


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(0, 4),
    pieces=st.lists(st.integers(0, 9), max_size=8),
    block_rows=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_rows_come_back(tmp_path_factory, width, pieces, block_rows, seed):
    rng, rows = np.random.default_rng(seed), sum(pieces)
    whole = rng.random((width, rows))
    for files in (MemoryFiles(), FolderFiles(tmp_path_factory.mktemp("kept"))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block_files, "rows_of_block", lambda _: block_rows)
            writer = BlockWriter(files, "a", width, np.float64)
        start = 0
        for size in pieces:
            writer.append(list(whole[:, start : start + size]), size)
            start += size
        writer.finish()
        files.close()
        reader = BlockReader(files, "a", (width, rows), block_rows, np.float64)
        assert writer.rows == rows
        for number in range(width):
            np.testing.assert_array_equal(reader.column(number), whole[number])
        chosen = rng.permutation(rows)[: rows // 2]
        for positions in (np.sort(chosen), chosen, chosen[:0]):
            np.testing.assert_array_equal(reader.take(positions), whole[:, positions])
        span = slice(rows // 3, rows)
        np.testing.assert_array_equal(reader.take(span), whole[:, span])


def test_file_that_is_cut_short(tmp_path):
    files = FolderFiles(tmp_path)
    files.append("a", np.arange(3.0))
    files.close()
    with pytest.raises(OSError, match="is cut short"):
        files.read("a", np.float64, 8, 3)


@pytest.mark.parametrize(
    ("width", "rows"), [(1, 1 << 14), (64, 1 << 14), (1000, 1048), (1 << 20, 256)]
)
def test_blocks_are_of_one_size_in_bytes(width, rows):
    assert block_files.rows_of_block(width) == rows
