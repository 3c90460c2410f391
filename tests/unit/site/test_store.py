"""A site's store: in memory, and in files that another process reads."""

import json
import os
import time
from collections import OrderedDict, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from client_apps.data import database, run_store
from client_apps.data.database import FILE
from client_apps.data.run_store import CommittedRound, Entry, SiteStore
from tests.support.peers.faulty_grid import flipped, forget_processes, rows_in
from tp_flower.database import Database
from tp_flower.errors import LostStateError, SettingsError, SiteError
from tp_flower.protocol.packet import Parcel

ENTRY = Entry(
    {
        "features": np.arange(6, dtype=np.float32).reshape(3, 2),
        "none": np.zeros((0, 4)),
        "mask": np.array([True, False]),
    },
    {"table": "o", "l2": 1e-4, "names": ["a", "é"]},
)
ROUND = CommittedRound(3, "d", "h", {(1, "model"): np.arange(9.0)})
REPLY = Parcel(b"{}", b"[]", bytes(range(50)))


@pytest.fixture(autouse=True)
def _fresh_cache(monkeypatch):
    monkeypatch.setattr(run_store, "_CACHE", defaultdict(run_store._OfRun))
    monkeypatch.setattr(database, "_OPEN", OrderedDict())
    monkeypatch.setattr(run_store, "LARGE_BYTES", 20)


def rows_of(folder, columns="name"):
    return rows_in(folder / FILE, f"SELECT {columns} FROM entries ORDER BY id")


def at(folder, run=1, node=2):
    return SiteStore(str(folder), run, node)


def save(site, name="part-0", entry=ENTRY):
    with site.together(bool):
        site.save(name, entry)


def commit(site, committed=ROUND, reply=REPLY):
    with site.together(bool):
        site.commit(committed, reply)


def same(entry):
    assert entry.meta == ENTRY.meta
    assert entry.arrays.keys() == ENTRY.arrays.keys()
    for name, array in ENTRY.arrays.items():
        assert_array_equal(entry.arrays[name], array, strict=True)


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_runs_and_nodes_are_apart(tmp_path, is_on_disk):
    root = tmp_path if is_on_disk else run_store.IN_MEMORY
    site = at(root)
    other = at(root, node=3)
    for store in (site, other):
        save(store)
        save(store, "extracted-0")
    assert is_on_disk or at(root).load("part-0") is ENTRY
    with pytest.raises(SiteError, match="lost its state"):
        at(root, run=2).load("part-0")
    with site.together(bool):
        site.drop("extracted-0")
        site.drop("never-there")
        assert site.names() == ["part-0"]
        site.drop("part-0")
    site.sweep()
    assert list(tmp_path.glob("1-2/*")) == []
    with pytest.raises(SiteError, match=r"has lost its state .*start the run again"):
        site.load("part-0")
    same(other.load("part-0"))


def test_files_are_mapped_read_only(tmp_path):
    save(at(tmp_path))
    forget_processes()
    entry = at(tmp_path).load("part-0")
    same(entry)
    mapped = entry.arrays["features"]
    assert isinstance(mapped, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        mapped[0, 0] = 5.0
    assert at(tmp_path).load("part-0") is entry
    # an entry is replaced as a whole; what was mapped before stays what it was
    save(at(tmp_path), entry=Entry({"new": np.ones(2)}, {}))
    forget_processes()
    assert at(tmp_path).load("part-0").arrays.keys() == {"new"}
    assert_array_equal(mapped, ENTRY.arrays["features"])


def test_folder_is_private_and_has_no_leftovers(tmp_path):
    root = tmp_path / "state"
    save(at(root))
    (large,) = (root / "1-2").iterdir()
    for path in (root, *root.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0
    assert large.name.startswith("part-0-features-")
    ((name, meta, layout),) = rows_of(root, "name, meta, layout")
    assert name == "part-0"
    assert json.loads(meta) == ENTRY.meta
    assert [array[0] for array in json.loads(layout)] == ["features", "none", "mask"]


def test_only_the_user_may_open_the_database_and_have_made_it(tmp_path, monkeypatch):
    def refuses(match):
        forget_processes()
        with pytest.raises(SettingsError, match=rf"site\.db {match}"):
            at(tmp_path).names()

    save(at(tmp_path))
    path = tmp_path / FILE
    for mode in (0o640, 0o604, 0o620, 0o602):
        path.chmod(mode)
        refuses(rf"may be read or changed by others .*\(mode {mode:04o}\): chmod")
    path.chmod(0o600)
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 4242)
        refuses("belongs to another user")
    path.rename(tmp_path / "file")
    path.symlink_to(tmp_path / "file")
    refuses("is not a regular file")
    with pytest.raises(SiteError, match=r"cannot write to the state .*file/state"):
        at(tmp_path / "file" / "state").names()


@pytest.mark.parametrize(
    "name", ["privacy/ledger.jsonl", "privacy/labels", "ab-1/state"]
)
def test_a_state_folder_of_version_0_1_0_is_refused_by_name(tmp_path, name):
    root = tmp_path / "state"
    (root / name).parent.mkdir(parents=True)
    (root / name).write_text("")
    match = rf"is from version 0\.1\.0 \({name}\).* move the folder .*new account"
    with pytest.raises(SettingsError, match=match):
        at(root).names()
    assert not (root / FILE).exists()
    # both remedies that the error names
    save(at(tmp_path / "another"))
    root.rename(tmp_path / "away")
    save(at(root))


@pytest.mark.parametrize("where", ["large", "small"])
def test_failed_write_leaves_the_old_entry(tmp_path, monkeypatch, where):
    save(at(tmp_path))
    fail = Mock(side_effect=OSError(28, "No space left on device"))
    with monkeypatch.context() as patch:
        if where == "large":
            patch.setattr(run_store.np, "save", fail)
        else:
            patch.setattr(Database, "_current_connection", fail)
        match = r"cannot write to the state folder .*: No space left .*state-dir"
        site = at(tmp_path)
        with pytest.raises(SiteError, match=match), site.together(lambda _: False):
            site.save("part-0", Entry({"new": np.ones(20)}, {}))
    same(at(tmp_path).load("part-0"))
    forget_processes()
    same(at(tmp_path).load("part-0"))
    assert len(list((tmp_path / "1-2").iterdir())) == 1


def move_away(path):
    """A file is looked for in the folder of the run alone."""
    folder = path.parent.parent
    path.rename(folder / path.name)
    ((layout,),) = rows_of(folder, "layout")
    place = layout.replace(path.name, f"../{path.name}")
    rows_in(folder / FILE, "UPDATE entries SET layout = ?", place)


PICKLED = np.array([{"a": 1}], dtype=object)
DAMAGES = {
    "missing": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:20]),
    "other": lambda path: np.save(path, np.zeros((3, 3))),
    "pickle": lambda path: np.save(path, PICKLED, allow_pickle=True),
    "elsewhere": move_away,
}


@pytest.mark.parametrize("how", [*DAMAGES, "meta", "layout", "data", "checksum"])
def test_damaged_entries_are_lost_state(tmp_path, how):
    """Another process's file, or a column of its row."""
    save(at(tmp_path))
    forget_processes()
    (path,) = (tmp_path / "1-2").iterdir()
    if how in DAMAGES:
        DAMAGES[how](path)
    else:
        rows_in(tmp_path / FILE, f"UPDATE entries SET {how} = substr({how}, 2)")
    with pytest.raises(SiteError, match=r"lost its state .*was it restarted\?"):
        at(tmp_path).load("part-0")


def test_nothing_is_pickled(tmp_path):
    for count in (1, 9):
        objects = np.array([{}] * count, dtype=object)
        with pytest.raises(ValueError, match="allow_pickle=False"):
            save(at(tmp_path), "part-1", Entry({"a": objects}, {}))
    assert not at(tmp_path).has("part-1")


def test_a_folder_that_others_remove_meanwhile_is_made_again(tmp_path, monkeypatch):
    made = []
    mkdir = os.mkdir

    def removed_at_first(path, mode=0o777):
        made.append(path)
        mkdir(path, mode)
        if len(made) == 2:
            os.rmdir(path)
            raise FileExistsError

    monkeypatch.setattr(os, "mkdir", removed_at_first)
    with at(tmp_path / "state").locked():
        assert (tmp_path / "state" / "1-2").is_dir()


@pytest.mark.parametrize("root", ["file", "memory"])
def test_a_round_is_there_as_a_whole_or_not_at_all(tmp_path, root):
    root = str(tmp_path) if root == "file" else run_store.IN_MEMORY
    for is_killed in (True, False):
        site = at(root)
        with suppress(KeyboardInterrupt), site.together(bool):
            site.save("part-0", ENTRY)
            assert site.names() == ["part-0"]
            same(site.load("part-0"))
            site.labels("x", lambda: np.ones(3))
            site.commit(ROUND, REPLY)
            if is_killed:
                raise KeyboardInterrupt
        if root != run_store.IN_MEMORY:
            forget_processes()
        again = at(root)
        assert again.has("part-0") != is_killed
        assert (again.last() is None) == is_killed
        files = list(tmp_path.glob("1-2/*.npy"))
        assert bool(files) == (root == str(tmp_path) and not is_killed)
    last = again.last()
    assert last.number == 3
    assert last.digest == "d"
    assert last.history == "h"
    assert_array_equal(last.arrays[1, "model"], np.arange(9.0))
    assert tuple(map(bytes, again.reply())) == REPLY
    assert_array_equal(again.labels("x", lambda: np.zeros(3))[0], np.ones(3))
    same(again.load("part-0"))


def test_arrays_that_a_round_has_replaced_are_removed(tmp_path):
    for number in range(3):
        site = at(tmp_path)
        commit(site, replace(ROUND, number=number))
        site.sweep()
        # the state's and the reply's
        assert len(list(tmp_path.glob("1-2/*.npy"))) == 2
        with site.locked():
            assert site.last().number == number
    (tmp_path / "1-2" / "of-a-killed-process.npy").touch()
    commit(site, CommittedRound(4, "d", "h", is_over=True), Parcel(b"", b"", b""))
    site.sweep()
    with site.locked():
        pass
    assert not (tmp_path / "1-2").exists()


@pytest.mark.parametrize("name", [".round", ".reply"])
@pytest.mark.parametrize("where", ["row", "file"])
def test_a_damaged_round_is_not_gone_on_with(tmp_path, name, where):
    commit(at(tmp_path))
    forget_processes()
    if where == "row":
        damage = "UPDATE entries SET meta = meta || ' ' WHERE name = ?"
        rows_in(tmp_path / FILE, damage, name)
    else:
        (path,) = (tmp_path / "1-2").glob(f"{name}-*")
        path.write_bytes(flipped(path.read_bytes()[:-1]) + b"x")
    if name == ".round":
        assert at(tmp_path).last() is None
    else:
        assert at(tmp_path).last().number == 3
        with pytest.raises(LostStateError, match="reply of the last round is damaged"):
            at(tmp_path).reply()


def test_runs_that_were_killed_are_forgotten(tmp_path):
    killed = at(tmp_path, 1)
    slow = at(tmp_path, 3)
    (tmp_path / "models").mkdir()
    for site in (killed, slow):
        save(site, "keys", Entry({"private": np.zeros(32, np.uint8)}, {}))
    (tmp_path / "5-2").mkdir()
    for folder in tmp_path.iterdir():
        os.utime(folder, (0, 0))
    rows_in(tmp_path / FILE, "UPDATE entries SET touched = 0")
    slow.touch()
    current = at(tmp_path, 4)
    with current.together(bool):
        assert list(current.forget_stale()) == ["1-2", "5-2"]
    folders = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert folders == {"3-2", "models"}
    assert rows_of(tmp_path, "run") == [("3-2",)]
    for root in (run_store.IN_MEMORY, tmp_path / "none"):
        assert not list(at(root, 4).forget_stale())


def test_one_thread_at_a_time_reads_the_header_of_an_array(tmp_path, monkeypatch):
    file = tmp_path / "array.npy"
    np.save(file, np.arange(3.0))
    load, inside, together = np.load, [], []

    def watched(*arguments, **options):
        inside.append(1)
        together.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return load(*arguments, **options)

    monkeypatch.setattr(np, "load", watched)
    with ThreadPoolExecutor(4) as threads:
        arrays = list(threads.map(run_store.map_array, [file] * 8))
    assert together == [1] * 8
    for array in arrays:
        assert_array_equal(array, np.arange(3.0))
