"""The file beside a site's database notices that somebody has taken the database back.

What becomes of a run whose files are removed is in tests/faults/test_lost_files.py.
"""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from client_apps.app import app
from client_apps.commands import begin_anew
from client_apps.data.counter import COUNTER_FILE, Mark, confirm
from client_apps.data.database import FILE, START, Changes, open_database
from client_apps.data.ledger import Ledger
from client_apps.data.run_store import Entry, SiteStore
from strategies.run.grid import InProcessGrid
from tests.support.examples.planned import release
from tests.support.federated import store, store_sql, train, write_site
from tests.support.peers.faulty_grid import forget_processes, rows_in
from tp_flower.errors import LedgerError, MaskError, SettingsError, SiteError
from tp_flower.reports.records import report_dict

DELTA = 1e-5
EMPTIED = ("DELETE FROM ledger", f"UPDATE counter SET seq = 0, checksum = '{START}'")
CUT_OFF = (
    "DELETE FROM ledger WHERE seq = 3",
    (
        "UPDATE counter SET (seq, checksum) = (SELECT seq, checksum FROM ledger WHERE "
        "seq = 2)"
    ),
)


@pytest.fixture
def root(tmp_path):
    """The state folder of a site that has three lines."""
    folder = str(tmp_path / "state")
    confirm(folder)
    for number in range(3):
        spend(folder, f"m{number}")
    forget_processes()
    return folder


def spend(folder, what):
    """Charge one release, as a message does, and count it."""
    changes = Changes(open_database(folder), is_durable=True)
    with changes.together(lambda _: False):
        changes.add(lambda: Ledger(folder).charge("1-a", release(what), {}))
    return confirm(folder)


def spent(folder):
    forget_processes()
    return Ledger(folder).total("F", DELTA)


def copy_of(folder):
    """The database as it is."""
    forget_processes()
    return Path(folder, FILE).read_bytes()


def put_back(folder, copy):
    """Put an older copy in the database's place."""
    forget_processes()
    Path(folder, FILE).write_bytes(copy)


def stored(folder):
    return Mark.of_text(Path(folder, COUNTER_FILE).read_bytes())


@pytest.mark.parametrize("theft", [EMPTIED, CUT_OFF])
def test_lines_that_a_thief_removes_are_missed(root, theft, monkeypatch):
    before = spent(root)
    forget_processes()
    for query in theft:
        rows_in(Path(root, FILE), query)
    for call in (
        lambda: spent(root),
        lambda: confirm(root),
        lambda: spend(root, "more"),
    ):
        with pytest.raises(LedgerError, match=f"{FILE} is behind {COUNTER_FILE}"):
            call()
    # by the chain alone, the rest is whole, and the sum is too small
    monkeypatch.setattr("client_apps.data.counter.check", lambda *_: None)
    assert spent(root) < before
    assert theft is CUT_OFF or not spent(root)


def test_a_database_of_an_older_copy_is_behind(root):
    copy = copy_of(root)
    spend(root, "more")
    put_back(root, copy)
    with pytest.raises(
        LedgerError, match=f"behind {COUNTER_FILE}.*older copy.*--begin-anew"
    ):
        spent(root)
    # as many changes of another kind do not make up for it
    database = open_database(root)
    database.write("UPDATE counter SET changes = changes + 9")
    with pytest.raises(LedgerError, match="behind"):
        confirm(root)


def test_what_masks_have_hidden_counts_without_a_line_of_the_ledger(root):
    """A round of training writes none."""
    copy = copy_of(root)
    run = SiteStore(root, "ab", "0", is_durable=True)
    before = confirm(root)
    with run.together(lambda _: False):
        run.record_masked(0, "scores 1", b"words")
    after = confirm(root)
    assert after.changes == before.changes + 1
    assert after.seq == before.seq
    with pytest.raises(
        MaskError, match="the masks of scores 1 have hidden other numbers"
    ):
        run.record_masked(0, "scores 1", b"other words")
    run.record_masked(0, "scores 1", b"words")
    run.record_masked(1, "scores 1", b"other words")
    put_back(root, copy)
    with pytest.raises(LedgerError, match="behind"):
        confirm(root)


@pytest.mark.parametrize("content", [None, b"", b"x" * 75, b"0 0 0\n"])
def test_a_file_that_is_missing_or_damaged_stops_all_and_an_older_one_does_not(
    root, content
):
    path = Path(root, COUNTER_FILE)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    for call in (spent, confirm):
        with pytest.raises(
            LedgerError, match=f"{COUNTER_FILE}, .* is missing or damaged.*older"
        ):
            call(root)
    path.write_bytes(Mark(1, 0, START).text())
    assert spent(root) > 0
    assert confirm(root) == stored(root) == Mark(3, 3, confirm(root).checksum)


def test_a_link_in_its_place_is_not_followed(root, tmp_path):
    path = Path(root, COUNTER_FILE)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SiteError, match="cannot write to the state folder"):
        confirm(root)


def test_whoever_was_killed_before_the_file_was_written_is_not_behind(
    root, monkeypatch
):
    class KilledError(BaseException):
        pass

    def killed(*_):
        raise KilledError

    before = stored(root)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", killed)
        with pytest.raises(KilledError):
            spend(root, "more")
    assert stored(root) == before
    assert spent(root) > 0
    assert confirm(root) == stored(root)
    assert stored(root).changes == before.changes + 1


def test_threads_never_take_the_file_back(root):
    with ThreadPoolExecutor(4) as pool:
        marks = list(pool.map(lambda number: spend(root, f"t{number}"), range(20)))
    assert stored(root) == max(marks) == confirm(root)
    assert stored(root)[:2] == (23, 23)


def test_a_new_account_goes_on_where_the_file_is_and_ends_the_runs_in_flight(
    root, tmp_path
):
    run = SiteStore(root, "ab", "0", is_durable=True)
    with run.together(lambda _: False):
        run.save("secret", Entry({}, {}))
        run.record_masked(0, "scores 1", b"words")
        run.labels("drawn", store()["orders"]["qty"].to_numpy)
    confirm(root)
    copy = copy_of(root)
    newest = spend(root, "more")
    put_back(root, copy)
    begin_anew(root, tmp_path / "lines.jsonl")
    assert spent(root) == 0.0
    assert confirm(root) == stored(root) == Mark(newest.changes + 1, 0, START)
    assert rows_in(Path(root, FILE), "SELECT run, name FROM entries") == [
        ("labels", "drawn")
    ]
    assert not rows_in(Path(root, FILE), "SELECT * FROM masked")
    assert len((tmp_path / "lines.jsonl").read_text().splitlines()) == 3
    # the old database does not come back
    put_back(root, copy)
    with pytest.raises(LedgerError, match="behind"):
        spent(root)


def test_who_takes_back_both_files_is_noticed_by_what_others_remember(tmp_path):
    """The limit that docs/reference/policies.md states."""
    path = write_site(tmp_path / "shop", store())
    state = tmp_path / "state"

    def run():
        with closing(InProcessGrid(app, {"shop": path})) as grid:
            (context,) = grid.contexts.values()
            context.node_config["state-dir"] = str(state)
            report = report_dict(train(grid, store_sql("squared"), num_epochs=1).report)
        forget_processes()
        return report["ledger-ends"]

    def checksums():
        return {json.loads(line)["checksum"] for line in Ledger(str(state)).export()}

    first = run()
    shutil.copytree(state, tmp_path / "copy")
    second = run()
    assert first.keys() == second.keys() == {"shop"}
    assert first != second
    assert {*first.values(), *second.values()} <= checksums()
    forget_processes()
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "copy", state)
    Ledger(str(state)).spent("F")
    assert set(first.values()) <= checksums()
    assert not set(second.values()) & checksums()


def test_a_simulation_counts_nothing(tmp_path):
    with closing(InProcessGrid(app, [store()], state=tmp_path)) as grid:
        report = report_dict(train(grid, store_sql("squared"), num_epochs=1).report)
    assert report["ledger-ends"] == {}
    assert not list(tmp_path.rglob(COUNTER_FILE))


def test_a_checksum_does_not_tell_its_line(tmp_path):
    """A server that knows the line before, and guesses the next, cannot try it out."""
    ends = set()
    for name in "ab":
        folder = str(tmp_path / name)
        confirm(folder)
        ends.add(spend(folder, "x").checksum)
    assert len(ends) == 2


def test_a_database_of_another_version_is_refused_until_its_folder_is_moved_away(root):
    """A new one beside the old counter would be behind it."""
    rows_in(Path(root, FILE), "PRAGMA user_version = 9")
    match = (
        "has version 9, expected 3: use the version .* that wrote it, or move its "
        "folder away"
    )
    with pytest.raises(SettingsError, match=match):
        confirm(root)
    Path(root).rename(f"{root}-away")
    forget_processes()
    confirm(root)
    assert spend(root, "more").seq == 1
