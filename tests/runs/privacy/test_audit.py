"""What a site's ledger says of every query of its tables, answered or refused."""

import calendar
import json
import multiprocessing
import time
from contextlib import suppress

import pytest

from client_apps.data import query_quota
from client_apps.data.ledger import Ledger, open_ledger
from strategies import Explain
from tests.support.command_line import printed_by, site_options
from tests.support.federated import train, write_site
from tests.support.peers.faulty_grid import forget_processes, rows_in
from tests.support.peers.hostile import (
    ORDERS_TEXT,
    SHOP,
    SQL,
    HostileGrid,
    header,
    ledger_lines,
    tables,
)
from tests.support.peers.hostile_runs import refused
from tests.support.predicted import predicting, unlabelled
from tp_flower.errors import LedgerError, PolicyError, SiteError
from tp_flower.sources.shards import load_tables
from tp_flower.terms.fragment_text import text_digest

FIELDS = {
    *("seq", "time", "event", "run", "ident", "action", "round", "flower-run", "app"),
    *("part", "table", "site", "query", "digest", "proposal", "policy", "salt"),
    "checksum",
}
QUERY = {"table": "t", "source": "F"}
HOSTILE = "</td><script>alert(1)</script>'\"&\u202e"


def only(folder, *events):
    (line,) = ledger_lines(folder, "shop", *events)
    return line


def run(folder, method="admm", policy=None, sql=SQL, **settings):
    grid = HostileGrid(folder, policies={"orders": policy} if policy else None)
    settings.setdefault("num_epochs", 1)
    return train(grid, sql, method, **settings)


@pytest.mark.cases("Explain")
@pytest.mark.parametrize("method", ["admm", "sgd", Explain])
def test_a_run_leaves_one_line_for_each_table_that_it_reads(tmp_path, method):
    grid = HostileGrid(tmp_path)
    grid.contexts[SHOP].node_config["app-sha256"] = "ab" * 32
    method = train(grid, SQL, method, num_epochs=2, batch_size=5)
    for site, rows in (("shop", 12), ("us", 3), ("uk", 3)):
        (answer,) = ledger_lines(tmp_path, site)
        assert answer.keys() == FIELDS | {"source", "rows", "bytes"}
        assert answer["run"].startswith(method.session.run)
        assert (answer["action"], answer["rows"]) == ("query.extract", rows)
        assert answer["digest"] == text_digest(answer["query"])
        assert ledger_lines(tmp_path, site, "refuse") == []
        # the same rows as those of the releases, which tell what left and for how much
        notes = ledger_lines(tmp_path, site, "note")
        assert {note["release"]["source"] for note in notes} == {answer["source"]}
        assert {note["run"] for note in notes} == {answer["run"]}
    shop = only(tmp_path)
    assert shop["query"] == ORDERS_TEXT
    (source,) = load_tables(str(tmp_path / "shop" / "tables.toml"))
    assert shop["policy"] == source.policy.digest
    assert shop["app"] == "ab" * 32
    assert shop["flower-run"] == grid.contexts[SHOP].run_id


def test_a_prediction_is_a_query_of_its_own(tmp_path):
    trained = run(tmp_path)
    training = only(tmp_path)
    strategy = predicting(trained, unlabelled(SQL))
    strategy.start(HostileGrid(tmp_path))
    first, second = ledger_lines(tmp_path, "shop")
    assert first == training
    assert second["run"].startswith(strategy.session.run)
    assert second["source"] == first["source"]
    # it reads no label
    assert second["query"] == ORDERS_TEXT.replace('label: "qty"\n', "")


def test_a_refused_query_is_written_down_with_its_reason(tmp_path):
    # the server knows no such column: an honest one does not ask for it
    change = header("parts", 0, "fragment", "features", value=[["salary", '"salary"']])
    text = refused(tmp_path, "query.extract", SHOP, change)
    assert "reads column 'salary'" in text
    line = only(tmp_path, "refuse")
    assert line.keys() == FIELDS - {"ident"} | {"reason"}
    assert line["reason"] == text
    assert 'feature "salary": "salary"' in line["query"].split("\n")
    assert ledger_lines(tmp_path, "shop") == []


def test_refusals_of_later_messages_name_the_table(tmp_path):
    levels = 'labels = "clear", models = "private", statistics = "clear"'
    with pytest.raises(SiteError, match=r"releases\.models = private"):
        run(tmp_path, policy=f"releases = {{ {levels} }}\nepsilon = 0.5")
    line = only(tmp_path, "refuse")
    assert [line["action"], line["part"]] == ["train.prepare", only(tmp_path)["part"]]
    assert "source" not in line


def test_refusals_do_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(query_quota, "MOST_REFUSALS", 3)
    ledger = Ledger(str(tmp_path))
    line = {"table": "t", "reason": "no"}
    for number in range(5):
        ledger.record("1-a", "refuse", [{**line, "query": number}] * 2, {})
    # tomorrow is another day, and what rows were read for is always written
    ledger.record("1-a", "refuse", [{**line, "query": "read", "source": "F"}], {})
    now = time.time() + query_quota.DAY_SECONDS + 2
    monkeypatch.setattr(query_quota.time, "time", lambda: now)
    ledger.record("1-a", "refuse", [{**line, "query": "tomorrow"}], {})
    # a run that only was refused has nothing to close
    ledger.close("1-a")
    ledger.record("1-a", "refuse", [{**line, "query": "then"}], {})
    lines = [json.loads(line) for line in ledger.export()]
    texts = [line["query"] for line in lines]
    assert texts == [0, 0, 1, 1, "read", "tomorrow", "then"]
    # of seven beyond the three, the first has a line, and the next day's tells of all
    assert [line.get("beyond", 0) for line in lines] == [0, 0, 0, 1, 0, 7, 0]


def test_a_table_answers_so_many_queries_a_day(tmp_path, monkeypatch):
    policy = "queries-per-day = 2"
    for _ in range(2):
        run(tmp_path, policy=policy)
    first = ledger_lines(tmp_path, "shop")[0]
    day = query_quota.DAY_SECONDS
    start = calendar.timegm(time.strptime(first["time"], query_quota.TIME))
    free = time.strftime(query_quota.TIME, time.gmtime(start + day))
    text = r"y\) refuses: 2 queries have read table orders within 24 hours; .* may at "
    with pytest.raises(SiteError, match=text + free):
        run(tmp_path, policy=policy)
    assert "source" not in only(tmp_path, "refuse")
    # another table at another site is free, and the first is a day later
    assert len(ledger_lines(tmp_path, "us")) == 3
    monkeypatch.setattr(query_quota.time, "time", lambda: start + day + 0.5)
    run(tmp_path, policy=policy)
    assert len(ledger_lines(tmp_path, "shop")) == 3


def answer_all(root, run, times):
    ledger = Ledger(root)
    answered = 0
    for number in range(times):
        with suppress(PolicyError):
            line = {**QUERY, "ident": f"{run} {number}"}
            ledger.record(run, "answer", [line], {"F": 5})
            answered += 1
    return answered


def test_processes_do_not_share_the_last_query_of_a_quota(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        runs = [(str(tmp_path), f"{n}-a", 20) for n in range(2)]
        assert sum(pool.starmap(answer_all, runs)) == 5
    # what is answered again counts once
    ledger = Ledger(str(tmp_path))
    ident = json.loads(next(ledger.export()))["ident"]
    ledger.record(ident.split()[0], "answer", [{**QUERY, "ident": ident}], {"F": 5})
    assert len(list(ledger.export())) == 5


def test_a_changed_line_breaks_the_chain(tmp_path):
    run(tmp_path)
    forget_processes()
    path = tmp_path / "shop" / "state" / "site.db"
    rows_in(path, "UPDATE ledger SET line = replace(line, 's\":12', 's\":11')")
    with pytest.raises(LedgerError, match=r"the checksum of line \d+ does not match"):
        Ledger(str(path.parent)).spent("F")


def page_of(folder):
    file = folder / "page.html"
    printed_by("account", *site_options(folder), "--page", file)
    assert file.stat().st_mode & 0o077 == 0
    return file.read_text(encoding="utf-8")


def test_the_export_has_every_line_and_the_page_shows_them(tmp_path):
    run(tmp_path)
    with pytest.raises(SiteError, match="too few rows"):
        run(tmp_path, sql=f"{SQL} WHERE o.day > 900")
    text = printed_by("account", "--export", *site_options(tmp_path)[2:])
    exported = list(map(json.loads, text.splitlines()))
    rows = rows_in(tmp_path / "shop" / "state" / "site.db", "SELECT line FROM ledger")
    checksums = [{"checksum": line["checksum"]} for line in exported]
    written = [json.loads(line) for (line,) in rows]
    assert exported == [a | b for a, b in zip(written, checksums, strict=True)]
    text = page_of(tmp_path)
    answer = only(tmp_path)
    refused_line = only(tmp_path, "refuse")
    # it was refused after its rows had been read
    assert (refused_line["rows"], refused_line["source"]) == (0, answer["source"])
    recipients = [to for n in exported for to in n.get("groups", {}).values()]
    assert recipients
    for piece in (
        *(answer["time"], answer["run"][:8], answer["digest"], answer["policy"][:8]),
        *(refused_line["digest"], "too few rows", exported[-1]["checksum"]),
        *("keys", "labels", "not covered"),
        *(key for to in recipients for key in to),
    ):
        assert piece in text, piece
    for piece in ("Account of shop", "to whom", "server", "Queries within 24 hours"):
        assert piece in text, piece
    # a run's name grants the right to continue it
    assert answer["run"] not in text


def test_nothing_in_a_ledger_becomes_html(tmp_path):
    file = write_site(tmp_path / "shop", tables()["shop"])
    name = json.dumps(HOSTILE[:-1])
    file.write_text(f"[tables.{name}]\npath = 'orders.csv'\nsite = {name}\n")
    ledger = open_ledger(str(tmp_path / "shop" / "state"))
    fields = ("query", "reason", "table", "site", "action", "digest", "policy", "app")
    hostile = dict.fromkeys((*fields, "flower-run"), HOSTILE)
    ledger.record(HOSTILE, "refuse", [hostile], {})
    ledger.record(HOSTILE, "answer", [{**hostile, "source": HOSTILE}], {})
    text = page_of(tmp_path)
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
