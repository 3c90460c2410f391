"""Joined rows that take more than ``memory``: their vectors are mapped from files."""

import errno
import os

import numpy as np
import pytest

from tests.support.federated import one_per_site, run, sharded, store
from tp_flower import arrays
from tp_flower.errors import MappingError
from tp_flower.joins import joining

EPOCHS = {"admm": 3, "boost": 2, "cg": 3, "gd": 3, "sgd": 2}


def trained(method, **settings):
    settings.setdefault("num_epochs", EPOCHS[method])
    return run("logistic", one_per_site(sharded(store(60))), method, **settings)


@pytest.fixture
def small_files(monkeypatch):
    """Have files for arrays of any size, and return their sizes."""
    sizes = []
    allocate = os.posix_fallocate

    def record(file, start, size):
        sizes.append(size)
        allocate(file, start, size)

    monkeypatch.setattr(arrays, "MAPPED_BYTES", 1)
    monkeypatch.setattr(os, "posix_fallocate", record)
    return sizes


@pytest.mark.parametrize("method", EPOCHS)
def test_the_model_is_that_of_joined_rows_in_memory(method, small_files):
    expected = trained(method)
    assert not small_files
    mapped = trained(method, memory="0.001 MB")
    assert mapped.losses == expected.losses
    assert mapped.report.final_test == expected.report.final_test
    assert small_files


@pytest.mark.usefixtures("small_files")
def test_what_is_made_of_mapped_rows_is_mapped():
    rows = trained("cg", memory="0.001 MB").problem.rows
    numbers = [table.row_of for table in rows.mapping.tables.values()]
    for values in (*numbers, *rows.vectors.values()):
        assert arrays.is_mapped(values)
    half = rows.select(np.arange(rows.rows) % 2 == 0)
    assert arrays.is_mapped(half.vectors["scores"])
    scores = rows.whole("scores")
    np.testing.assert_array_equal(half.whole("scores"), scores[::2])


@pytest.mark.parametrize("chosen", ["mask", "positions"])
def test_rows_are_chosen_from_many_blocks(chosen):
    values = arrays.empty((9 * arrays.BLOCK_ROWS + 5, 4), float, is_mapped=True)
    values[...] = np.arange(values.size).reshape(values.shape)
    rows = np.arange(len(values)) % 3 == 1
    if chosen == "positions":
        rows = np.flatnonzero(rows)[::-1]
    taken = arrays.chosen_rows(values, rows)
    assert arrays.is_mapped(taken)
    np.testing.assert_array_equal(taken, np.array(values)[rows])


def test_rows_within_memory_are_in_memory(small_files):
    rows = 181
    assert not joining.RowLimits(memory=joining.JOINED_ROW * rows).are_mapped(rows)
    trained("cg", memory="1 GB")
    assert not small_files


@pytest.mark.usefixtures("small_files")
def test_a_folder_without_room_is_named(monkeypatch, tmp_path):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(arrays.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(
        MappingError,
        match=rf"memory: no file of .* GB for the joined rows in {tmp_path}: No space "
        r"left on device\. Set TMPDIR to a folder with more room, or memory to more",
    ):
        trained("cg", memory="0.001 MB")
    # the advice: all of them in memory
    trained("cg", num_epochs=1, memory="1 GB")
    assert not list(tmp_path.iterdir())
