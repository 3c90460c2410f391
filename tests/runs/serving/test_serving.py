"""A scorer that stays: its predictions, and what it answers to bad requests."""

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from strategies.serving import http_server, scorer, serve
from tests.support.federated import site_per_table, store, whole
from tests.support.files import case_table
from tests.support.ledgers import ledger_lines
from tests.support.predicted import on, train, train_store
from tests.support.serving.scorers import PATIENCE, by_row, serving
from tp_flower.errors import SettingsError
from tp_flower.settings import PrivacySettings

CASES = case_table(__file__)
STORE = on(whole, store())
ROWS = range(len(store()["orders"]))
DAYS = store()["orders"]["day"].to_list()
SCORE = "query.score"
ACCOUNTS = count()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    return train_store(folder, "squared", STORE, num_epochs=1)


def test_predictions_are_those_of_a_run_that_predicts(model):
    expected = by_row(model.table(STORE))
    with serving(model, STORE) as served:
        served.wait()
        answers = served.predict(*({"row": row} for row in ROWS))
        # a row that joins with nothing has no prediction
        assert answers == [expected.get(row, []) for row in ROWS]
        asked = served.rounds(SCORE)
        row = max(expected, key=lambda row: len(expected[row]))
        assert served.predict({"row": row}, {"row": row}) == [expected[row]] * 2
        assert served.rounds(SCORE) == asked + 3
        seen = [s for s in served.grid.seen if s.action == SCORE and s.is_reply]
        # one row's order, and its words under masks of their own
        whole_run, one = seen[0], seen[asked]
        assert one.arrays[0, "scores"].shape[0] == 1
        assert one.arrays[0, "scores"][0] not in whole_run.arrays[0, "scores"]


@pytest.mark.cases("logistic")
@pytest.mark.parametrize("loss", ["logistic", "softmax"])
def test_predictions_of_classes_by_their_row_keys(tmp_path, loss):
    model = train_store(tmp_path, loss, STORE, num_epochs=1)
    expected = model.table(STORE, row_key="o.day").to_pylist()
    hashes = by_row(model.table(STORE))
    with serving(model, STORE, row_key="o.day") as served:
        served.wait()
        days = sorted({DAYS[row] for row in hashes})
        answers = served.predict(*({"day": day} for day in days))
        # the hashes of the row keys differ from run to run
        order = [row for row in hashes for _ in hashes[row]]
        for day, answer in zip(days, answers, strict=True):
            of_day = [e for r, e in zip(order, expected, strict=True) if DAYS[r] == day]
            assert answer == [{name: one[name] for name in answer[0]} for one in of_day]
            assert math.isclose(
                sum(v for k, v in answer[0].items() if k.startswith("probability")), 1.0
            )
        status, reason = served.error({"day": 99}, {"day": days[0]})
        assert (status, reason) == (404, "no row of the label table has keys[0]")


def test_rows_without_a_partner_are_predicted_beside_others(tmp_path):
    sql = "FROM orders o LEFT JOIN customers c ON o.customer = c.id"
    frames = {name: store()[name] for name in ("orders", "customers")}
    sites = on(whole, frames)
    query = f"SELECT o.qty AS label, o.day, c.age, c.region {sql}"
    model = train(tmp_path, sites, query, num_epochs=1)
    expected = by_row(model.table(sites))
    alone = [r for r in ROWS if frames["orders"]["customer"][r] not in range(12)]
    assert 1 in alone
    with serving(model, sites) as served:
        served.wait()
        for rows in ([0], [1], [0, *alone], [3]):
            answers = served.predict(*({"row": row} for row in rows))
            assert answers == [expected[row] for row in rows]


@pytest.fixture(scope="module")
def served(model):
    with serving(model, STORE) as served:
        served.wait()
        yield served


@pytest.mark.parametrize(("body", "status", "reason"), CASES["bodies"])
def test_malformed_requests_are_told_which_field(served, body, status, reason):
    asked = served.rounds(SCORE)
    found, _, content = served.ask(body=body.encode())
    assert found == status
    assert reason in content["error"]
    assert served.rounds(SCORE) == asked


def test_too_large_requests_are_refused(served, monkeypatch):
    body = b'{"keys": [' + b" " * http_server.MOST_BYTES + b"]}"
    assert served.ask(body=body)[0] == 413
    keys = [{"row": 0}] * (serve.MOST_KEYS + 1)
    assert served.error(*keys)[0] == 413
    monkeypatch.setattr(serve, "MOST_PREDICTIONS", 1)
    status, reason = served.error(*({"row": row} for row in ROWS))
    assert status == 413
    assert "send fewer" in reason
    assert served.ask(body=b"", **{"Content-Length": "many"})[0] == 400


@pytest.mark.parametrize(
    ("path", "body", "token", "status"),
    [
        ("/predict", {"keys": [{"row": 0}]}, "Bearer wrong", 401),
        ("/predict", {"keys": [{"row": 0}]}, f"Basic {'0' * 32}", 401),
        ("/metrics", None, "", 401),
        ("/healthz", None, "", 200),
        ("/predict", None, "", 404),
        ("/other", {}, "", 404),
    ],
)
def test_only_who_has_the_token_is_answered(served, path, body, token, status):
    found, headers, _ = served.ask(path, body, Authorization=token)
    assert found == status
    assert ("WWW-Authenticate" in headers) == (status == 401)


def test_requests_at_a_time_share_rounds_and_are_counted(model):
    expected = by_row(model.table(STORE))
    with serving(model, STORE) as served, ThreadPoolExecutor(20) as pool:
        served.wait()
        rows = [row % len(ROWS) for row in range(100)]
        answers = list(pool.map(lambda row: served.predict({"row": row}), rows))
        assert answers == [[expected.get(row, [])] for row in rows]
        assert served.rounds(SCORE) / 3 < len(rows)
        served.error({"row": -1})
        metrics = read_metrics(served)
    assert metrics['requests_total{status="200"}'] == len(rows)
    assert metrics['requests_total{status="404"}'] == metrics["errors_total"] == 1
    assert metrics["predictions_total"] == sum(len(a[0]) for a in answers)
    assert metrics["request_seconds_count"] == len(rows) + 1
    assert metrics['request_seconds_bucket{le="+Inf"}'] == len(rows) + 1
    assert metrics["rounds_total"] == 1 + served.rounds(SCORE) / 3
    assert metrics["bytes_total"] > 0
    assert metrics["up"] == 1


def read_metrics(served):
    """The samples by name, of which each has its type and its help before it."""
    _, headers, content = served.ask("/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    samples, described = {}, set()
    for line in content.decode().splitlines():
        if line.startswith("# "):
            described.add(line.split()[2])
            continue
        name, _, value = line.rpartition(" ")
        base = name.partition("{")[0]
        for suffix in ("_bucket", "_sum", "_count"):
            base = base if base in described else base.removesuffix(suffix)
        assert base in described
        samples[name.removeprefix("tp_flower_scorer_")] = float(value)
    return samples


def test_a_site_that_is_gone_is_named_until_it_is_back(model, monkeypatch):
    monkeypatch.setattr(scorer, "FIRST_PAUSE", 0.05)
    with serving(model, STORE, site_timeout=0.3, wait_seconds=0.1) as served:
        served.wait()
        expected = served.predict({"row": 0})
        gone = [*served.grid.contexts][[*STORE].index("customers")]
        context = served.grid.contexts.pop(gone)
        status, headers, content = served.ask(body={"keys": [{"row": 0}]})
        assert status == 503
        assert headers["Retry-After"] == "1"
        assert "no reply to query.score from site 'customers'" in content["error"]
        served.wait("was at")
        for path, body in (("/predict", {"keys": [{"row": 0}]}), ("/healthz", None)):
            status, _, content = served.ask(path, body)
            assert status == 503
            assert "('customers' was at 'customers')" in content["error"]
        # who has no token is not told who is missing
        _, _, content = served.ask("/healthz", Authorization="")
        assert content == {"error": "no session with the sites"}
        served.grid.contexts[gone] = context
        served.wait()
        assert served.predict({"row": 0}) == expected


def moved(frames, **rules):
    """Policies of tables that are not where the model was trained on them.

    Each time they have accounts of their own.
    """
    number = next(ACCOUNTS)
    return {
        name: f'budget-name = "{name} {number}"\n{rules.get(name, "")}'
        for name in frames
    }


def test_rows_that_are_added_are_read_after_a_while(model, tmp_path):
    frames = store()
    sites = site_per_table(tmp_path, frames, moved(frames))
    with serving(model, sites, refresh=0.5) as served:
        served.wait()
        assert served.error({"row": len(ROWS)})[0] == 404
        file = next((tmp_path / "orders").glob("*.csv"))
        with file.open("a") as rows:
            rows.write(file.read_text().splitlines()[1] + "\n")
        new = {"row": len(ROWS)}
        served.until(lambda: served.ask(body={"keys": [new]})[0] == 200)
        assert served.predict(new) == served.predict({"row": 0})


@pytest.fixture
def limited(model, tmp_path):
    """Serve the model at sites with policies, each of which has some rules."""

    def serve(**rules):
        frames = store()
        policies = moved(frames, **rules)
        return serving(model, site_per_table(tmp_path, frames, policies))

    return serve


def test_a_site_refuses_what_its_policy_does_and_answers_the_rest(limited):
    with limited(customers="min-rows = 2\n") as served:
        served.wait()
        status, reason = served.error({"row": 0})
        assert status == 403
        assert "site 'customers', table 'c'" in reason
        assert "min-rows" in reason
        assert all(served.predict(*({"row": row} for row in (0, 3, 4, 5))))
        assert served.rounds("query.extract") == 3


def test_every_request_counts_for_the_quota_and_is_in_the_ledger(limited, model):
    with limited(customers="queries-per-day = 3\n") as served:
        served.wait()
        begun = len(ledger_lines(model.state / "customers", "answer"))
        for rows in ((0,), (0, 3)):
            served.predict(*({"row": row} for row in rows))
        status, headers, content = served.ask(body={"keys": [{"row": 0}]})
        assert status == 429
        # the first of the three was a moment ago
        assert 86_400 - PATIENCE < int(headers["Retry-After"]) <= 86_400
        reason = content["error"]
        assert "(queries-per-day) refuses: 3 queries have read" in reason
    lines = ledger_lines(model.state / "customers", "answer")[begun:]
    assert [line["action"] for line in lines] == [SCORE, SCORE]
    assert lines[0]["rows"] == 1


def test_a_row_that_ends_a_session_is_refused_and_others_are_answered(model):
    frames = store()
    frames["orders"].loc[0, "day"] = 10**9
    with serving(model, on(whole, frames)) as served:
        served.wait()
        expected = served.predict({"row": 3})
        status, reason = served.error({"row": 0})
        assert status == 403
        assert "a score is out of range" in reason
        served.until(lambda: served.ask(body={"keys": [{"row": 3}]})[0] == 200)
        assert served.predict({"row": 3}) == expected
        assert served.rounds("query.extract") == 2 * 3


def test_scores_that_leave_by_rank_are_not_served(limited):
    with limited(items="scores-per-rank = 0.5\n") as served:
        served.wait("rank")
        status, reason = served.error({"row": 0})
        assert status == 503
        assert "the policies of 'items' let scores leave by the rank" in reason
        assert served.rounds("query.extract") == 0
    # what the message names; the fixture's policies have it where no rule is given
    with limited(items='scores-per-rank = "any"\ncover = 0\n') as served:
        served.wait()
        assert served.predict({"row": 0})


def test_noise_that_would_average_out_is_refused(model):
    privacy = PrivacySettings(predictions=1.0)
    refused = pytest.raises(
        SettingsError, match=r"privacy\.predictions: .* averages out"
    )
    with refused, serving(model, STORE, privacy=privacy):
        pass
