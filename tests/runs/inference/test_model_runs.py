"""What a run leaves of its model: parts at the sites, a manifest at the server."""

import re

import numpy as np
import pandas as pd
import pytest
from flwr.app import Message

import strategies.app
from client_apps.data.saved_models import SavedModel, part_folder
from client_apps.operator.participant import score_sums
from strategies import TablePuppetADMM
from strategies.inference.manifest import resolve, write_manifest
from strategies.run.exchange import Replies, ask
from strategies.run.replies import collect_replies
from strategies.training.saving import make_manifest
from tests.support.federated import LocalGrid, WatchedGrid, train, write_site
from tests.support.files import case_table, read_json
from tests.support.policies import OPEN, lenient
from tests.support.predicted import scores_of
from tp_flower.errors import ModelError, ReplyError, SourceError
from tp_flower.heads import Sum
from tp_flower.protocol.inference_messages import FinishRequest
from tp_flower.protocol.packet import Packet, pack, unpack
from tp_flower.query import Query
from tp_flower.reports.records import report_dict
from tp_flower.settings import PrivacySettings, Settings
from tp_flower.sources.shards import load_tables

CASES = case_table(__file__)
ROWS = 40
NOISY = PrivacySettings(features="statistics", epsilon=5.0)
SQL = "SELECT o.qty AS label, o.price, c.age, c.kind FROM o LEFT JOIN c ON o.c = c.id"


def frames():
    rng = np.random.default_rng(8)
    price = rng.normal(size=ROWS)
    customer = np.arange(ROWS) % 9
    age = rng.integers(20, 70, size=8).astype(float)
    orders = pd.DataFrame({"c": customer, "price": price})
    orders["qty"] = price + 0.1 * np.append(age, 0)[customer]
    people = pd.DataFrame({"id": range(8), "age": age, "kind": list("ggggssss")})
    # customer 8 is in no table of customers
    return orders, people


def sites(folder, policy=""):
    """Two sites, the customers in two shards, from files with a policy."""
    orders, people = frames()
    tables = {"o": orders, "us": people[:5], "uk": people[5:]}
    for name, frame in tables.items():
        frame.to_csv(folder / f"{name}.csv", index=False)
    (folder / "shop.toml").write_text("[tables.o]\npath='o.csv'\nsite='shop'\n" + OPEN)
    shards = "".join(
        f"[[tables.c.shards]]\npath='{name}.csv'\nsite='{name}'\n"
        for name in ("us", "uk")
    )
    rules = f"[tables.c]\n{OPEN}"
    if policy:
        rules = f"[tables.c.policy]\n{lenient(people.columns, policy)}\n"
    (folder / "bank.toml").write_text(rules + shards)
    return {name: folder / f"{name}.toml" for name in ("shop", "bank")}


def run(folder, method="admm", policy="", sql=SQL, **settings):
    grid = WatchedGrid(sites(folder, policy), state=folder / "state")
    how = {"num_epochs": 3, "test_fraction": 0.0, "validation_fraction": 0.0}
    return train(grid, sql, method, **how | settings), grid


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that others only look at: its folder and its strategy."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, run(folder, model_name="qty")[0]


def test_manifest_says_what_the_sites_keep(trained):
    folder, strategy = trained
    write_manifest(folder / "home", make_manifest(strategy))
    manifest = resolve(folder / "home", "qty")
    assert manifest.model == strategy.model
    assert manifest.created == strategy.report.started
    assert manifest.label_table == "o"
    assert manifest.label == '"qty"'
    assert manifest.base_score == (pytest.approx(frames()[0].qty.mean()),)
    assert manifest.joined_rows == ROWS
    assert manifest.query == strategy.query.to_sql()
    assert Settings.from_run_config(manifest.settings) == strategy.settings
    parts = [part for table in manifest.tables for part in table.parts]
    places = [(part.site, part.name, part.index) for part in parts]
    assert places == [("shop", "o", 0), ("us", "c", 0), ("uk", "c", 1)]
    assert manifest.table("c").features == ('age = "age"', 'kind = "kind"')
    assert manifest.table("c").columns["c"].keys() == {"id", "age", "kind"}
    assert manifest.table("c").encoded == strategy.training_problem.encoders["c"]
    for part in parts:
        kept = kept_by(folder, part.site, strategy, part.number)
        assert SavedModel.load(kept, part.digest).fragment.name == part.name


@pytest.mark.parametrize(
    ("method", "how"),
    [
        (None, {}),
        ("boost", {"min_rows_per_leaf": 1, "lou": "local"}),
        ("boost", {"min_rows_per_leaf": 1, "lou": "bagged"}),
        ("cg", {}),
        ("sgd", {"batch_size": 10}),
    ],
    ids=["admm", "boost", "bagged", "cg", "sgd"],
)
def test_manifest_says_what_the_tables_add(trained, tmp_path, method, how):
    folder, strategy = trained
    if method is not None:
        folder, (strategy, _) = tmp_path, run(tmp_path, method, **how)
    # by hand: the final parameters on the encoded features of the joined rows
    orders, people = frames()
    own = {
        "o": encoded_scores(folder, strategy, [0], [orders[["price"]]]),
        "c": encoded_scores(folder, strategy, [1, 2], [people[:5], people[5:]]),
    }
    joined = {"o": own["o"], "c": np.append(own["c"], 0.0)[orders.c]}
    whole = sum(scores.var() for scores in joined.values())
    for name, scores in joined.items():
        table = make_manifest(strategy).table(name)
        assert table.mean_score == pytest.approx([scores.mean()], abs=1e-5)
        assert table.share == pytest.approx(scores.var() / whole, abs=1e-5)


def encoded_scores(folder, strategy, numbers, frames):
    """What the parts that the sites keep make of data frames, (n,)."""
    found = []
    for number, frame in zip(numbers, frames, strict=True):
        kept = kept_by(folder, "bank" if number else "shop", strategy, number)
        found.append(scores_of(SavedModel.load(kept), frame)[:, 0])
    return np.concatenate(found)


def kept_by(folder, site, strategy, number):
    """Where a site keeps a part of the run's model."""
    state = folder / "state" / ("shop" if site == "shop" else "bank")
    return part_folder(state, strategy.model, number)


def test_report_says_where_the_model_is_and_what_the_tables_add(trained):
    _, strategy = trained
    report = report_dict(strategy.report)
    assert report["model"] == str(make_manifest(strategy).model)
    shares = [own["share"] for own in report["contributions"].values()]
    assert sum(shares) == pytest.approx(1.0)
    assert report["coefficients"] == {}


def test_a_run_that_has_not_ended_has_no_manifest(tmp_path):
    found = []

    def look(report):
        if report.train:
            found.append(strategy.report.model)
            with pytest.raises(RuntimeError, match="no model before the run has ended"):
                make_manifest(strategy)

    strategy = TablePuppetADMM(Query.from_sql(SQL), num_epochs=1, on_round=look)
    strategy.start(LocalGrid(sites(tmp_path)))
    assert found == [""]
    # without a state folder the sites keep nothing
    tables = make_manifest(strategy).tables
    assert {part.digest for table in tables for part in table.parts} == {""}


def test_shares_of_weighted_rows_and_several_outputs_are_those_of_repeated_rows():
    rng = np.random.default_rng(3)
    row_of = {"a": rng.integers(0, 4, 12), "b": rng.integers(-1, 3, 12)}
    scores = {name: rng.normal(size=(4, 3)) for name in row_of}
    weights = rng.integers(1, 4, 12).astype(float)
    weights *= 12 / weights.sum()
    sums = {}
    for name, of in row_of.items():
        masses = np.bincount(of + 1, weights, minlength=5)[1:]
        # of two shards
        halves = (slice(0, 1), slice(1, 4))
        sums[name] = sum(score_sums(scores[name][h], masses[h]) for h in halves)
    found = Sum(3).contributions(sums, 12)
    joined = {
        name: np.where(of[:, None] < 0, 0.0, scores[name][of])
        for name, of in row_of.items()
    }
    mean = {name: np.average(h, axis=0, weights=weights) for name, h in joined.items()}
    spread = {
        name: np.average((h - mean[name]) ** 2, axis=0, weights=weights).sum()
        for name, h in joined.items()
    }
    for name in joined:
        whole = sum(spread.values())
        assert found[name].share == pytest.approx(spread[name] / whole)
        assert found[name].mean_score == pytest.approx(mean[name])
    # a table that adds the same to every row has no share
    constant = {"a": score_sums(np.array([[2.0]]), np.array([2]))}
    found = Sum(1).contributions(constant, 2)["a"]
    assert (found.share, found.mean_score) == (0.0, 2.0)


def test_keeping_a_part_again_changes_nothing_and_another_is_not_replaced(trained):
    folder, strategy = trained
    folder = kept_by(folder, "shop", strategy, 0)
    saved = SavedModel.load(folder)
    before = folder.stat().st_mtime_ns
    digest = make_manifest(strategy).tables[0].parts[0].digest
    assert saved.keep(folder) == digest
    assert folder.stat().st_mtime_ns == before
    saved.parameters[0] += 1.0
    with pytest.raises(ModelError, match="already holds another model"):
        saved.keep(folder)
    assert saved.keep(folder.with_name("part-9")) != digest
    with pytest.raises(ModelError, match="its digest differs"):
        SavedModel.load(folder.with_name("part-9"), digest)


@pytest.mark.parametrize(("name", "version", "match"), CASES["paths"])
def test_names_that_could_be_paths_keep_no_model(tmp_path, name, version, match):
    grid = LocalGrid({"shop": {"o": frames()[0]}}, state=tmp_path)
    asked = {"keep-models": True, "model-name": name, "model-version": version}
    header = {"run": "ab" * 16, "round": 1, "after": None, **asked}
    (node,) = grid.contexts
    sent = Message(pack(Packet(header)), node, "query.finish", group_id="1")
    (reply,) = grid.send_and_receive([sent])
    assert re.search(match, unpack(reply.content).header["error"])
    assert not list(tmp_path.rglob("part-*"))


def outcome_of(strategy, arrays, **names):
    """The outcome of a run whose last reply has these arrays, and names, by part."""
    federation = strategy.training_problem
    asked = [0, *(int(number.removeprefix("of_")) for number in names)]
    parts = [part for part in federation.parts if part.number in asked]
    request = ask(FinishRequest(), parts)
    replies = []
    for node in dict.fromkeys(part.node for part in parts):
        own = [part.number for part in parts if part.node == node]
        listed = [
            {"id": number, "names": names.get(f"of_{number}", [])} for number in own
        ]
        header = {"round": 9, "seconds": 0.0, "ledger": [], "parts": listed}
        sent = {key: array for key, array in arrays.items() if key[0] in own}
        content = pack(Packet(header, sent))
        replies.append((node, Message(content, node, "query.finish")))
    where = {part.node: part.site for part in parts}
    collected = collect_replies(request, replies, where)
    return strategy.method.outcome_of(Replies.of(collected.answers), federation)


def test_a_site_that_did_not_answer_has_no_digest(trained):
    _, strategy = trained
    federation = strategy.training_problem
    outcome = strategy.method.outcome_of(Replies({}, {}), federation)
    assert outcome.digests == {0: "", 1: "", 2: ""}


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.zeros((9, 1)), r"sent 'coefficients' of shape \(9, 1\), expected \(2, 1\)"),
        (np.full((2, 1), np.nan), "'coefficients' has numbers that are not finite"),
    ],
    ids=["shape", "nan"],
)
def test_coefficients_that_are_none_are_refused(trained, array, match):
    with pytest.raises(ReplyError, match=rf"site 'shop' \(table 'o'\) .*{match}"):
        outcome_of(trained[1], {(0, "coefficients"): array})


OF_C = np.zeros((3, 1))
"""Coefficients of the customers' three columns."""
TOLD = {(1, "coefficients"): OF_C, (2, "coefficients"): OF_C}
NAMED = ["age", "kind=g", ""]


def test_a_column_has_the_name_of_whichever_shard_knows_it(trained):
    told = {"of_1": NAMED, "of_2": ["age", "", "kind=s"]}
    found = outcome_of(trained[1], TOLD, **told)
    assert found.names["c"] == ("age", "kind=g", "kind=s")
    assert outcome_of(trained[1], TOLD, of_1=NAMED).names["c"][2] == "kind[1]"
    # the text of one shard may be what another calls its missing values
    like = outcome_of(trained[1], TOLD, of_1=["age", "x", ""], of_2=["age", "", "x"])
    assert like.names["c"] == ("age", "kind[0]", "kind[1]")


@pytest.mark.parametrize(
    ("names", "match"),
    [
        ({"of_1": NAMED[:2]}, "'us' .*sent 2 names of 3 columns"),
        ({"of_1": ["age", "kind=\u202eg", ""]}, "'us' .*is not printable"),
        ({"of_1": ["age", "x" * 201, ""]}, "'us'.*names"),
        ({"of_0": ["price"]}, "'shop' .*without their coefficients"),
        (
            {"of_1": NAMED, "of_2": ["age", "kind=s", ""]},
            r"'uk' .*another name of column kind\[0\] than site 'us'",
        ),
    ],
    ids=["count", "invisible", "long", "hidden", "disagree"],
)
def test_names_that_no_table_can_show_are_refused(trained, names, match):
    with pytest.raises(ReplyError, match=match):
        outcome_of(trained[1], TOLD, **names)


def shown_by(grid) -> set[int]:
    sent = grid.arrays("query.finish", replies=True)
    return {number for number, name in sent if name == "coefficients"}


def test_coefficients_leave_where_the_policy_says_so_and_are_noted(tmp_path):
    strategy, grid = run(tmp_path, policy="coefficients = true\nmin-count = 2")
    assert shown_by(grid) == {1, 2}
    report = report_dict(strategy.report)
    assert report["coefficients"].keys() == {"c"}
    shown = report["coefficients"]["c"]
    saved = SavedModel.load(kept_by(tmp_path, "us", strategy, 1), "")
    assert [own["value"] for own in shown] == pytest.approx(saved.parameters.tolist())
    names = strategy.training_problem.encoders["c"].names
    assert tuple(own["feature"] for own in shown) == names
    # what categories are called stays at the sites
    assert set(names) == {"age", "kind[0]", "kind[1]", "kind[2]"}
    sent = grid.sent("query.finish", replies=True)
    assert not any("kind=" in str(seen.header) for seen in sent)
    totals = report["privacy"]["totals"]
    told = {own["site"] for own in totals if "coefficients" in own["uncovered"]}
    assert told == {"us", "uk"}


def test_categories_are_named_by_those_who_have_enough_of_them(tmp_path):
    """The customers are four of kind g and one of kind s at one site, three s next."""
    rules = "coefficients = true\nmin-count = {}\nreleases.categories = 'clear'"
    named = {}
    for least in (2, 4):
        folder = tmp_path / str(least)
        folder.mkdir()
        strategy, grid = run(folder, policy=rules.format(least))
        report = report_dict(strategy.report)
        named[least] = {own["feature"] for own in report["coefficients"]["c"]}
        told = {
            part["id"]: {*part.get("names", ()), *part.get("categories", ())}
            for seen in grid.sent("query.finish", replies=True)
            for part in seen.header["parts"]
        }
        assert told[1] == {"age", "kind=g", ""}
        assert told[2] == {"age", "kind=s" if least == 2 else "", ""}
        totals = report["privacy"]["totals"]
        noted = {own["site"] for own in totals if "categories" in own["uncovered"]}
        assert noted == ({"us", "uk"} if least == 2 else {"us"})
    # the last column is of the others, of whom there are none
    assert named[2] == {"age", "kind=g", "kind=s", "kind[2]"}
    assert named[4] == {"age", "kind=g", "kind[1]"}
    # nothing but the report has them
    assert "kind=g" not in str(make_manifest(strategy))


def test_coefficients_of_the_label_table_have_its_intercept(tmp_path):
    orders, _ = frames()
    # a table that is not joined has nothing to mask its scores with
    policies = {"o": "coefficients = true\nreleases = { scores = 'clear' }"}
    path = write_site(tmp_path, {"o": orders}, policies)
    sql = "SELECT CASE WHEN c > 5 THEN 'x' WHEN c > 2 THEN 'y' ELSE 'z' END AS label, "
    strategy = train({"shop": path}, f"{sql} price FROM o", num_epochs=1)
    shown = report_dict(strategy.report)["coefficients"]["o"]
    assert [own["feature"] for own in shown] == ["price"] * 3 + ["(intercept)"] * 3
    assert [own["output"] for own in shown] == [*"xyzxyz"]


@pytest.mark.parametrize(
    ("policy", "privacy", "parts"),
    [
        ("", PrivacySettings(), set()),
        ("coefficients = true\n", NOISY, {1, 2}),
    ],
    ids=["not allowed", "private"],
)
def test_coefficients_of_private_models_cost_nothing_more(
    tmp_path, policy, privacy, parts
):
    strategy, grid = run(tmp_path, policy=f"{policy}min-count = 2", privacy=privacy)
    assert shown_by(grid) == parts
    totals = report_dict(strategy.report)["privacy"]["totals"]
    assert not any("coefficients" in own["uncovered"] for own in totals)


@pytest.mark.parametrize(("policy", "match"), CASES["refused-policies"])
def test_a_policy_about_coefficients_that_is_refused(tmp_path, policy, match):
    with pytest.raises(SourceError, match=match):
        load_tables(str(sites(tmp_path, policy)["bank"]))


def test_train_writes_the_manifest_and_says_so(home, tmp_path):
    grid = LocalGrid(sites(tmp_path), state=tmp_path / "state")
    settings = Settings(num_epochs=1, model_name="qty", output_dir=str(tmp_path))
    query = Query.from_sql(SQL)
    completed = strategies.app.train(query, settings, lambda _: None, grid, tmp_path)
    model = str(resolve(home, "qty").model)
    assert completed.model == model
    assert read_json(tmp_path / "report.json")["model"] == model
