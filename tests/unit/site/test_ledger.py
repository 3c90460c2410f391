"""The ledger adds up what was released, and keeps it whatever happens to the process.

What happens to a process that is killed is in test_kills.py.
"""

import json
import multiprocessing
import os
import shutil
import sqlite3
from collections import OrderedDict, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.random import default_rng

from client_apps.data import counter, database
from client_apps.data.database import FILE, Changes, open_database
from client_apps.data.ledger import START, Ledger, RoundLedger, checksum_of, open_ledger
from tests.support.children.ledger_child import spend_all
from tests.support.examples.planned import release
from tests.support.peers.faulty_grid import forget_processes, rows_in
from tp_flower.errors import BudgetError, LedgerError, SettingsError, SiteError
from tp_flower.privacy.accounting import epsilon
from tp_flower.privacy.mechanisms import Budget, Gaussian, PureDp, Release, Reservation

RUN = "1-a"
NEXT = "2-a"
DELTA = 1e-5
BUDGETS = {"F": Budget(4.4, DELTA)}
ADD = "INSERT INTO ledger (seq, checksum, line) VALUES (?, ?, ?)"


@pytest.fixture(autouse=True)
def _fresh_databases(monkeypatch):
    """No test sees the ledger in memory of another one."""
    monkeypatch.setattr(database, "_OPEN", OrderedDict())
    yield
    forget_processes()


@pytest.fixture(params=["file", "process"])
def ledger(request, tmp_path):
    return Ledger(str(tmp_path) if request.param == "file" else ":memory:")


@pytest.fixture
def root(tmp_path):
    return str(tmp_path / "state")


def budget_error(match):
    """Expect a payment to be refused, with such a text."""
    return pytest.raises(BudgetError, match=match)


def ledger_error(match):
    """Expect the ledger to be refused, with such a text."""
    return pytest.raises(LedgerError, match=match)


LABELS = release("labels", PureDp(0.5))
SCORES = release("scores", None)
KEYS = release("keys", None)


def plan(ledger, limit=9, run=RUN, budgets=None, **changes):
    """Reserve so many uses of a release."""
    ledger.reserve(run, [Reservation(release(**changes), limit)], budgets or {})


def use(ledger, times, key=0, run=RUN):
    for _ in range(times):
        ledger.spend(run, [(1, "gradients", key)])


def test_a_reservation_counts_in_full_while_it_is_open_and_then_as_it_was_used(ledger):
    assert ledger.spent("F") == ledger.lines(RUN) == []
    assert ledger.total("F", DELTA) == 0.0
    # nine uses of four Gaussians of multiplier 6: mu = 1, epsilon 4.377
    plan(ledger, budgets=BUDGETS)
    assert ledger.total("F", DELTA) == pytest.approx(4.377, abs=5e-4)
    use(ledger, 2, key=0)
    use(ledger, 3, key=1)
    assert ledger.spent("F") == [Gaussian(6.0, 36)]
    ledger.close(RUN)
    assert ledger.spent("F") == [Gaussian(6.0, 12)]
    assert ledger.total("F", DELTA) == epsilon([Gaussian(6.0, 12)], DELTA)
    # one that was not used is free after its run
    plan(ledger, run=NEXT)
    ledger.close(NEXT)
    assert ledger.spent("F") == [Gaussian(6.0, 12)]
    with budget_error("are not reserved"):
        use(ledger, 1, run=NEXT)


def test_a_message_spends_what_is_reserved_or_nothing(ledger):
    ledger.reserve(
        RUN, [Reservation(release(), 3), Reservation(release("gram"), 9)], {}
    )
    twice = [(1, "gradients", 7)] * 2
    ledger.spend(RUN, [*twice, (1, "gradients", 8)])
    used_up = (
        "gradients of part 1 in run 1-a are used up: of key 7, 3 were planned "
        "and 2 are used; requested: 2 more"
    )
    for run, uses, match in (
        (RUN, twice, used_up),
        (RUN, [(1, "gram", 0), *twice], used_up),
        (RUN, [(1, "gram", 0), (1, "labels", 0)], "in run 1-a are not reserved"),
        (RUN, [(2, "gradients", 0)], "in run 1-a are not reserved"),
        (NEXT, [(1, "gradients", 0)], "in run 2-a are not reserved"),
    ):
        with budget_error(match):
            ledger.spend(run, uses)
    # a release is reserved once in a run
    for what, times in (("gradients", 1), ("moments", 2)):
        match = f"{what} of part 1 in run 1-a are reserved already"
        with budget_error(match):
            ledger.reserve(RUN, [Reservation(release(what), 1)] * times, {})
    ledger.close(RUN)
    # a refused message has not used the other of its releases
    assert ledger.spent("F") == [Gaussian(6.0, 8)]
    plan(ledger, 1, NEXT)


def test_all_of_a_source_composes_and_sources_are_apart(ledger):
    planned = [
        Reservation(release(), 2),
        Reservation(release("scores", Gaussian(3.0, sample_rate=0.1)), 5),
        Reservation(release(part=2), 3),
        Reservation(release(source="P", part=3), 4),
    ]
    ledger.reserve(RUN, planned, {})
    ledger.charge(RUN, LABELS, {})
    assert set(ledger.spent("F")) == {
        Gaussian(6.0, 20),
        Gaussian(3.0, 5, 0.1),
        PureDp(0.5),
    }
    assert ledger.spent("P") == [Gaussian(6.0, 16)]


def test_a_plan_over_the_budget_is_refused_as_a_whole(ledger):
    ledger.charge(RUN, release(mechanism=Gaussian(6.0, 9)), BUDGETS)
    before = ledger.lines(RUN)
    over = [Reservation(release(source="P", part=2), 1), Reservation(release(), 7)]
    text = (
        r"table flights has spent epsilon 1\.993 of 4\.4 \(delta 1e-05\) in covered "
        r"releases; requested: 3\.787, in total 4\.447"
    )
    with budget_error(text):
        ledger.reserve(RUN, over, BUDGETS)
    assert ledger.lines(RUN) == before
    assert ledger.spent("P") == []
    assert isinstance(BudgetError(), SiteError)


def test_a_plan_that_meets_the_budget_exactly_is_accepted_and_nothing_more(ledger):
    exact = {"F": Budget(epsilon([Gaussian(6.0, 36)], DELTA), DELTA)}
    plan(ledger, budgets=exact)
    without_noise = release("x", Gaussian(0.0))
    for more, cost in ((release("x", PureDp(1e-6)), "0"), (without_noise, "inf")):
        with budget_error(f"has spent .* requested: {cost},"):
            ledger.charge(RUN, more, exact)
    ledger.charge(RUN, without_noise, {})
    assert ledger.total("F", DELTA) == np.inf


def test_what_makes_no_sense_or_cannot_be_read_back_is_not_written(root):
    ledger = Ledger(root)
    plan(ledger)
    before = list(ledger.export())
    free = release(mechanism=None)
    for error, match, call in (
        (ValueError, "a plan needs a mechanism", lambda: Reservation(free, 1)),
        (ValueError, "limit is 0; it must be at", lambda: Reservation(release(), 0)),
        (ValueError, "without a", lambda: ledger.charge(RUN, free, {})),
        (TypeError, "plain", lambda: ledger.charge(RUN, release(part=(1, 2)), {})),
        (sqlite3.Error, None, lambda: ledger.spend(RUN, [(1, "gradients", (0, 1))])),
    ):
        with pytest.raises(error, match=match):
            call()
    assert list(ledger.export()) == before


def test_a_charge_with_an_ident_is_paid_once_and_without_one_each_time(ledger):
    labels = release("labels", PureDp(2.0))
    budgets = {"F": Budget(3.0, DELTA), "P": Budget(3.0, DELTA)}
    for run in (RUN, RUN, NEXT):
        ledger.charge(run, labels, budgets, ident="draw 1")
    assert ledger.spent("F") == [PureDp(2.0)]
    with budget_error("in total 4"):
        ledger.charge(RUN, labels, budgets, ident="draw 2")
    for _ in range(2):
        ledger.charge(RUN, release("labels", PureDp(2.0), "P"), budgets, "draw 1")
    assert ledger.spent("P") == [PureDp(2.0)]
    for _ in range(3):
        ledger.charge(RUN, release("statistics", PureDp(0.5), "G"), {})
    ledger.close(RUN)
    assert ledger.spent("G") == [PureDp(0.5, 3)]


def test_the_lines_of_a_run_tell_what_was_planned_used_and_not_covered(ledger):
    plan(ledger, budgets=BUDGETS)
    plan(ledger, 1, NEXT)
    # what is not covered stands there once, and costs nothing
    ledger.note(RUN, [SCORES, KEYS, SCORES])
    ledger.note(RUN, [SCORES])
    ledger.note(NEXT, [SCORES])
    use(ledger, 2, key=0)
    use(ledger, 3, key=1)
    ledger.charge(RUN, LABELS, {}, "draw")
    ledger.close(RUN)
    lines = ledger.lines(RUN)
    events = ["reserve", "note", "note", "charge"]
    assert [line["event"] for line in lines] == events
    releases = map(msgspec.to_builtins, (release(), SCORES, KEYS, LABELS))
    assert [line["release"] for line in lines] == list(releases)
    assert lines[0]["limit"] == 9
    assert lines[0]["used"] == 3
    assert msgspec.convert(lines[-1]["release"], Release) == LABELS
    json.dumps(lines)
    assert [line["event"] for line in ledger.lines(NEXT)] == ["reserve", "note"]
    assert set(ledger.spent("F")) == {Gaussian(6.0, 16), PureDp(0.5)}


def example(root):
    ledger = Ledger(root)
    gram = release("gram")
    ledger.reserve(RUN, [Reservation(release(), 9), Reservation(gram, 1)], {})
    ledger.note(RUN, [SCORES, KEYS])
    use(ledger, 2)
    ledger.charge(NEXT, LABELS, {}, "draw")
    return ledger


def change(root, statement, *values):
    """Have another program write to the database."""
    forget_processes()
    rows_in(Path(root) / FILE, statement, *values)


def spent_in(root):
    return Ledger(str(root)).spent("F")


def rows_of(root):
    return rows_in(
        Path(root) / FILE, "SELECT seq, checksum, line FROM ledger ORDER BY seq"
    )


def test_it_is_kept_for_the_next_process(root):
    first = example(root)
    forget_processes()
    assert open_ledger(root) is open_ledger(root)
    second = Ledger(root)
    assert second.spent("F") == first.spent("F")
    second.charge(RUN, LABELS, {}, "draw")
    assert second.spent("F") == first.spent("F")
    use(second, 7)
    with budget_error("of key 0, 9 were planned and 9 are used"):
        use(first, 1)


def test_each_line_seals_the_one_before_and_all_are_exported_as_text(root):
    ledger = example(root)
    before = rows_of(root)
    ledger.close(RUN)
    rows = rows_of(root)
    assert rows[: len(before)] == before
    previous = START
    exported = list(map(json.loads, ledger.export()))
    for number, (seq, checksum, line) in enumerate(rows, 1):
        assert seq == json.loads(line)["seq"] == number
        assert checksum == checksum_of(line, previous)
        assert exported[number - 1] == {**json.loads(line), "checksum": checksum}
        previous = checksum
    assert [line["event"] for line in exported] == [
        "reserve",
        "reserve",
        "note",
        "note",
        "spend",
        "spend",
        "charge",
        "settle",
        "close",
    ]
    # one that is damaged can be looked at, and begun anew
    change(root, "UPDATE ledger SET line = replace(line, '9', '8')")
    assert len(list(Ledger(root).export())) == len(rows)
    with ledger_error("is damaged"):
        spent_in(root)
    ledger.begin_anew()
    assert ledger.spent("F") == []
    example(root)


def test_a_transaction_that_was_torn_at_any_byte_was_not_written(root, tmp_path):
    """Whatever of the write-ahead log a killed process has written."""
    ledger = example(root)
    spent = set(ledger.spent("F"))
    wal = Path(root) / f"{FILE}-wal"
    before = wal.stat().st_size
    ledger.charge(NEXT, release("statistics", PureDp(0.25)), {})
    text = wal.read_bytes()
    assert before + 4096 < len(text)
    for length in {*range(before, len(text), 97), len(text) - 1, len(text)}:
        torn = tmp_path / f"torn-{length}"
        torn.mkdir()
        shutil.copy(f"{root}/{FILE}", torn)
        (torn / f"{FILE}-wal").write_bytes(text[:length])
        again = Ledger(str(torn))
        expected = spent | ({PureDp(0.25)} if length == len(text) else set())
        assert set(again.spent("F")) == expected
        again.charge(NEXT, release("counts", PureDp(2.0)), {})
        assert set(spent_in(torn)) == {*expected, PureDp(2.0)}
        forget_processes()


def test_no_byte_of_a_line_can_be_changed(root):
    ledger = Ledger(root)
    plan(ledger)
    use(ledger, 2)
    rows = rows_of(root)
    forget_processes()
    with closing(sqlite3.connect(f"{root}/{FILE}", isolation_level=None)) as other:
        other.execute("PRAGMA ignore_check_constraints = ON")
        columns = [
            (column, text, seq)
            for seq, *texts in rows
            for column, text in zip(("checksum", "line"), texts, strict=True)
        ]
        for column, text, seq in columns:
            statement = f"UPDATE ledger SET {column} = ? WHERE seq = ?"
            for place in range(len(text)):
                damaged = bytearray(text.encode())
                damaged[place] ^= 1
                # where it is not JSON any more, not even SQLite writes it
                with suppress(sqlite3.OperationalError):
                    other.execute(statement, (damaged.decode(), seq))
                    with ledger_error("is damaged"):
                        spent_in(root)
                    other.execute(statement, (text, seq))
    assert spent_in(root) == ledger.spent("F")


def test_a_damaged_file_is_refused_or_changes_nothing(root, tmp_path):
    spent = example(root).spent("F")
    forget_processes()
    text = (tmp_path / "state" / FILE).read_bytes()
    rng = default_rng(3)
    refused = 0
    for number, place in enumerate(rng.choice(len(text), 400, replace=False)):
        changed = bytearray(text)
        changed[place] ^= 1 << rng.integers(8)
        damaged = tmp_path / str(number)
        damaged.mkdir(0o700)
        (damaged / FILE).touch(0o600)
        (damaged / FILE).write_bytes(changed)
        with suppress(SettingsError, SiteError):
            refused += 1
            assert spent_in(damaged) == spent
            refused -= 1
        forget_processes()
    assert refused > 10


def writing(ledger, what="x"):
    yield lambda: plan(ledger, 1, what=what)
    yield lambda: ledger.charge(RUN, release(what), {})
    yield lambda: ledger.note(RUN, [release(what, None)])
    yield lambda: use(ledger, 1)
    yield lambda: ledger.close(RUN)


@pytest.mark.parametrize("is_numbered", [True, False])
def test_no_line_can_be_moved(root, is_numbered):
    example(root)
    rows = rows_of(root)
    for lines in (
        [*rows[:1], *rows[2:]],
        rows[1:],
        rows[:-1],
        [],
        [rows[1], rows[0], *rows[2:]],
        [*rows[:2], *rows[1:]],
        [*rows, rows[-1]],
    ):
        numbers = [seq for seq, *_ in lines]
        if is_numbered or len(set(numbers)) < len(numbers) or sorted(lines) == rows:
            numbers = range(1, len(lines) + 1)
        change(root, "DELETE FROM ledger")
        for number, row in zip(numbers, lines, strict=True):
            change(root, ADD, number, *row[1:])
        with ledger_error(r"damaged.*nothing is released"):
            spent_in(root)


def test_every_call_looks_at_the_end_of_the_chain(root):
    example(root)
    change(root, "DELETE FROM ledger WHERE seq = 7")
    ledger = Ledger(root)
    total = partial(ledger.total, "F", DELTA)
    reading = partial(ledger.spent, "F"), total, partial(ledger.lines, RUN)
    for call in (*reading, *writing(ledger)):
        with ledger_error(r"damaged.*nothing is released"):
            call()


def test_lines_that_a_process_knows_must_stay(root, tmp_path):
    ledger = example(root)
    rows = rows_of(root)
    gone = "earlier lines are missing"
    end = "UPDATE counter SET seq = ?, checksum = ?"
    change(root, "DELETE FROM ledger WHERE seq = 7")
    change(root, end, *rows[5][:2])
    with ledger_error(gone):
        ledger.spent("F")
    # whoever has not seen it cannot know
    spent_in(root)
    change(root, ADD, *rows[6])
    change(root, end, *rows[6][:2])
    assert ledger.spent("F") == spent_in(root)
    change(root, "UPDATE ledger SET line = replace(line, 'draw', 'dram')")
    with ledger_error("the checksum of line 7 does not match"):
        spent_in(root)
    # another database in its place, and none
    other = Ledger(str(tmp_path / "other"))
    for _ in range(20):
        other.charge(RUN, release(), {})
    database.close_databases()
    os.replace(tmp_path / "other" / FILE, f"{root}/{FILE}")
    with ledger_error(gone):
        ledger.spent("F")
    forget_processes()
    shutil.rmtree(root)
    with ledger_error(gone):
        ledger.spent("F")


def test_a_rolled_back_line_is_not_missed(root):
    """A process takes for gone only what was there."""
    ledger = example(root)
    changes = Changes(open_database(root), is_durable=True)
    spent = ledger.spent("F")
    counter.confirm(root)
    of_round = RoundLedger(ledger, changes)
    refused = pytest.raises(BudgetError)
    with refused, changes.together(lambda _: False):
        of_round.note(NEXT, [KEYS])
        of_round.charge(NEXT, release("more", PureDp(9.0)), BUDGETS, "more")
    assert ledger.spent("F") == spent
    assert ledger.lines(NEXT) == Ledger(root).lines(NEXT)
    with changes.together(lambda _: False):
        of_round.note(NEXT, [KEYS])
        assert spent_in(root) == spent
    assert [line["event"] for line in ledger.lines(NEXT)] == ["charge", "note"]


def test_what_cannot_be_written_is_not_released(root):
    ledger = example(root)
    spent = ledger.spent("F")
    rows = rows_of(root)
    connection = open_database(root)._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    # two small lines may have room
    *calls, _, _ = writing(ledger, "x" * 9000)
    for call in calls:
        with pytest.raises(SiteError, match=r"No space left.*nothing is released"):
            call()
    assert ledger.spent("F") == spent
    assert rows_of(root) == rows
    connection.execute("PRAGMA max_page_count = 100000")
    for call in calls:
        call()


class Failing(sqlite3.Connection):
    """A connection whose disk fails when a transaction is to be safe."""

    def execute(self, statement, *values):
        if statement == "COMMIT":
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error
        return super().execute(statement, *values)


def test_what_is_not_on_the_disk_is_not_released(root, monkeypatch):
    ledger = example(root)
    spent = ledger.spent("F")
    connect = sqlite3.connect
    with monkeypatch.context() as patched:
        forget_processes()
        patched.setattr(
            "tp_flower.database.sqlite3.connect",
            lambda *a, **o: connect(*a, **o, factory=Failing),
        )
        for call in writing(Ledger(root)):
            with pytest.raises(SiteError, match=r"output error; nothing is released"):
                call()
        forget_processes()
    assert ledger.spent("F") == spent_in(root) == spent


def test_all_that_leaves_is_on_the_disk_first(root, monkeypatch):
    modes = []
    ledger = example(root)
    begin = database.Database.begin

    def begin_and_note(self, **options):
        begin(self, **options)
        modes.extend(self._connection.execute("PRAGMA synchronous").fetchone())

    monkeypatch.setattr(database.Database, "begin", begin_and_note)
    for call in writing(ledger):
        call()
    for is_durable in (False, True):
        changes = Changes(open_database(root), is_durable=is_durable)
        with changes.together(lambda _: False):
            RoundLedger(ledger, changes).note(RUN, [release(f"{is_durable}", None)])
            changes.add()
    assert set(modes) == {2}  # FULL


def long_example(root, runs=6):
    rng = default_rng(0)
    ledger = Ledger(root)
    for run in map(str, range(runs)):
        for part in range(3):
            plan(ledger, 60, run, part=part)
        ledger.charge(run, LABELS, {}, f"draw {int(run) // 2}")
        ledger.note(run, [SCORES])
        for _ in range(60):
            ledger.spend(run, [(int(rng.integers(3)), "gradients", 0)])
        if int(run) % 3:
            ledger.close(run)
    return ledger


def test_sums_of_the_database_are_those_of_the_lines(root):
    """Written again, line by line: what is open in full, what is closed as used."""
    ledger = long_example(root)
    open_runs = defaultdict(dict)
    total = 0
    paid = set()
    for line in map(json.loads, ledger.export()):
        if line["event"] == "reserve":
            open_runs[line["run"]][line["release"]["part"]] = [line["limit"], 0]
        elif line["event"] == "spend":
            open_runs[line["run"]][line["part"]][1] += line["times"]
        elif line["event"] == "charge":
            paid.add(line["ident"])
        elif line["event"] == "close":
            total += sum(used for _, used in open_runs.pop(line["run"]).values())
    total += sum(limit for run in open_runs.values() for limit, _ in run.values())
    assert set(ledger.spent("F")) == {Gaussian(6.0, 4 * total), PureDp(0.5, len(paid))}
    assert 0 < len(open_runs) < 6
    assert spent_in(root) == ledger.spent("F")


def test_a_use_reads_no_more_of_a_long_ledger_than_of_a_short_one(root):
    """Neither does what is reserved, once a process has checked the chain."""
    steps = []
    for runs in (2, 20):
        place = f"{root}-{runs}"
        ledger = long_example(place, runs)
        plan(ledger, 30, "more", BUDGETS, source="G")
        counted = [0]
        connection = open_database(place)._connection
        connection.set_progress_handler(
            lambda c=counted: c.__setitem__(0, c[0] + 1), 10
        )
        use(ledger, 1, run="more")
        plan(ledger, 30, "next", BUDGETS, source="G")
        ledger.charge("next", release("labels", PureDp(0.1), "G"), BUDGETS, "x")
        steps.append(counted[0])
    assert steps[1] <= 1.5 * steps[0]


def test_processes_take_turns(root):
    plan(Ledger(root), 50)
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert sum(pool.starmap(spend_all, [(root, RUN, 20)] * 4)) == 50
    ledger = Ledger(root)
    assert ledger.lines(RUN)[0]["used"] == 50
    ledger.close(RUN)
    assert ledger.spent("F") == [Gaussian(6.0, 200)]


@pytest.mark.parametrize("is_shared", [True, False])
def test_two_runs_cannot_both_take_the_rest_of_a_budget(root, is_shared):
    shared = Ledger(root)

    def ask(run):
        ledger = shared if is_shared else Ledger(root)
        with suppress(BudgetError):
            plan(ledger, 6, run, BUDGETS)
            return 1
        return 0

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(ask, map(str, range(8)))) == 1
