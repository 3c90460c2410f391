"""Noisy labels that left before a process was killed are kept, and paid for once."""

import os
import signal
import subprocess
import sys
import time
import zlib

import numpy as np

from client_apps.data.ledger import open_ledger
from client_apps.privacy.guard import source_id
from tests.support.examples.noisy_labels import LabelPlan, booleans, make_site, release
from tests.support.paths import ROOT

CHILD = """
import sys, zlib
from pathlib import Path
from tests.support.examples.noisy_labels import LabelPlan, booleans, make_site, release

site = make_site(Path(sys.argv[1]))
for step in range(int(sys.argv[2]), 10_000):
    plan = LabelPlan("randomised-response", 1 + step / 1000)
    values = release(site, booleans(), plan).values
    print(step, zlib.crc32(values.tobytes()), flush=True)
"""
KILLS = 4


def payments(site):
    """How often each epsilon has been paid for."""
    ledger = open_ledger(str(site.context.node_config["state-dir"]))
    return {
        spend.epsilon: spend.count for spend in ledger.spent(source_id(site.shards[0]))
    }


def test_labels_that_left_before_a_kill_are_kept_and_paid_for(tmp_path):
    """SIGKILL at random moments: the ledger never knows less than what left."""
    rng = np.random.default_rng(11)
    released: dict[int, int] = {}
    for _ in range(KILLS):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), str(len(released))],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        lines = [child.stdout.readline()]
        time.sleep(rng.uniform(0.0, 0.15))
        child.send_signal(signal.SIGKILL)
        lines += child.communicate()[0].splitlines()
        released |= dict(map(int, line.split()) for line in lines)
    assert len(released) > KILLS
    site = make_site(tmp_path, run=8)
    before = payments(site)
    assert all(before[1 + step / 1000] == 1 for step in released)
    # at most the release that a kill met is paid for and has not left
    assert len(before) - len(released) <= KILLS
    for step, digest in released.items():
        plan = LabelPlan("randomised-response", 1 + step / 1000)
        assert zlib.crc32(release(site, booleans(), plan).values.tobytes()) == digest
    assert payments(site) == before
