"""A killed site has paid for all that left it, and keeps its labels."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest

from client_apps.data.ledger import Ledger
from tests.support.federated import store_on_disk
from tests.support.paths import ROOT
from tp_flower.privacy.mechanisms import PureDp

pytestmark = pytest.mark.slow

KILLS, LATEST = 8, 40
"""The last run is killed after so many replies, of which a dozen are of set-up."""
EPOCHS = 400
LABEL = "label-values"
KINDS = {"scores": "scores", "moments": "moments", LABEL: "labels"}


@pytest.fixture
def folder(tmp_path):
    return store_on_disk(tmp_path).parent


def run_and_kill(folder, replies, seconds):
    """Kill a run so long after its first replies; return its name and what left."""
    child = subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "tests/support/children/run_child.py"),
            str(folder),
            str(EPOCHS),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    first = [child.stdout.readline() for _ in range(replies)]
    time.sleep(seconds)
    child.send_signal(signal.SIGKILL)
    text = b"".join(first) + child.communicate()[0]
    # the pipe may end within a line: that reply was not seen whole
    whole = text[: text.rfind(b"\n") + 1].decode().splitlines()
    assert child.returncode == -signal.SIGKILL, "it ended before it was killed"
    left = [json.loads(line) for line in whole]
    return left[0]["run"], [reply["arrays"] for reply in left]


def test_whenever_a_site_is_killed_its_ledger_has_what_left(folder):
    rng = np.random.default_rng(5)
    labels, runs = set(), {}
    for at in np.linspace(1, LATEST, KILLS, dtype=int):
        run, replies = run_and_kill(folder, int(at), rng.uniform(0.0, 0.05))
        left = Counter(
            (part, KINDS[name])
            for arrays in replies
            for part, name, _ in arrays
            if name in KINDS
        )
        labels |= {d for arrays in replies for _, name, d in arrays if name == LABEL}
        runs[run] = left
    # the kills met set-up and training
    assert sum(left["labels"] for left in map(by_what, runs.values())) >= 2
    assert sum(left["scores"] for left in map(by_what, runs.values())) >= 10
    # drawn once: every run told the same noisy labels
    assert len(labels) == 1
    ledger = Ledger(str(folder / "state"))
    sources = set()
    for run, left in runs.items():
        lines = ledger.lines(run)
        sources |= {line["release"]["source"] for line in lines}
        used = {
            (line["release"]["part"], line["release"]["what"]): line.get("used", 1)
            for line in lines
        }
        for name, times in left.items():
            assert used[name] >= times, (run, name)
    # and the labels were paid for once, in all runs together
    paid = [m for source in sources for m in ledger.spent(source)]
    assert [m for m in paid if isinstance(m, PureDp)] == [PureDp(1.0)]


def by_what(left):
    found = Counter()
    for (_, what), times in left.items():
        found[what] += times
    return found
