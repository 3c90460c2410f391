"""Sessions over a real front: processes that are killed cost seconds, and no figure."""

import json
import os
import shutil
import signal
import time

import pytest

from scripts.data.make_store import main as make_store
from scripts.deploy.deployment import STORE_FILES, store_entries
from scripts.run_app import descendants
from tests.support.deployment import deployed
from tests.support.policies import OPEN

SQL = """
SELECT o.quantity AS label, o.discount, i.price, i.weight, c.age
FROM orders AS o JOIN items AS i ON o.item_id = i.item_id
JOIN customers AS c ON o.customer_id = c.customer_id
"""
RUN = {"sql": SQL, "strategy": "sgd", "batch-size": 2, "num-epochs": 15}
RUN |= {"min-sites": 2, "channel": "session"}
BACK_SECONDS = 25.0


def client_apps(deployment, site):
    for pid in descendants(deployment.processes[site].pid):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if b"flwr-clientapp" in file.read():
                yield pid


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_what_is_killed_is_back_in_seconds_and_changes_nothing(tmp_path):
    store = tmp_path / "store"
    assert make_store([str(store), "--orders", "200", "--customers", "60"]) == 0
    with deployed(tmp_path / "deployment") as deployment:
        deployment.start_front()
        for site in STORE_FILES:
            entries = store_entries(store, site, OPEN)
            deployment.add_site(site, entries, "--keys", "unchecked")

        def answers(site):
            return deployment.log(site).count("action=train")

        def goes_on(site, seconds):
            before, started = answers(site), time.monotonic()
            deployment.wait(lambda: answers(site) > before + 20, "training", seconds)
            return time.monotonic() - started

        undisturbed = deployment.submit("undisturbed", RUN)
        assert deployment.finish(undisturbed, 300.0)[0] == "finished:completed"
        run = deployment.submit("disturbed", RUN)
        goes_on("shop", 60.0)
        deployment.kill("front")
        deployment.start_front()
        assert goes_on("shop", 60.0) < 5.0
        deployment.restart_site("shop")
        took = goes_on("shop", 90.0)
        for pid in client_apps(deployment, "office"):
            os.kill(pid, signal.SIGKILL)
        goes_on("office", 120.0)
        assert deployment.finish(run, 300.0)[0] == "finished:completed"
        reports = sorted(deployment.folder.glob("superlink/runs/*/report.json"))
        first, second = (json.loads(path.read_text())["final"] for path in reports)
        assert second["train"]["loss"] == pytest.approx(first["train"]["loss"], rel=1e-6)
        assert took < BACK_SECONDS
