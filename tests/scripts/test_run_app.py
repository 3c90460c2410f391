"""The SuperLink that runs through Flower have to themselves."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from scripts import run_app


def test_descendants_are_found_through_generations():
    # a shell with a child of its own; both are told by their ids
    command = "sleep 60 & echo $!; wait"
    parent = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert {parent.pid, child} <= set(run_app.descendants(os.getpid()))
        assert run_app.descendants(parent.pid) == [child]
    finally:
        os.kill(child, signal.SIGTERM)
        parent.communicate(timeout=60)


@pytest.mark.slow
def test_the_private_superlink_answers_and_is_gone_afterwards():
    with run_app.private_superlink() as environment:
        command = [run_app.BIN / "flwr", "ls", "--format", "json"]
        listed = subprocess.check_output(command, env=environment, text=True)
        assert json.loads(listed) == {"success": True, "runs": []}
        home = Path(environment["FLWR_HOME"])
        assert home.is_dir()
    assert not home.exists()
