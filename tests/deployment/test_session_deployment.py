"""Sessions over a real front: whatever fails, the run goes on, and its figures are the
same.

How long that takes is for the benchmark: a test waits as long as a busy machine needs.
"""

import json
import os
import re
import shutil
import signal
import threading
from collections import Counter

import pyarrow.parquet as pq
import pytest

from scripts.bench_deploy import SQL
from scripts.data.make_store import main as make_store
from scripts.deploy.deployment import (
    CONNECTION,
    STORE_FILES,
    Deployment,
    store_entries,
)
from scripts.run_app import descendants
from tests.support.deployment import deployed, train_in_this_process
from tests.support.peers.session_front import Fault, Front
from tests.support.policies import OPEN
from tests.support.serving.scorers import Serving, by_row
from tp_flower.reports.predictions import PREDICTIONS_FILE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed"),
]
RUN = {"sql": SQL, "strategy": "sgd", "batch-size": 2, "num-epochs": 6}
RUN |= {"min-sites": 2, "channel": "session"}
LONG = {**RUN, "num-epochs": 15}
"""A run that is longer than several sessions."""
ROUND = r"event={} run=(\S+) round=(\d+)"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    """Two sites behind a front, and a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("sessions")
    assert (
        make_store([str(folder / "store"), "--orders", "200", "--customers", "60"]) == 0
    )
    with deployed(folder / "deployment") as running:
        running.start_front()
        for site in STORE_FILES:
            entries = store_entries(folder / "store", site, OPEN)
            running.add_site(site, entries, "--keys", "unchecked")
        epochs, losses = finished(running, running.submit("undisturbed", RUN))
        running.seconds = report(running)["seconds"] * LONG["num-epochs"] / epochs
        alone = {**LONG, "channel": "flower"}
        running.undisturbed = {
            epochs: losses,
            LONG["num-epochs"]: train_in_this_process(running, alone),
        }
        yield running


@pytest.fixture
def front(deployment):
    """A front that fails, between nginx and the runs' sockets."""
    failing = Front(deployment.sessions)
    threading.Thread(target=failing.serve_forever, daemon=True).start()
    deployment.kill("front")
    deployment.start_front(failing.url)
    yield failing
    failing.shutdown()
    failing.server_close()
    deployment.kill("front")
    deployment.start_front()


def newest(deployment):
    return max(
        (deployment.folder / "superlink" / "runs").iterdir(), key=os.path.getmtime
    )


def run_log(deployment):
    return (newest(deployment) / "run.log").read_text()


def finished(deployment, run):
    """The epochs and the losses of a run that has to complete."""
    assert deployment.finish(run, 1200.0)[0] == "finished:completed"
    found = report(deployment)
    return found["epochs"], found["final"]["train"]


def report(deployment):
    return json.loads((newest(deployment) / "report.json").read_text())


def check_same(deployment, run, settings=RUN):
    epochs, losses = finished(deployment, run)
    assert epochs == settings["num-epochs"]
    assert losses == pytest.approx(deployment.undisturbed[epochs], rel=1e-6)


def goes_on(deployment, site):
    """Wait until a site has answered twenty more messages."""

    def answers():
        return deployment.log(site).count("action=train")

    before = answers()
    deployment.wait(lambda: answers() > before + 20, "training")


def sessions(deployment):
    """How many sessions each node has opened in the newest run."""
    return Counter(re.findall(r"event=session node=(\d+)", run_log(deployment)))


def client_apps(deployment, site):
    for pid in descendants(deployment.processes[site].pid):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if b"flwr-clientapp" in file.read():
                yield pid


def test_what_is_killed_goes_on_and_changes_nothing(deployment):
    run = deployment.submit("killed", RUN)
    goes_on(deployment, "shop")
    deployment.kill("front")
    deployment.start_front()
    goes_on(deployment, "shop")
    before = sessions(deployment)
    deployment.restart_site("shop")
    goes_on(deployment, "shop")
    for pid in client_apps(deployment, "office"):
        os.kill(pid, signal.SIGKILL)
    goes_on(deployment, "office")
    check_same(deployment, run)
    # a process that has died takes its session with it: each site has opened another
    # one
    after = sessions(deployment)
    assert len(after) == 2
    assert all(after[node] > before[node] for node in after)


def test_what_a_front_does_to_requests_is_computed_once(deployment, front):
    faults = list(Fault)
    # odd: where the two sites take turns, each meets every fault
    every = 31
    front.schedule = lambda n: None if n % every else faults[n // every % len(faults)]
    before = {site: len(deployment.log(site)) for site in STORE_FILES}
    check_same(deployment, deployment.submit("faulty", RUN))
    assert set(front.faults) == set(Fault)
    for reason in ("not signed with", "another body", "no such session"):
        assert f'event=refused reason="{reason}' in run_log(deployment)
    for site, begins in before.items():
        log = deployment.log(site)[begins:]
        computed = Counter(
            re.findall(ROUND.format("answered") + r"\b.* action=train", log)
        )
        repeated = Counter(re.findall(ROUND.format("repeated"), log))
        assert len(computed) > 500
        assert sum(repeated.values()) > 0
        assert set((computed - repeated).values()) == {1}


def test_sessions_may_end_often_and_polls_be_cut(deployment, front):
    front.longest = 1.0
    # both sites must be in session at once, which takes a busy machine longer to come
    # about
    limit = max(10.0, deployment.seconds / 4)
    run = deployment.submit("limits", {**LONG, "session-seconds": limit})
    check_same(deployment, run, LONG)
    assert min(sessions(deployment).values()) > report(deployment)["seconds"] / (
        4 * limit
    )


def test_a_run_that_waits_trains_when_the_other_ends_or_is_stopped(deployment):
    # it would not end before it is stopped, however long that takes
    endless = {**RUN, "num-epochs": 100_000, "tolerance": 0.0}
    first = deployment.submit("first", endless)
    goes_on(deployment, "shop")
    second = deployment.submit("second", RUN)
    goes_on(deployment, "shop")
    deployment.flwr("stop", first, CONNECTION)
    check_same(deployment, second)
    assert "stopped" in deployment.flwr(
        "ls", CONNECTION, "--run-id", first, "--format", "json"
    )


@pytest.mark.cases
@pytest.mark.parametrize("end", [Deployment.stop_site, Deployment.kill])
def test_a_scorer_names_a_site_that_is_gone_and_answers_when_it_is_back(
    deployment, end
):
    settings = {"sql": SQL, "min-sites": 2, "site-timeout": 60.0}
    predicted = deployment.submit("predict", {**settings, "mode": "predict"})
    assert deployment.finish(predicted, 1200.0)[0] == "finished:completed"
    expected = by_row(pq.read_table(newest(deployment) / PREDICTIONS_FILE))
    serving = Serving(None, None, deployment.scorer, [])
    token = {"Authorization": f"Bearer {deployment.token}"}

    def ask(path="/predict", body=None):
        try:
            return serving.ask(path, body, **token)[::2]
        except ConnectionError:
            return None, None

    def predict(row):
        status, content = ask(body={"keys": [{"row": row}]})
        return content["predictions"] if status == 200 else content["error"]

    def is_healthy():
        return ask("/healthz")[0] == 200

    run = deployment.submit("serve", {**settings, "mode": "serve"})
    deployment.wait(is_healthy, "a session of the scorer")
    rows = sorted(expected)[:20]
    assert [predict(row) for row in rows] == [[expected[row]] for row in rows]
    end(deployment, "office")
    deployment.wait(lambda: "'office'" in str(predict(rows[0])), "a site is missed")
    assert ask(body={"keys": [{"row": rows[0]}]})[0] == 503
    deployment.start_site("office")
    deployment.wait(is_healthy, "another session of the scorer")
    assert predict(rows[0]) == [expected[rows[0]]]
    before = len(deployment.log("office"))
    deployment.flwr("stop", run, CONNECTION)
    deployment.wait(lambda: ask("/healthz") == (None, None), "the scorer ends")
    deployment.wait((newest(deployment) / "report.html").exists, "its report")
    assert report(deployment)["status"] == "completed"
    deployment.wait(
        lambda: "session ended=over" in deployment.log("office")[before:],
        "the end of a session",
    )


def test_a_killed_superlink_costs_nothing_but_time(deployment):
    deployment.submit("cut off", RUN)
    goes_on(deployment, "shop")
    deployment.kill("superlink")
    deployment.start_superlink()
    resumed = deployment.submit("resume", {"resume": str(newest(deployment))})
    check_same(deployment, resumed)
