"""Wherever a process is killed, it has paid for all that left it, and keeps its labels.

SIGKILL at random moments: the ledger never knows less than what left.
"""

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter

import numpy as np
import pytest

from client_apps.data.ledger import Ledger, open_ledger
from client_apps.privacy.guard import source_id
from tests.support.children import ledger_child, run_child
from tests.support.children.ledger_child import LIMIT, SOURCE
from tests.support.examples.site_examples import LabelPlan, booleans, make_site, release
from tests.support.federated import store_on_disk
from tests.support.files import ROOT
from tp_flower.privacy.accounting import epsilon
from tp_flower.privacy.mechanisms import Gaussian, PureDp

DELTA = 1e-5
LATEST = 40
"""The last run is killed after so many replies, of which a dozen are of set-up."""
KINDS = {"scores": "scores", "label-values": "labels"}


def start(*command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, command)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)


def kill(child, seconds, lines=1):
    """Kill a process so long after its first lines; return what it has written."""
    first = [child.stdout.readline() for _ in range(lines)]
    time.sleep(seconds)
    child.send_signal(signal.SIGKILL)
    text = b"".join(first) + child.communicate()[0]
    assert child.returncode == -signal.SIGKILL, "it ended before it was killed"
    # the pipe may end within a line: that one was not seen whole
    return text[: text.rfind(b"\n") + 1].decode().splitlines()


# a ledger alone: the processes of ledger_child.py pay, and then tell what has left


def test_a_killed_process_has_paid_for_all_that_left(tmp_path):
    rng = np.random.default_rng(0)
    steps = statistics = 0
    for run in map(str, range(12)):
        child = start(ledger_child.__file__, "loop", tmp_path, run)
        # on a busy machine it gets no further than the lines that are waited for
        left = kill(child, rng.uniform(0, 0.1), int(rng.integers(1, 5)))
        ledger = Ledger(str(tmp_path))
        reserved, *charged = ledger.lines(run)
        # what was being paid for when the process died has not left
        assert 0 <= reserved["used"] - left.count("g") <= 1
        assert 0 <= len(charged) - left.count("s") <= 1
        # the run has died, and may cost what it planned; so until somebody closes it
        statistics += len(charged)
        assert set(ledger.spent(SOURCE)) == spent(steps + LIMIT, statistics)
        ledger.close(run)
        steps += reserved["used"]
        assert set(ledger.spent(SOURCE)) == spent(steps, statistics)
    assert steps > 12


def spent(steps, statistics):
    found = {Gaussian(6.0, steps), PureDp(0.25, statistics)}
    return {each for each in found if each.count}


@pytest.mark.parametrize("mode", ["before", "after"])
def test_at_every_statement_the_ledger_has_what_left(mode, tmp_path):
    with start(ledger_child.__file__, "points", tmp_path, mode) as child:
        points = json.loads(child.stdout.read())
    assert child.returncode == 0
    assert sum(point["killed"] for point in points) == len(points) - 1 >= 70
    for point in points:
        left = point["left"]
        events = point["events"]
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


LABELS = """
import sys, zlib
from pathlib import Path
from tests.support.examples.site_examples import LabelPlan, booleans, make_site, release

site = make_site(Path(sys.argv[1]))
for step in range(int(sys.argv[2]), 10_000):
    plan = LabelPlan("randomised-response", 1 + step / 1000)
    values = release(site, booleans(), plan).values
    print(step, zlib.crc32(values.tobytes()), flush=True)
"""


def payments(site):
    """How often each epsilon has been paid for."""
    ledger = open_ledger(str(site.context.node_config["state-dir"]))
    spends = ledger.spent(source_id(site.shards[0]))
    return {spend.epsilon: spend.count for spend in spends}


def test_labels_that_left_before_a_kill_are_kept_and_paid_for(tmp_path):
    rng = np.random.default_rng(11)
    released: dict[int, int] = {}
    for _ in range(4):
        child = start("-c", LABELS, tmp_path, len(released))
        lines = kill(child, rng.uniform(0.0, 0.15), 2)
        released |= dict(map(int, line.split()) for line in lines)
    assert len(released) > 4
    site = make_site(tmp_path, run=8)
    before = payments(site)
    assert all(before[1 + step / 1000] == 1 for step in released)
    # at most the release that a kill met is paid for and has not left
    assert len(before) - len(released) <= 4
    for step, digest in released.items():
        plan = LabelPlan("randomised-response", 1 + step / 1000)
        assert zlib.crc32(release(site, booleans(), plan).values.tobytes()) == digest
    assert payments(site) == before


@pytest.mark.slow
@pytest.mark.cases("4")
@pytest.mark.parametrize("kills", [4, 8])
def test_whenever_a_site_is_killed_its_ledger_has_what_left(tmp_path, kills):
    store_on_disk(tmp_path)
    rng = np.random.default_rng(5)
    labels = set()
    runs = {}
    totals = Counter()
    for at in np.linspace(1, LATEST, kills, dtype=int):
        child = start(run_child.__file__, tmp_path, 400)
        replies = list(map(json.loads, kill(child, rng.uniform(0.0, 0.05), int(at))))
        arrays = [array for reply in replies for array in reply["arrays"]]
        labels |= {digest for _, name, digest in arrays if name == "label-values"}
        left = [(part, KINDS[name]) for part, name, _ in arrays if name in KINDS]
        totals.update(what for _, what in left)
        runs[replies[0]["run"]] = Counter(left)
    # the kills met set-up and training
    assert totals["labels"] >= 2
    assert totals["scores"] >= 10
    # drawn once: every run told the same noisy labels
    assert len(labels) == 1
    ledger = Ledger(str(tmp_path / "state"))
    sources = set()
    for run, left in runs.items():
        releases = [
            (line["release"], line.get("used", 1)) for line in ledger.lines(run)
        ]
        sources |= {release["source"] for release, _ in releases}
        used = {(each["part"], each["what"]): times for each, times in releases}
        for name, times in left.items():
            assert used[name] >= times, (run, name)
    # and the labels were paid for once, in all runs together
    paid = [m for source in sources for m in ledger.spent(source)]
    assert [m for m in paid if isinstance(m, PureDp)] == [PureDp(1.0)]
