"""Wherever a process is killed, the ledger has at least what has left.

The processes are those of ledger_child.py: they pay, and then tell what has left.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from client_apps.data.ledger import Ledger
from tests.support.children import ledger_child
from tests.support.children.ledger_child import LIMIT, SOURCE
from tp_flower.privacy.accounting import epsilon
from tp_flower.privacy.mechanisms import Gaussian, PureDp

CHILD = Path(ledger_child.__file__)
ROOT = CHILD.parent.parent
DELTA = 1e-5
KILLS = 12


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, str(CHILD), *map(str, arguments)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_a_killed_process_has_paid_for_all_that_left(tmp_path):
    rng = np.random.default_rng(0)
    steps = statistics = 0
    for run in map(str, range(KILLS)):
        with start("loop", tmp_path, run) as child:
            first = child.stdout.read(1)
            time.sleep(rng.uniform(0, 0.1))
            child.send_signal(signal.SIGKILL)
            left = first + child.stdout.read()
        assert child.returncode == -signal.SIGKILL
        ledger = Ledger(str(tmp_path))
        reserved, *charged = ledger.lines(run)
        # what was being paid for when the process died has not left
        assert 0 <= reserved["used"] - left.count(b"g") <= 1
        assert 0 <= len(charged) - left.count(b"s") <= 1
        # the run has died, and may cost what it planned; so until somebody closes it
        statistics += len(charged)
        assert set(ledger.spent(SOURCE)) == spent(steps + LIMIT, statistics)
        ledger.close(run)
        steps += reserved["used"]
        assert set(ledger.spent(SOURCE)) == spent(steps, statistics)
    assert steps > KILLS


def spent(steps, statistics):
    found = {Gaussian(6.0, steps), PureDp(0.25, statistics)}
    return {each for each in found if each.count}


@pytest.mark.parametrize(("mode", "at_least"), [("before", 70), ("after", 70)])
def test_at_every_statement_the_ledger_has_what_left(mode, at_least, tmp_path):
    with start("points", tmp_path, mode) as child:
        points = json.loads(child.stdout.read())
    assert child.returncode == 0
    assert sum(point["killed"] for point in points) == len(points) - 1 >= at_least
    for point in points:
        left, events = point["left"], point["events"]
        assert left == "ggln"[: len(left)]
        assert left.count("g") <= point["used"] <= left.count("g") + 1
        assert events.count("charge") in {left.count("l"), 1}
        assert events.count("note") >= 2 * left.count("n")
        steps = Gaussian(6.0, left.count("g"))
        if "reserve" in events and left != "ggln":
            # nobody has closed the run: it may cost what it planned
            steps = Gaussian(6.0, 3)
        assert point["total"] >= epsilon([steps, PureDp(0.5, left.count("l"))], DELTA)
        # labels that were paid for, whether or not they left, are not paid for again
        if "charge" in events:
            assert point["total with labels"] == point["total"]
        else:
            assert point["total with labels"] > point["total"]
    assert {point["left"] for point in points} == {"", "g", "gg", "ggl", "ggln"}
    whole = points[-1]
    assert whole["events"] == ["reserve", "charge", "note", "note"]
    assert whole["total"] == epsilon([Gaussian(6.0, 2), PureDp(0.5)], DELTA)
