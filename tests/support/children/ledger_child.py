"""Processes that use a ledger and are killed; run by test_kills.py.

``python ledger_child.py loop FOLDER RUN`` releases for ever: it pays, then writes what
has left to its standard output.

``python ledger_child.py points FOLDER MODE`` forks one process for each call of the
operating system and each statement of SQL that the work makes, and has it kill itself
there: before it ("before") or after it ("after"). Prints what had left, and what the
ledger said afterwards, for each. (What a process that is killed within a statement has
written, is in test_ledger.py: it is torn at any byte.)

``spend_all`` is for processes of test_ledger.py, which import little with it.
"""

import fcntl
import itertools
import json
import os
import signal
import sqlite3
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from client_apps.data.database import close_databases
from client_apps.data.ledger import Ledger
from tp_flower.errors import BudgetError
from tp_flower.privacy.mechanisms import Gaussian, PureDp, Release, Reservation

SOURCE = "F"
LIMIT = 1_000_000
CALLS = ("mkdir", "open", "fsync", "close")
STATEMENTS = ("execute", "executemany", "executescript")


def release(what, mechanism):
    unit = "a row of flights"
    return Release("flights", SOURCE, 1, "train", what, unit, "", "server", mechanism)


STEP = release("gradients", Gaussian(6.0))
LABELS = release("labels", PureDp(0.5))
STATISTICS = release("statistics", PureDp(0.25))


def loop(folder, run):
    ledger = Ledger(str(folder))
    ledger.reserve(run, [Reservation(STEP, LIMIT)], {})
    while True:
        ledger.spend(run, [(1, "gradients", 0)])
        os.write(1, b"g\n")
        ledger.charge(run, STATISTICS, {})
        os.write(1, b"s\n")


def spend_all(root, run, times):
    """Return how often of so many times a step could be paid for."""
    ledger = Ledger(root)
    paid = 0
    for _ in range(times):
        with suppress(BudgetError):
            ledger.spend(run, [(1, "gradients", 0)])
            paid += 1
    return paid


def work(folder, leave):
    ledger = Ledger(str(folder))
    ledger.reserve("run", [Reservation(STEP, 3)], {})
    for _ in range(2):
        ledger.spend("run", [(1, "gradients", 0)])
        leave("g")
    ledger.charge("run", LABELS, {}, "draw")
    leave("l")
    ledger.note("run", [release("scores", None), release("keys", None)])
    leave("n")
    ledger.close("run")


def kill_at(point, mode):
    """Have the process kill itself at its call number ``point``."""
    counter = itertools.count()

    def patched(real):
        def function(*arguments, **options):
            if next(counter) == point:
                if mode == "after":
                    with suppress(OSError):
                        real(*arguments, **options)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return function

    class Connection(sqlite3.Connection):
        """Of the process that kills itself."""

    for name in STATEMENTS:
        setattr(Connection, name, patched(getattr(sqlite3.Connection, name)))
    sqlite3.connect = partial(sqlite3.connect, factory=Connection)
    for name in CALLS:
        setattr(os, name, patched(getattr(os, name)))
    fcntl.flock = patched(fcntl.flock)


def one_point(folder, point, mode):
    """Return what a process that dies at a point has left behind it."""
    reading, writing = os.pipe()
    write = os.write
    child = os.fork()
    if child == 0:
        kill_at(point, mode)
        work(folder, lambda what: write(writing, what.encode()))
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        left = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    ledger = Ledger(str(folder))
    lines = ledger.lines("run")
    before = ledger.total(SOURCE, 1e-5)
    ledger.charge("again", LABELS, {}, "draw")
    return {
        "left": left,
        "killed": os.WIFSIGNALED(status),
        "events": [line["event"] for line in lines],
        "used": max((line.get("used", 0) for line in lines), default=0),
        "total": before,
        "total with labels": Ledger(str(folder)).total(SOURCE, 1e-5),
    }


def points(folder, mode):
    found = []
    for point in itertools.count():
        found.append(one_point(folder / str(point) / "state", point, mode))
        close_databases()
        if not found[-1]["killed"]:
            break
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    command, place, argument = sys.argv[1:]
    {"loop": loop, "points": points}[command](Path(place), argument)
