"""The ledger adds up what was released, and keeps it whatever happens to the process.

What happens to a process that is killed is in test_ledger_kill.py.
"""

import errno
import fcntl
import json
import multiprocessing
import os
import stat
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from client_apps.data import ledger_snapshot
from client_apps.data.ledger import (
    FILE,
    Budget,
    Ledger,
    Planned,
    Release,
    open_ledger,
)
from client_apps.data.ledger_journal import sealed
from tp_flower.errors import BudgetError, LedgerError, SiteError
from tp_flower.methods import PRV
from tp_flower.privacy.accounting import epsilon
from tp_flower.privacy.mechanisms import Gaussian, PureDp

RUN, NEXT = "1-a", "2-a"
DELTA = 1e-5
STEP = Gaussian(6.0, count=4)
BUDGETS = {"F": Budget(4.4, DELTA)}


def release(what="gradients", mechanism=STEP, source="F", part=1):
    return Release(
        table="flights",
        source=source,
        part=part,
        action="train",
        what=what,
        unit="a row of flights",
        neighbours="the row's features as zeros",
        adversary="server",
        mechanism=mechanism,
        scope="given the messages that the site received",
    )


@pytest.fixture(params=["file", "process"])
def ledger(request, tmp_path):
    return Ledger(tmp_path / FILE if request.param == "file" else None)


@pytest.fixture
def path(tmp_path):
    return tmp_path / FILE


def use(ledger, times, key=0, run=RUN, what="gradients"):
    for _ in range(times):
        ledger.spend(run, [(1, what, key)])


# --- what it adds up to


def test_nothing_is_spent_at_first(ledger):
    assert ledger.spent("F") == []
    assert ledger.total("F", DELTA) == 0.0
    assert ledger.lines(RUN) == []


def test_an_open_reservation_counts_in_full_and_a_closed_one_as_it_was_used(ledger):
    # nine uses of four Gaussians of multiplier 6: mu = 1, epsilon 4.377
    ledger.reserve(RUN, [Planned(release(), limit=9)], BUDGETS)
    assert ledger.total("F", DELTA) == pytest.approx(4.377, abs=5e-4)
    use(ledger, 2, key=0)
    use(ledger, 3, key=1)
    assert ledger.spent("F") == [Gaussian(6.0, 36)]
    ledger.close(RUN)
    assert ledger.spent("F") == [Gaussian(6.0, 12)]
    assert ledger.total("F", DELTA) == epsilon([Gaussian(6.0, 12)], DELTA)


def test_a_reservation_that_was_not_used_is_free_after_the_run(ledger):
    ledger.reserve(RUN, [Planned(release(), 9)], BUDGETS)
    ledger.close(RUN)
    assert ledger.spent("F") == []
    ledger.reserve(NEXT, [Planned(release(), 9)], BUDGETS)


def test_uses_of_one_message_count_each(ledger):
    ledger.reserve(RUN, [Planned(release(), 3)], {})
    ledger.spend(RUN, [(1, "gradients", 7), (1, "gradients", 7), (1, "gradients", 8)])
    with pytest.raises(BudgetError, match="2 are used, asked for is 2 more"):
        ledger.spend(RUN, [(1, "gradients", 7), (1, "gradients", 7)])
    ledger.close(RUN)
    assert ledger.spent("F") == [Gaussian(6.0, 8)]


def test_all_of_a_source_composes_and_sources_are_apart(ledger):
    planned = [
        Planned(release(), 2),
        Planned(release("scores", Gaussian(3.0, sample_rate=0.1)), 5),
        Planned(release(part=2), 3),
        Planned(release(source="P", part=3), 4),
    ]
    ledger.reserve(RUN, planned, {})
    ledger.charge(RUN, release("labels", PureDp(0.5)), {})
    everything = {Gaussian(6.0, 20), Gaussian(3.0, 5, 0.1), PureDp(0.5)}
    assert set(ledger.spent("F")) == everything
    assert ledger.total("F", DELTA, PRV) == epsilon(ledger.spent("F"), DELTA, PRV)
    assert ledger.spent("P") == [Gaussian(6.0, 16)]


def test_runs_add_up(ledger):
    for run in (RUN, NEXT):
        ledger.reserve(run, [Planned(release(), 2)], BUDGETS)
        use(ledger, 1, run=run)
        ledger.close(run)
    assert ledger.spent("F") == [Gaussian(6.0, 8)]


# --- what it refuses


def test_a_plan_over_the_budget_is_refused_as_a_whole(ledger):
    ledger.charge(RUN, release(mechanism=Gaussian(6.0, 9)), BUDGETS)
    before = ledger.lines(RUN)
    over = [Planned(release(source="P", part=2), 1), Planned(release(), 7)]
    text = (
        r"table flights has spent epsilon 1\.993 of 4\.4 \(delta 1e-05\); "
        r"asked for is 3\.787, together 4\.447"
    )
    with pytest.raises(BudgetError, match=text):
        ledger.reserve(RUN, over, BUDGETS)
    assert ledger.lines(RUN) == before
    assert ledger.spent("P") == []
    assert isinstance(BudgetError(), SiteError)


def test_a_plan_that_meets_the_budget_exactly_is_accepted(ledger):
    exact = epsilon([Gaussian(6.0, 36)], DELTA)
    ledger.reserve(RUN, [Planned(release(), 9)], {"F": Budget(exact, DELTA)})
    with pytest.raises(BudgetError, match="table flights has spent"):
        ledger.charge(RUN, release("x", PureDp(1e-6)), {"F": Budget(exact, DELTA)})


def test_no_noise_is_over_every_budget(ledger):
    free = release(mechanism=Gaussian(0.0))
    with pytest.raises(BudgetError, match="asked for is inf"):
        ledger.charge(RUN, free, BUDGETS)
    ledger.charge(RUN, free, {})
    assert ledger.total("F", DELTA) == np.inf


def test_the_budgets_accountant_decides(ledger):
    sampled = release(mechanism=Gaussian(1.0, 1000, 0.01))
    rdp, prv = (epsilon([sampled.mechanism], DELTA, name) for name in ("rdp", "prv"))
    between = (rdp + prv) / 2
    with pytest.raises(BudgetError, match="asked for"):
        ledger.charge(RUN, sampled, {"F": Budget(between, DELTA)})
    ledger.charge(RUN, sampled, {"F": Budget(between, DELTA, PRV)})


def test_a_release_is_reserved_once(ledger):
    ledger.reserve(RUN, [Planned(release(), 1)], {})
    text = "gradients of part 1 in run 1-a are reserved already"
    with pytest.raises(BudgetError, match=text):
        ledger.reserve(RUN, [Planned(release(), 1)], {})
    ledger.reserve(NEXT, [Planned(release(), 1)], {})
    with pytest.raises(BudgetError, match="gram of part 1 in run 1-a are reserved"):
        ledger.reserve(RUN, [Planned(release("gram"), 1)] * 2, {})


def test_more_uses_than_planned_are_refused(ledger):
    ledger.reserve(RUN, [Planned(release(), 2), Planned(release("gram"), 9)], {})
    use(ledger, 2, key=5)
    text = r"gradients of part 1 in run 1-a are used up: 2 were planned of key 5, 2 are"
    with pytest.raises(BudgetError, match=text):
        ledger.spend(RUN, [(1, "gram", 0), (1, "gradients", 5)])
    ledger.close(RUN)
    # the refused message has not used the other of its releases
    assert ledger.spent("F") == [Gaussian(6.0, 8)]


@pytest.mark.parametrize("name", [(1, "gram"), (2, "gradients")])
def test_what_is_not_reserved_is_not_spent(ledger, name):
    ledger.reserve(RUN, [Planned(release(), 2)], {})
    with pytest.raises(BudgetError, match="are not reserved"):
        ledger.spend(RUN, [(*name, 0)])
    with pytest.raises(BudgetError, match="in run 2-a are not reserved"):
        ledger.spend(NEXT, [(1, "gradients", 0)])


def test_nothing_is_spent_after_the_run(ledger):
    ledger.reserve(RUN, [Planned(release(), 2)], {})
    ledger.close(RUN)
    ledger.close(RUN)
    with pytest.raises(BudgetError, match="are not reserved"):
        use(ledger, 1)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Planned(release(mechanism=None), 1), "a plan needs a mechanism"),
        (lambda: Planned(release(), 0), "limit is 0; it must be at least 1"),
        (lambda: Budget(-1.0, DELTA), "epsilon of a budget is -1.0"),
        (lambda: Budget(np.nan, DELTA), "epsilon of a budget is nan"),
        (lambda: Budget(1.0, 1.0), "delta of a budget is 1.0"),
        (lambda: Ledger(None).charge(RUN, release(mechanism=None), {}), "without a"),
        (lambda: Release.from_json({"mechanism": None}), "not a release"),
    ],
)
def test_what_makes_no_sense_is_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_what_could_not_be_read_back_is_not_written(path):
    ledger = Ledger(path)
    ledger.reserve(RUN, [Planned(release(), 9)], {})
    before = path.read_bytes()
    with pytest.raises(TypeError, match="not plain JSON types"):
        ledger.spend(RUN, [(1, "gradients", (0, 1))])
    with pytest.raises(TypeError, match="not plain JSON types"):
        ledger.charge(RUN, release(part=(1, 2)), {})
    assert path.read_bytes() == before


# --- charges and notes


def test_what_has_an_ident_is_paid_once(ledger):
    labels = release("labels", PureDp(2.0))
    budgets = {"F": Budget(3.0, DELTA), "P": Budget(3.0, DELTA)}
    for run in (RUN, RUN, NEXT):
        ledger.charge(run, labels, budgets, ident="draw 1")
    assert ledger.spent("F") == [PureDp(2.0)]
    with pytest.raises(BudgetError, match="together 4"):
        ledger.charge(RUN, labels, budgets, ident="draw 2")
    for _ in range(2):
        ledger.charge(RUN, release("labels", PureDp(2.0), "P"), budgets, "draw 1")
    assert ledger.spent("P") == [PureDp(2.0)]


def test_without_an_ident_each_charge_counts(ledger):
    for _ in range(3):
        ledger.charge(RUN, release("statistics", PureDp(0.5)), {})
    assert ledger.spent("F") == [PureDp(0.5, 3)]


def test_a_charge_stays_when_its_run_is_closed(ledger):
    ledger.charge(RUN, release("labels", PureDp(0.5)), {})
    ledger.close(RUN)
    assert ledger.spent("F") == [PureDp(0.5)]


def test_what_is_not_covered_is_written_once_in_a_run_and_costs_nothing(ledger):
    scores, keys = release("scores", None), release("keys", None)
    ledger.note(RUN, [scores, keys, scores])
    ledger.note(RUN, [scores])
    ledger.note(NEXT, [scores])
    assert [line["release"]["what"] for line in ledger.lines(RUN)] == ["scores", "keys"]
    assert [line["event"] for line in ledger.lines(NEXT)] == ["note"]
    assert ledger.spent("F") == []


def test_the_lines_of_a_run_tell_what_was_planned_and_used(ledger):
    ledger.reserve(RUN, [Planned(release(), 9)], BUDGETS)
    ledger.reserve(NEXT, [Planned(release(), 1)], {})
    ledger.note(RUN, [release("scores", None)])
    use(ledger, 2, key=0)
    use(ledger, 3, key=1)
    ledger.charge(RUN, release("labels", PureDp(0.5)), {}, "draw")
    ledger.close(RUN)
    planned, noted, charged = ledger.lines(RUN)
    assert planned["release"] == release().to_json()
    assert (planned["limit"], planned["used"]) == (9, 3)
    assert noted["release"]["mechanism"] is None
    assert Release.from_json(charged["release"]) == release("labels", PureDp(0.5))
    events = [line["event"] for line in (planned, noted, charged)]
    assert events == ["reserve", "note", "charge"]
    json.dumps([planned, noted, charged])


# --- the file


def example(path):
    ledger = Ledger(path)
    ledger.reserve(RUN, [Planned(release(), 9), Planned(release("gram"), 1)], {})
    ledger.note(RUN, [release("scores", None), release("keys", None)])
    use(ledger, 2)
    ledger.charge(NEXT, release("labels", PureDp(0.5)), {}, "draw")
    return ledger


def test_only_the_user_may_read_it(path):
    example(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_it_is_kept_for_the_next_process(path):
    first = example(path)
    second = Ledger(path)
    assert second.spent("F") == first.spent("F")
    second.charge(RUN, release("labels", PureDp(0.5)), {}, "draw")
    assert second.spent("F") == first.spent("F")
    use(second, 7)
    with pytest.raises(BudgetError, match="9 were planned of key 0, 9 are used"):
        use(first, 1)


def test_a_process_has_one_ledger_of_a_file(path):
    assert open_ledger(path) is open_ledger(path)
    assert open_ledger(path) is not open_ledger(path.with_name("other.jsonl"))


def test_it_is_only_appended_to_and_each_line_seals_the_one_before(path):
    example(path)
    before = path.read_bytes()
    Ledger(path).close(RUN)
    after = path.read_bytes()
    assert after.startswith(before)
    previous = b"0" * 32
    for number, line in enumerate(after.splitlines(), 1):
        content = json.loads(line)
        assert content["seq"] == number
        found = content.pop("checksum")
        assert sealed(json.dumps(content, separators=(",", ":")), previous) == line
        previous = found.encode()
    assert after.endswith(b"\n")


def spent_in(path):
    return Ledger(path).spent("F")


@pytest.fixture
def quick_disk(monkeypatch):
    """Do not wait for the disk: nobody pulls the plug in these tests."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.usefixtures("quick_disk")
def test_a_line_that_was_torn_at_any_byte_was_not_written(path, tmp_path):
    ledger = example(path)
    before, spent = path.read_bytes(), ledger.spent("F")
    ledger.charge(NEXT, release("statistics", PureDp(0.25)), {})
    line = path.read_bytes()[len(before) :]
    for length in range(len(line) - 1):
        torn = tmp_path / f"torn-{length}" / "ledger.jsonl"
        torn.parent.mkdir()
        torn.write_bytes(before + line[:length])
        again = Ledger(torn)
        assert again.spent("F") == spent
        assert torn.read_bytes() == before
        again.charge(NEXT, release("counts", PureDp(2.0)), {})
        assert set(spent_in(torn)) == {*spent, PureDp(2.0)}


def test_a_whole_line_without_its_end_counts(path):
    ledger = example(path)
    spent, text = ledger.spent("F"), path.read_bytes()
    path.write_bytes(text[:-1])
    assert spent_in(path) == spent
    assert path.read_bytes() == text


@pytest.mark.usefixtures("quick_disk")
def test_no_byte_can_be_changed(path, tmp_path):
    ledger = Ledger(path)
    ledger.reserve(RUN, [Planned(release(), 9)], {})
    use(ledger, 2)
    text = path.read_bytes()
    damaged = tmp_path / "damaged.jsonl"
    for place in range(len(text)):
        changed = bytearray(text)
        changed[place] ^= 1
        damaged.write_bytes(changed)
        with pytest.raises(LedgerError, match="is damaged"):
            spent_in(damaged)
        assert damaged.read_bytes() == changed


def reading(ledger):
    yield lambda: ledger.spent("F")
    yield lambda: ledger.total("F", DELTA)
    yield lambda: ledger.lines(RUN)


def writing(ledger):
    yield lambda: ledger.reserve(RUN, [Planned(release("x"), 1)], {})
    yield lambda: use(ledger, 1)
    yield lambda: ledger.charge(RUN, release(), {})
    yield lambda: ledger.note(RUN, [release("x", None)])
    yield lambda: ledger.close(RUN)


def rearranged(lines):
    yield lines[:1] + lines[2:]
    yield lines[1:]
    yield [lines[1], lines[0], *lines[2:]]
    yield [*lines[:2], *lines[1:]]
    yield [*lines, lines[-1]]
    yield [*lines[:2], b"", *lines[2:]]


def test_no_line_can_be_moved(path):
    example(path)
    lines = path.read_bytes().splitlines()
    for found in rearranged(lines):
        path.write_bytes(b"\n".join(found) + b"\n")
        ledger = Ledger(path)
        for call in (*reading(ledger), *writing(ledger)):
            with pytest.raises(LedgerError, match=r"damaged.*nothing is released"):
                call()


def test_lines_that_a_process_knows_must_stay(path):
    ledger = example(path)
    text = path.read_bytes()
    path.write_bytes(text[: text.rindex(b"\n", 0, -1) + 1])
    with pytest.raises(LedgerError, match="lines that were there are gone"):
        ledger.spent("F")
    path.write_bytes(text.replace(b'"draw"', b'"dram"'))
    fresh = Ledger(path)
    with pytest.raises(LedgerError, match="the checksum of line 6 does not fit"):
        fresh.spent("F")
    path.unlink()
    with pytest.raises(LedgerError, match="cannot be opened"):
        ledger.spent("F")


def test_another_ledger_in_its_place_is_noticed(path, tmp_path):
    ledger = example(path)
    other = Ledger(tmp_path / "other.jsonl")
    for _ in range(20):
        other.charge(RUN, release(), {})
    path.write_bytes((tmp_path / "other.jsonl").read_bytes())
    with pytest.raises(LedgerError, match="lines that were there are gone"):
        ledger.spent("F")


def test_lines_of_another_version_are_not_guessed_at(path):
    path.parent.mkdir()
    line = {"seq": 1, "time": "", "event": "refund", "run": RUN}
    path.write_bytes(sealed(json.dumps(line)) + b"\n")
    with pytest.raises(LedgerError, match=r"line 1 .* \(ValueError: 'refund' is no"):
        spent_in(path)


# --- the disk


def failing(name, after=0, code=errno.ENOSPC):
    """Return a function that does as ``os.<name>`` does until it fails."""
    real, calls = getattr(os, name), iter(range(1000))

    def function(*arguments):
        if next(calls) >= after:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    return function


def half_a_write(descriptor, data, write=os.write):
    if len(data) < 10:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(descriptor, bytes(data[: len(data) // 2]))


def refused_everything(ledger):
    for call in writing(ledger):
        with pytest.raises(LedgerError, match=r"No space left.*nothing is released"):
            call()


@pytest.mark.parametrize("cannot_truncate", [False, True])
def test_what_cannot_be_written_is_not_released(path, monkeypatch, cannot_truncate):
    ledger = example(path)
    spent, text = ledger.spent("F"), path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", half_a_write)
        if cannot_truncate:
            patched.setattr(os, "ftruncate", failing("ftruncate"))
        refused_everything(ledger)
    assert ledger.spent("F") == spent_in(path) == spent
    assert path.read_bytes() == text
    use(ledger, 7)


def test_what_is_not_on_the_disk_is_not_released(path, monkeypatch):
    ledger = example(path)
    spent = ledger.spent("F")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing("fsync"))
        refused_everything(ledger)
    assert ledger.spent("F") == spent_in(path) == spent


def test_a_first_line_is_there_only_with_its_folders(path, monkeypatch):
    # the file, its folder, and the folder's folder
    for synced in range(3):
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", failing("fsync", after=synced))
            with pytest.raises(LedgerError, match="cannot be written"):
                Ledger(path).charge(RUN, release(), {})
        assert spent_in(path) == []


def test_what_another_has_written_counts_when_the_disk_has_it(path, monkeypatch):
    example(path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing("fsync"))
        with pytest.raises(LedgerError, match="cannot be read"):
            Ledger(path).charge(NEXT, release("labels", PureDp(0.5)), {}, "draw")


def test_a_file_that_cannot_be_locked_is_not_used(path, monkeypatch):
    ledger = example(path)
    monkeypatch.setattr(fcntl, "flock", failing("fsync", code=errno.ENOLCK))
    with pytest.raises(LedgerError, match=r"cannot be locked: No locks available"):
        ledger.spent("F")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    ledger = Ledger(tmp_path / "file" / FILE)
    with pytest.raises(LedgerError, match=r"file.*ledger.jsonl cannot be opened"):
        ledger.spent("F")


# --- the snapshot


def long_example(path):
    rng = np.random.default_rng(0)
    ledger = Ledger(path)
    for run in map(str, range(6)):
        planned = [Planned(release(part=part), 30) for part in range(3)]
        ledger.reserve(run, planned, {})
        ledger.charge(run, release("labels", PureDp(0.5)), {}, f"draw {int(run) // 2}")
        ledger.note(run, [release("scores", None)])
        for _ in range(60):
            ledger.spend(run, [(int(rng.integers(3)), "gradients", 0)])
        if rng.random() < 0.7:
            ledger.close(run)
    return ledger


def test_a_snapshot_changes_nothing(path, monkeypatch):
    monkeypatch.setattr(ledger_snapshot, "EVERY", 50)
    ledger = long_example(path)
    kept = path.with_suffix(".snapshot")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    _, position = ledger_snapshot.load(kept)
    assert 50 < position.seq < path.read_bytes().count(b"\n")
    quick = Ledger(path)
    found = quick.spent("F")
    kept.write_bytes(kept.read_bytes().replace(b'"seq":', b'"seq":1'))
    slow = Ledger(path)
    assert found == slow.spent("F") == ledger.spent("F")
    states = [each._state.to_json() for each in (quick, slow, ledger)]
    assert states[0] == states[1] == states[2]
    assert quick.lines("1") == slow.lines("1") != []
    quick.charge("again", release("labels", PureDp(0.5)), {}, "draw 0")
    assert quick.spent("F") == found


def test_a_process_reads_what_is_new_since_the_snapshot(path, monkeypatch):
    monkeypatch.setattr(ledger_snapshot, "EVERY", 50)
    long_example(path)
    _, position = ledger_snapshot.load(path.with_suffix(".snapshot"))
    seen = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda *a: seen.append(a[2]) or real(*a))
    spent_in(path)
    assert min(seen) > position.offset - 100


def test_a_snapshot_that_cannot_be_written_is_done_without(path, monkeypatch):
    monkeypatch.setattr(ledger_snapshot, "EVERY", 1)
    path.with_suffix(".new").mkdir(parents=True)
    ledger = example(path)
    assert not path.with_suffix(".snapshot").exists()
    assert spent_in(path) == ledger.spent("F")


def test_a_ledger_that_is_older_than_its_snapshot_is_refused(path, monkeypatch):
    monkeypatch.setattr(ledger_snapshot, "EVERY", 1)
    ledger = example(path)
    backup = path.read_bytes()
    use(ledger, 1)
    path.write_bytes(backup)
    with pytest.raises(LedgerError, match="lines that were there are gone"):
        spent_in(path)
    path.unlink()
    with pytest.raises(LedgerError, match="cannot be opened"):
        spent_in(path)


# --- many at once


def spend_all(path, key, times):
    ledger = Ledger(path)
    paid = 0
    for _ in range(times):
        try:
            ledger.spend(RUN, [(1, "gradients", key)])
            paid += 1
        except BudgetError:
            pass
    return paid


def test_processes_take_turns(path, monkeypatch):
    monkeypatch.setattr(ledger_snapshot, "EVERY", 7)
    Ledger(path).reserve(RUN, [Planned(release(), 50)], {})
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        jobs = [(path, 0, 20)] * 4
        paid = pool.starmap(spend_all, jobs)
    assert sum(paid) == 50
    ledger = Ledger(path)
    assert ledger.lines(RUN)[0]["used"] == 50
    ledger.close(RUN)
    assert ledger.spent("F") == [Gaussian(6.0, 200)]


@pytest.mark.parametrize("is_shared", [True, False])
def test_threads_take_turns(path, is_shared):
    shared = Ledger(path)
    shared.reserve(RUN, [Planned(release(), 50)], {})

    def work(_):
        ledger = shared if is_shared else Ledger(path)
        for _ in range(10):
            ledger.spend(RUN, [(1, "gradients", 0)])

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(work, range(5)))
    assert Ledger(path).lines(RUN)[0]["used"] == 50


def test_two_runs_cannot_both_take_the_rest_of_a_budget(path):
    def ask(run):
        try:
            Ledger(path).reserve(run, [Planned(release(), 6)], BUDGETS)
        except BudgetError:
            return 0
        return 1

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(ask, map(str, range(8)))) == 1
