"""Processes that use a ledger and are killed; run by test_ledger_kill.py.

``python ledger_child.py loop PATH RUN`` releases for ever: it pays, then writes what
has left to its standard output.

``python ledger_child.py points FOLDER MODE`` forks one process for each call of the
operating system that the work makes, and has it kill itself at that call: before it
("before"), after it ("after"), or, if it writes, after a part of it ("within"). Prints
what had left, and what the ledger said afterwards, for each.
"""

import fcntl
import itertools
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from client_apps.data import ledger_snapshot
from client_apps.data.ledger import Ledger, Planned, Release
from tp_flower.privacy.mechanisms import Gaussian, PureDp

SOURCE = "F"
LIMIT = 1_000_000
CALLS = ("mkdir", "open", "fstat", "pread", "write", "fsync", "close", "replace")


def release(what, mechanism):
    unit = "a row of flights"
    return Release("flights", SOURCE, 1, "train", what, unit, "", "server", mechanism)


STEP = release("gradients", Gaussian(6.0))
LABELS = release("labels", PureDp(0.5))
STATISTICS = release("statistics", PureDp(0.25))


def loop(path, run):
    ledger = Ledger(path)
    ledger.reserve(run, [Planned(STEP, LIMIT)], {})
    while True:
        ledger.spend(run, [(1, "gradients", 0)])
        os.write(1, b"g")
        ledger.charge(run, STATISTICS, {})
        os.write(1, b"s")


def work(path, leave):
    ledger = Ledger(path)
    ledger.reserve("run", [Planned(STEP, 3)], {})
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
                die_at(real, arguments, options, mode)
            return real(*arguments, **options)

        return function

    for name in ("write",) if mode == "within" else CALLS:
        setattr(os, name, patched(getattr(os, name)))
    if mode != "within":
        fcntl.flock = patched(fcntl.flock)


def die_at(call, arguments, options, mode):
    if mode == "within":
        descriptor, data = arguments
        call(descriptor, bytes(data)[: len(data) // 2])
    elif mode == "after":
        with suppress(OSError):
            call(*arguments, **options)
    os.kill(os.getpid(), signal.SIGKILL)


def one_point(path, point, mode):
    """Return what a process that dies at a point has left behind it."""
    reading, writing = os.pipe()
    write = os.write
    child = os.fork()
    if child == 0:
        ledger_snapshot.EVERY = 3
        kill_at(point, mode)
        work(path, lambda what: write(writing, what.encode()))
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        left = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    ledger = Ledger(path)
    lines = ledger.lines("run")
    before = ledger.total(SOURCE, 1e-5)
    ledger.charge("again", LABELS, {}, "draw")
    return {
        "left": left,
        "killed": os.WIFSIGNALED(status),
        "events": [line["event"] for line in lines],
        "used": max((line.get("used", 0) for line in lines), default=0),
        "total": before,
        "total with labels": Ledger(path).total(SOURCE, 1e-5),
    }


def points(folder, mode):
    found = []
    for point in itertools.count():
        path = folder / str(point) / "privacy" / "ledger.jsonl"
        found.append(one_point(path, point, mode))
        if not found[-1]["killed"]:
            break
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    command, place, argument = sys.argv[1:]
    {"loop": loop, "points": points}[command](Path(place), argument)
