"""What a site keeps: in memory, and in files that another process reads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from client_apps.data import run_store
from client_apps.data.run_store import Entry, SiteStore
from tp_flower.errors import SiteError

ROOT = Path(__file__).resolve().parents[1]
ENTRY = Entry(
    {
        "features": np.arange(6, dtype=np.float32).reshape(3, 2),
        "none": np.zeros((0, 4)),
        "mask": np.array([True, False]),
    },
    {"table": "o", "l2": 1e-4, "names": ["a", "é"]},
)


@pytest.fixture(autouse=True)
def _fresh_cache(monkeypatch):
    monkeypatch.setattr(run_store, "_CACHE", run_store._ProcessCache())


def other_process():
    """Forget what this process has read, as another process would not know it."""
    run_store._CACHE.sites.clear()


def at(folder, run=1, node=2):
    return SiteStore(str(folder), run, node)


def same(entry):
    assert entry.meta == ENTRY.meta
    assert entry.arrays.keys() == ENTRY.arrays.keys()
    for name, array in ENTRY.arrays.items():
        np.testing.assert_array_equal(entry.arrays[name], array, strict=True)


def test_memory():
    kept = at(run_store.IN_MEMORY)
    kept.save("part-0", ENTRY)
    assert at(run_store.IN_MEMORY).load("part-0") is ENTRY
    kept.drop("part-0")
    with pytest.raises(SiteError, match=r"has lost its state .*start the run again"):
        kept.load("part-0")


def test_runs_and_nodes_are_apart(tmp_path):
    for root in (tmp_path, run_store.IN_MEMORY):
        at(root, run=1, node=2).save("part-0", ENTRY)
        for run, node in ((1, 3), (2, 2)):
            with pytest.raises(SiteError, match="lost its state"):
                at(root, run, node).load("part-0")


def test_files_are_mapped_read_only(tmp_path):
    at(tmp_path).save("part-0", ENTRY)
    other_process()
    entry = at(tmp_path).load("part-0")
    same(entry)
    features = entry.arrays["features"]
    assert isinstance(features, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        features[0, 0] = 5.0
    assert at(tmp_path).load("part-0") is entry


READER = """
import sys
from client_apps.data.run_store import SiteStore
entry = SiteStore(sys.argv[1], 1, 2).load("part-0")
print(float(entry.arrays["features"].sum()), entry.meta["names"][1] == "\\u00e9")
"""


def test_another_process_reads_the_files(tmp_path):
    at(tmp_path).save("part-0", ENTRY)
    answer = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert answer.stdout.split() == ["15.0", "True"]


def test_folder_is_private_and_has_no_leftovers(tmp_path):
    at(tmp_path / "state").save("part-0", ENTRY)
    (folder,) = (tmp_path / "state").iterdir()
    assert folder.name == "1-2"
    assert folder.stat().st_mode & 0o077 == 0
    assert [entry.name for entry in folder.iterdir()] == ["part-0"]


def test_entry_is_replaced_as_a_whole(tmp_path):
    at(tmp_path).save("part-0", ENTRY)
    other_process()
    mapped = at(tmp_path).load("part-0").arrays["features"]
    at(tmp_path).save("part-0", Entry({"new": np.ones(2)}, {}))
    other_process()
    assert at(tmp_path).load("part-0").arrays.keys() == {"new"}
    # what was mapped before stays what it was
    np.testing.assert_array_equal(mapped, ENTRY.arrays["features"])


def test_failed_write_leaves_the_old_entry(tmp_path, monkeypatch):
    at(tmp_path).save("part-0", ENTRY)

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run_store.np, "save", fail)
        match = r"cannot write to the state folder .*1-2: No space left .*state-dir"
        with pytest.raises(SiteError, match=match):
            at(tmp_path).save("part-0", Entry({"new": np.ones(2)}, {}))
    same(at(tmp_path).load("part-0"))
    other_process()
    same(at(tmp_path).load("part-0"))
    assert [entry.name for entry in (tmp_path / "1-2").iterdir()] == ["part-0"]


def test_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SiteError, match=r"cannot write to the state folder .*file/1-2"):
        at(tmp_path / "file").save("part-0", ENTRY)


def damage(path, how):
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:20])
    else:
        path.write_text("{}")


@pytest.mark.parametrize("how", ["missing", "cut", "other"])
@pytest.mark.parametrize("name", ["features.npy", "meta.json"])
def test_damaged_files_are_lost_state(tmp_path, how, name):
    at(tmp_path).save("part-0", ENTRY)
    other_process()
    damage(tmp_path / "1-2" / "part-0" / name, how)
    with pytest.raises(SiteError, match=r"lost its state .*was it restarted\?"):
        at(tmp_path).load("part-0")


def test_nothing_is_unpickled(tmp_path):
    at(tmp_path).save("part-0", ENTRY)
    other_process()
    path = tmp_path / "1-2" / "part-0" / "features.npy"
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(SiteError, match="lost its state"):
        at(tmp_path).load("part-0")
    with pytest.raises(ValueError, match="allow_pickle=False"):
        at(tmp_path).save("part-1", Entry({"a": np.array([{}], dtype=object)}, {}))
    assert not (tmp_path / "1-2" / "part-1").exists()


def test_drop_and_clear(tmp_path):
    kept = at(tmp_path)
    kept.save("extracted-0", ENTRY)
    kept.save("part-0", ENTRY)
    at(tmp_path, node=3).save("part-0", ENTRY)
    kept.drop("extracted-0")
    kept.drop("never-there")
    assert [entry.name for entry in (tmp_path / "1-2").iterdir()] == ["part-0"]
    kept.clear()
    kept.clear()
    assert [entry.name for entry in tmp_path.iterdir()] == ["1-3"]
    with pytest.raises(SiteError, match="lost its state"):
        kept.load("part-0")
    same(at(tmp_path, node=3).load("part-0"))


def test_meta_is_plain_json(tmp_path):
    at(tmp_path).save("part-0", ENTRY)
    document = json.loads((tmp_path / "1-2" / "part-0" / "meta.json").read_text())
    assert document == {"meta": ENTRY.meta, "arrays": ["features", "none", "mask"]}


def test_runs_that_were_killed_are_forgotten(tmp_path):
    killed, slow = (SiteStore(str(tmp_path), run, 2) for run in (1, 3))
    (tmp_path / "models").mkdir()
    for kept in (killed, slow):
        kept.save("keys", Entry({"private": np.zeros(32, np.uint8)}, {}))
    for folder in tmp_path.iterdir():
        os.utime(folder, (0, 0))
    slow.touch()
    assert list(SiteStore(str(tmp_path), 4, 2).forget_stale()) == ["1-2"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3-2", "models"]
    assert not list(SiteStore(":memory:", 4, 2).forget_stale())
    assert not list(SiteStore(str(tmp_path / "none"), 4, 2).forget_stale())
