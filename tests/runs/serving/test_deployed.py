"""A scorer in a deployment: over sessions, by the operator's file, until its end."""

import os
import signal
import tempfile
import time
from collections import Counter
from contextlib import closing, contextmanager
from pathlib import Path
from socket import create_server
from threading import Thread
from unittest.mock import patch

import pytest

from client_apps.rounds import session
from strategies.run import channel
from strategies.run import session as run_session
from strategies.serving import scorer, serve
from strategies.serving.deployed import SCORER, read_scorer_file
from tests.support.command_line import printed_by, refused_by
from tests.support.federated import store, whole
from tests.support.files import case_table
from tests.support.peers.session_front import Front, ThreadedGrid, sessions
from tests.support.predicted import on, predicting, train_store
from tests.support.servers import wait_until
from tests.support.serving.scorers import PATIENCE, TOKEN, Serving, by_row
from tp_flower import api
from tp_flower.errors import SettingsError, UnavailableError
from tp_flower.protocol import session_messages as wire
from tp_flower.settings import Settings

CASES = case_table(__file__)
STORE = on(whole, store())
OPENING = "query.session"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return train_store(
        tmp_path_factory.mktemp("served"), "squared", STORE, num_epochs=1
    )


@pytest.fixture
def operator(tmp_path):
    """The operator's folder: a token, and the file that says where runs listen."""
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text(TOKEN)
    file = tmp_path / "scorer.toml"
    with create_server(("127.0.0.1", 0)) as free:
        file.write_text(
            f'token-file = "token"\nlisten = "127.0.0.1:{free.getsockname()[1]}"\n'
        )
    return file


@contextmanager
def deployment(model, operator):
    """Sites with sessions through a front, of a SuperLink that lets runs serve."""
    with tempfile.TemporaryDirectory(prefix="tp-") as name:
        front = Front(Path(name))
        Thread(target=front.serve_forever, args=(0.05,), daemon=True).start()
        environment = {channel.SESSIONS: name, SCORER: str(operator)}
        flower = ThreadedGrid(STORE, front.url, model.state)
        with patch.dict(os.environ, environment), closing(flower):
            try:
                yield flower, front
            finally:
                front.shutdown()
                front.server_close()


def served(model, flower, operator, ask, **settings):
    """What a run returns that serves until ``ask`` is through; and what that found."""
    address = read_scorer_file(operator)[0]
    serving = Serving(None, None, address.port, [])
    found = []

    def healthy():
        try:
            return serving.ask("/healthz")[0] == 200
        except ConnectionRefusedError:
            return False

    def asking():
        try:
            serving.until(healthy)
            found.append(ask(serving))
        finally:
            # as Flower does where a run is stopped
            os.kill(os.getpid(), signal.SIGINT)

    thread = Thread(target=asking, daemon=True)
    thread.start()
    run = Settings(
        mode="serve", model_name=str(model.manifest.model), device="cpu"
    ).with_fields(**settings)
    try:
        return api.run(run, flower), found
    finally:
        thread.join(PATIENCE)


@pytest.fixture(autouse=True)
def saved(model, home):
    """The model in the home of the test."""
    scorer.manifests.write_manifest(home, model.manifest)


def test_predictions_are_those_of_a_run_while_sessions_stay(model, operator):
    expected = model.table(STORE, row_key="o.customer, o.day")
    names = by_row(expected)
    state = model.state / "orders"
    folders = set(state.glob("predictions/row-keys-*"))
    with operator.open("a") as file:
        file.write(f'row-keys = "{state}"\n')

    def ask(serving):
        key = {name: int(store()["orders"][name][3]) for name in ("customer", "day")}
        first = serving.predict(key)
        # sessions of a run without work would end now
        time.sleep(1.5)
        assert serving.predict(key) == first
        assert len(set(state.glob("predictions/row-keys-*")) - folders) == 1
        return first

    with (
        patch.object(channel, "IDLE_SECONDS", 0.1),
        deployment(model, operator) as (flower, _),
    ):
        result, found = served(
            model, flower, operator, ask, row_key="o.customer, o.day"
        )
    ((of_key,),) = found
    assert of_key in names.values()
    assert Counter(flower.asked) == {(node, OPENING): 1 for node in flower.contexts}
    report = result.report
    assert report["status"] == "completed"
    assert {"seal", "extract", "score", "finish"} == {
        round_["phase"] for round_ in report["history"]
    }
    # to wait for requests is no computing
    assert all(0 <= round_["server-seconds"] < 4 for round_ in report["history"])
    assert (result.folder / "report.html").exists()
    check_metrics(printed_by("report", result.folder, "--metrics"), report)
    assert set(state.glob("predictions/row-keys-*")) == folders, "nobody can use them"


def check_metrics(text, report):
    """Check that the metrics of a run add up to the totals of its report."""
    sums = Counter()
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        metric, _, labels = name.partition("{")
        if not line.startswith("#"):
            of = labels.partition('of="')[2].removesuffix('"}')
            sums[metric.removeprefix("tp_flower_run_"), of] += float(value)
    totals = report["totals"]
    assert sums["completed", ""] == 1
    assert sums["rounds", ""] == report["rounds"]
    assert sums["bytes", "up"] == report["bytes_up"] > 0
    assert sums["bytes", "down"] == report["bytes_down"]
    assert sums["bytes", "overhead"] == totals["overhead-bytes"]
    assert sums["seconds", "waiting"] == pytest.approx(totals["wait-seconds"])


def test_a_site_that_falls_silent_is_noticed_without_a_request(model, operator):
    def ask(serving):
        before = serving.predict({"row": 0})
        front.die()
        began = time.monotonic()
        wait_until(lambda: serving.ask("/healthz")[0] == 503)
        # not only when the polls would have ended that were held
        assert time.monotonic() - began < wire.LONGEST_WAIT - 5
        reasons = {serving.error({"row": 0})[1]}
        front.is_down = False
        wait_until(lambda: serving.ask("/healthz")[0] == 200)
        assert serving.predict({"row": 0}) == before
        return reasons

    with (
        patch.object(session, "LOST_SECONDS", 0.2),
        patch.object(channel, "SILENT_SECONDS", 0.2),
        patch.object(channel, "LOOK_SECONDS", 0.02),
        patch.object(serve, "LOOK_SECONDS", 0.05),
        patch.object(scorer, "FIRST_PAUSE", 0.05),
        patch.object(run_session, "ABANDON_SECONDS", 0.2),
        deployment(model, operator) as (flower, front),
    ):
        _, (reasons,) = served(model, flower, operator, ask, site_timeout=1.0)
    assert all("site " in reason for reason in reasons)


def test_a_request_waits_for_a_site_as_long_as_it_can_and_rows_for_longer(
    model, operator
):
    told = []

    def ask(serving):
        told.append(serving.error({"row": 0}))

    with (
        patch.object(serve, "MOST_SITE_SECONDS", 0.0),
        deployment(model, operator) as (flower, _),
        pytest.raises(UnavailableError, match="without a session: no reply to"),
    ):
        served(model, flower, operator, ask)
    ((status, reason),) = told
    assert status == 503
    assert "no reply to query.score from site" in reason


def test_a_session_that_lets_others_use_the_site_is_opened_again_at_once(model):
    with (
        tempfile.TemporaryDirectory(prefix="tp-") as name,
        sessions(STORE, Path(name), seconds=1.0, stays=True, state=model.state) as (
            grid,
            _,
            flower,
        ),
    ):
        predicting(model.manifest, model.sql).start(grid)
        opened = dict.fromkeys(((node, OPENING) for node in flower.contexts), 3)
        # nobody has sent anything
        wait_until(lambda: Counter(flower.asked) >= Counter(opened))
        predict = predicting(model.manifest, model.sql)
        predict.start(grid)
    assert predict.predictions.equals(model.table(STORE))


def test_the_operator_s_file_says_where_and_for_whom(operator):
    address, file = read_scorer_file(operator)
    assert (address.host, address.token, file.refresh) == ("127.0.0.1", TOKEN, 0.0)


@pytest.mark.parametrize(("line", "reason"), CASES["files"])
def test_files_that_are_refused(operator, line, reason):
    operator.write_text(f'token-file = "token"\n{line}\n')
    with pytest.raises(SettingsError, match=reason) as refused:
        read_scorer_file(operator)
    assert str(refused.value).startswith(f"the scorer's file {operator}: ")
    operator.unlink()
    with pytest.raises(SettingsError, match="No such file"):
        read_scorer_file(operator)


def test_the_command_leaves_the_address_to_the_operator():
    for options in (["--listen", "127.0.0.1:1"], ["--refresh", "5"]):
        reason = refused_by("serve", "m", "--superlink", "x", *options, status=2)
        assert "are in the operator's file" in reason
