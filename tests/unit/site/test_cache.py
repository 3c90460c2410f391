"""The site's cache of folders: made once, whole, private, and only as large as told."""

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from client_apps.data import cache as cache_module
from client_apps.data.cache import ENTRY_FILE, ONCE, Cache, entry_name
from tests.support.files import ROOT

LIMIT = 10_000


def make(made: list | None = None):
    """Fill an entry with one file."""

    def fill(folder: Path) -> None:
        if made is not None:
            made.append(folder)
        (folder / "data.bin").write_text("x" * 1_000)

    return fill


def entries(folder: Path) -> set[str]:
    names = {path.name for path in (folder / "cache").iterdir()}
    return {name for name in names - {"uses"} if name[0] != "."}


@pytest.fixture
def at(tmp_path) -> Callable[..., Cache]:
    """The cache, as a run uses it."""
    return lambda run="1-1", limit=LIMIT: Cache(tmp_path / "cache", run, limit)


def test_made_once_and_private(at, tmp_path):
    os.umask(0o022)
    made = []
    for run in ("1-1", "1-1", "2-1"):
        path = at(run).obtain("a", make(made=made))
        assert (path / "data.bin").read_text() == "x" * 1_000
    assert len(made) == 1
    assert at("3-1").find("a") == path
    assert at().find("b") is None
    for place in (path, *tmp_path.rglob("*")):
        assert place.stat().st_mode & 0o077 == 0, place
    assert path.stat().st_mode & 0o777 == 0o700
    # what is for one run alone goes with it
    used = at()
    used.obtain(f"{ONCE}a", make())
    used.release()
    used.release()
    assert entries(tmp_path) == {"a"}


def test_name_depends_on_every_fact():
    names = [
        entry_name("rows", *facts)
        for facts in (("a", "b"), ("ab",), ("a", "b", None), ({"a": 1},), ({"a": 2},))
    ]
    assert len({*names, entry_name("other", "a", "b")}) == 6
    assert entry_name("rows", {"a": 1, "b": 2}) == entry_name("rows", {"b": 2, "a": 1})


def test_failed_making_leaves_nothing(at, tmp_path):
    def fail(folder: Path) -> None:
        make()(folder)
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        at().obtain("a", fail)
    assert list((tmp_path / "cache").iterdir()) == []
    assert at().find("a") is None


def change_description(entry: Path, **others: object) -> None:
    path = entry / ENTRY_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | others))


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: (entry / "data.bin").write_text("x"),
        lambda entry: (entry / "data.bin").unlink(),
        lambda entry: (entry / ENTRY_FILE).unlink(),
        lambda entry: (entry / ENTRY_FILE).write_text("null"),
        lambda entry: change_description(entry, version=0),
        lambda entry: change_description(entry, sizes={}),
    ],
)
def test_damaged_entry_is_made_again(at, tmp_path, damage):
    made = []
    damage(at().obtain("a", make(made=made)))
    assert at().find("a") is None
    assert entries(tmp_path) == set()
    entry = at().obtain("a", make(made=made))
    assert (entry / "data.bin").read_text() == "x" * 1_000
    assert len(made) == 2


def test_least_recently_used_goes_first(at, tmp_path):
    first = at("1-1", 4_000)
    for name, seconds in (("a", 2_000), ("b", 1_001), ("c", 1_002)):
        os.utime(first.obtain(name, make()) / ENTRY_FILE, (seconds, seconds))
    first.release()
    at("2-1", 4_000).obtain("d", make())
    assert entries(tmp_path) == {"a", "c", "d"}


def test_entries_in_use_stay(at, tmp_path):
    first = at("1-1", 0)
    second = at("2-1", 0)
    first.obtain("a", make())
    second.obtain("b", make())
    second.find("a")
    assert entries(tmp_path) == {"a", "b"}
    first.release()
    assert entries(tmp_path) == {"a", "b"}
    second.release()
    assert entries(tmp_path) == set()


def test_runs_that_crashed_are_forgotten(at, tmp_path, monkeypatch):
    at("1-1", 0).obtain("a", make())
    (tmp_path / "cache" / ".b-leftover").mkdir()
    monkeypatch.setattr(cache_module, "STALE_SECONDS", -1.0)
    time.sleep(0.01)
    at("2-1", 0).shrink()
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == [".lock", "uses"]


WORKER = """
import sys
from pathlib import Path
from client_apps.data.cache import Cache

def fill(folder):
    (folder / "data.bin").write_text("x" * 1000)

for turn in range(20):
    cache = Cache(Path(sys.argv[1]), sys.argv[2], 1500)
    for name in "abc":
        path = cache.obtain(name, fill)
        assert (path / "data.bin").read_text() == "x" * 1000
    cache.release()
print("done")
"""


def test_processes_share_a_cache(tmp_path):
    argv = [sys.executable, "-c", WORKER, str(tmp_path / "cache")]
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    workers = [
        subprocess.Popen([*argv, f"{number}-1"], cwd=ROOT, text=True, **pipes)
        for number in range(3)
    ]
    for worker in workers:
        assert worker.communicate(timeout=300) == ("done\n", "")
    assert len(entries(tmp_path)) <= 1


def test_a_full_disk_takes_what_no_run_uses(at, tmp_path):
    unused = at("1-1").obtain("unused", make())
    at("1-1").release()
    cache = at("2-1")
    used = cache.obtain("used", make())

    def fill(folder):
        if unused.exists() or is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        make()(folder)

    is_full = False
    wanted = cache.obtain("wanted", fill)
    assert entries(tmp_path) == {used.name, wanted.name}
    is_full = True
    with pytest.raises(OSError, match="No space left"):
        cache.obtain("another", fill)
    assert entries(tmp_path) == {used.name, wanted.name}
