"""A run whose server stops goes on from its journal, with the same iterates."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from strategies import STRATEGIES
from strategies.run.journal import FILE, FOLDER, LARGE_BYTES, Frame, Journal
from strategies.run.resume import resume_settings
from tests.support.examples.killed_servers import (
    SETTINGS,
    killed,
    sites_of,
    strategy_in,
)
from tests.support.examples.store_runs import assert_same_models
from tests.support.federated import LocalGrid
from tp_flower.errors import MissingSiteError, SchemaError, SettingsError
from tp_flower.protocol.packet import Parcel
from tp_flower.query import Query
from tp_flower.settings import Settings

REPLY = {7: Parcel(b"{}", b"[]", bytes(range(64)))}


def again(folder: Path, name: str = "admm", **settings: object):
    """The strategy with which a run of a folder goes on."""
    return strategy_in(folder, name, resume=str(folder), **settings)


def append(journal: Journal, number: int) -> None:
    journal.append(Frame({"number": number}, REPLY))


# every method, with a server that is killed at every action, is in test_faults.py
@pytest.mark.cases("cg-settings2", "sgd-settings1")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("admm", {}),
        ("sgd", {"batch_size": 30}),
        ("cg", {"validation_fraction": 0.3, "patience": 2, "num_epochs": 20}),
    ],
)
def test_a_run_whose_server_was_killed_ends_as_one_that_was_not(
    tmp_path, name, settings
):
    grid = LocalGrid(sites_of(True), state=tmp_path / "whole")
    uninterrupted = strategy_in(tmp_path / "run", name, **settings)
    uninterrupted.start(grid)
    phases = [report.phase for report in uninterrupted.history]
    # while keys are agreed, in training, and when all is done but for the reply
    for at in (2, -(len(phases) - 3), len(phases)):
        place = tmp_path / str(at)
        grid = killed(place, name, True, at, **settings)
        resumed_run = again(place, name, **settings)
        resumed_run.start(grid)
        assert [report.phase for report in resumed_run.history] == phases
        assert resumed_run.report.final_test == uninterrupted.report.final_test
        assert_same_models(place / "sites", tmp_path / "whole")


def change(folder: Path, statement: str, *values: object) -> None:
    """Have another program write to a journal."""
    with closing(sqlite3.connect(folder / FILE)) as connection, connection:
        connection.execute(statement, values)


def numbers(journal: Journal) -> list[int]:
    return [frame.facts["number"] for frame in journal.frames()]


def test_what_was_written_in_part_is_not_there(tmp_path):
    """Whatever of its log a server has written that was killed."""
    journal = Journal.begin(tmp_path / "a", {})
    log = tmp_path / "a" / f"{FILE}-wal"
    append(journal, 1)
    begun = log.stat().st_size
    append(journal, 2)
    content = log.read_bytes()
    database = (tmp_path / "a" / FILE).read_bytes()
    journal.close()
    for length in (*range(begun, len(content), 211), len(content) - 1, len(content)):
        torn = tmp_path / str(length)
        torn.mkdir()
        (torn / FILE).touch(0o600)
        (torn / FILE).write_bytes(database)
        (torn / f"{FILE}-wal").write_bytes(content[:length])
        journal = Journal(torn)
        before = [1, 2] if length == len(content) else [1]
        assert numbers(journal) == before
        append(journal, 3)
        assert numbers(journal) == [*before, 3]
        journal.close()


def test_large_payloads_lie_in_files_that_are_swept(tmp_path):
    large = Parcel(b"{}", b"[]", bytes(LARGE_BYTES))
    small = Parcel(b"{}", b"[]", b"x")
    journal = Journal.begin(tmp_path, {"run": "a"})
    journal.append(Frame({"number": 1}, {2**64 - 1: large, 8: small}))
    (file,) = tmp_path.glob("*.payload")
    (tmp_path / "of-a-killed-process.payload").write_bytes(b"")
    journal.close()
    journal = Journal(tmp_path)
    assert list(tmp_path.glob("*.payload")) == [file]
    (frame,) = journal.frames()
    assert frame.parcels == {2**64 - 1: large, 8: small}
    assert file.stat().st_mode & 0o077 == 0
    file.unlink()
    assert list(journal.frames()) == []
    journal.close()


def test_without_the_messages_in_flight_they_are_made_again(tmp_path):
    grid = killed(tmp_path, "admm", True, 7)
    change(tmp_path / FOLDER, "DELETE FROM frames WHERE id = 0")
    strategy = again(tmp_path)
    strategy.start(grid)
    assert strategy.is_finished


def test_the_settings_of_a_run_that_goes_on_are_its_own(tmp_path):
    killed(tmp_path, "admm", False, 5, l2=0.25)
    own = resume_settings(Settings(resume=str(tmp_path), site_timeout=7.0))
    assert (own.l2, own.num_epochs, own.site_timeout) == (0.25, 3, 7.0)
    assert own.output_dir == str(tmp_path)
    with pytest.raises(SettingsError, match=r"began with: seed: 0, not 3\. Only"):
        resume_settings(Settings(resume=str(tmp_path), seed=3))
    with pytest.raises(SettingsError, match=r"there is no run 'nowhere' here or in"):
        resume_settings(Settings(resume="nowhere"))
    with pytest.raises(SettingsError, match=r"began with: l2: 0\.25, not 0\.0001"):
        again(tmp_path).start(LocalGrid(sites_of(False)))


def test_a_run_of_a_file_of_tables_goes_on_with_that_file(tmp_path):
    killed(tmp_path, "admm", False, 5, tables="tables.toml")
    match = (
        "began with tables='tables.toml': set it again, because simulated sites read it"
    )
    with pytest.raises(SettingsError, match=match):
        resume_settings(Settings(resume=str(tmp_path)))
    settings = resume_settings(Settings(resume=str(tmp_path), tables="tables.toml"))
    assert (settings.tables, settings.num_epochs) == ("tables.toml", 3)


def test_a_run_goes_on_with_the_version_that_it_began_with(tmp_path, monkeypatch):
    grid = killed(tmp_path, "admm", False, 7)
    frames = Journal.frames

    def others(journal):
        for frame in frames(journal):
            yield replace(frame, facts={**frame.facts, "action": "query.other"})

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "frames", others)
        match = (
            "this version does not send .*: resume with the version that the run began "
            "with"
        )
        with pytest.raises(SettingsError, match=match):
            again(tmp_path).start(grid)
    strategy = again(tmp_path)
    strategy.start(grid)
    assert strategy.is_finished


def test_a_run_goes_on_with_its_own_query_and_sites_alone(tmp_path):
    grid = killed(tmp_path, "admm", False, 5)
    other = Query.from_sql("SELECT o.qty AS label, o.day FROM orders o")
    own = {**SETTINGS, "output_dir": str(tmp_path), "resume": str(tmp_path)}
    with pytest.raises(SettingsError, match="has another query"):
        STRATEGIES["admm"](other, **own).start(grid)
    fewer = {k: v for k, v in sites_of(False).items() if k != "items"}
    grid = LocalGrid(fewer, state=tmp_path / "sites")
    with pytest.raises((MissingSiteError, SchemaError), match="items"):
        again(tmp_path, wait_seconds=0.1).start(grid)


def test_a_folder_with_a_stopped_run_takes_no_other(tmp_path):
    grid = killed(tmp_path, "admm", False, 5)
    with pytest.raises(SettingsError, match="has the checkpoint of a run that stopped"):
        strategy_in(tmp_path, "admm").start(grid)


@pytest.mark.parametrize("column", ["payload", "header", "layout"])
def test_a_damaged_round_and_those_after_it_are_forgotten(tmp_path, column):
    journal = Journal.begin(tmp_path, {})
    for number in (1, 2, 3):
        append(journal, number)
    journal.close()
    change(tmp_path, f"UPDATE parcels SET {column} = x'00' WHERE frame = 2")
    journal = Journal(tmp_path)
    assert numbers(journal) == [1]
    append(journal, 4)
    assert numbers(journal) == [1, 4]
    journal.close()
    change(tmp_path, "UPDATE frames SET facts = '{\"number\": 5}' WHERE id = 1")
    journal = Journal(tmp_path)
    assert list(journal.frames()) == []
    journal.close()


def test_one_process_at_a_time_goes_on_with_a_run(tmp_path):
    grid = killed(tmp_path, "admm", False, 5)
    journal = Journal(tmp_path / FOLDER)
    with pytest.raises(SettingsError, match="another process goes on with the run"):
        again(tmp_path).start(grid)
    journal.close()
