"""A server that asks for what it should not gets a refusal, and nothing leaves."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from client_apps.rounds.site import Site
from client_apps.training import prepare
from strategies import Explain
from tests.support.examples.site_examples import noise_of_known_keys
from tests.support.files import case_table
from tests.support.peers.hostile import (
    ORDERS,
    POLICIES,
    SHOP,
    SQL,
    UK,
    US,
    US_PART,
    HostileGrid,
    StoppedError,
    array,
    arrays,
    change_of,
    header,
    renumbered,
    train,
    undeclared,
    wrong_arrays,
    wrong_headers,
)
from tests.support.peers.hostile_runs import (
    RUNS,
    answers_to,
    check_all_refused,
    check_refusals,
    once,
    refusal,
    refusals,
    refused,
    spread,
)
from tp_flower.errors import MessageError, QueryError, SiteError
from tp_flower.privacy.accounting import epsilon, noise_multiplier
from tp_flower.privacy.key_agreement import (
    GroupSecret,
    KeyPair,
    PublicKeys,
    SiteKeys,
    sealed_name,
)
from tp_flower.privacy.mechanisms import Gaussian
from tp_flower.protocol.packet import Packet, pack_bits
from tp_flower.protocol.training_messages import PrivacyTerms
from tp_flower.settings import PrivacySettings

# with random keys, the noisy labels of ten rows are all alike once in 10^4 runs
__all__ = ["noise_of_known_keys"]

CASES = case_table(__file__)
ROWS = 12
REQUESTS = Path(__file__).with_name("refused_requests.toml")
FRAGMENT = ("parts", 0, "fragment")
NODES = {"shop": SHOP, "us": US}
UNDECLARED = "not declared|none are declared|not listed|there to another request"
ALWAYS = {"query.describe", "query.seal", "query.extract"}
TOO_FEW = r"\(min-rows\) refuses: the"
SINGLE = arrays(
    ORDERS,
    trained=pack_bits(np.arange(ROWS) == 4),
    multiplicity=np.ones(1, np.int32),
)
PRIVATE = PrivacySettings(features="dp-sgd", epsilon=1.0)
EXACT = PrivacySettings(features="statistics", epsilon=1.0)
OF_SGD = {"share", "batch-scores", "tested-scores"}
OF_ADMM = {"share"}
NO_NOISE = "its plan has no noise for"
OTHER_METHOD = "is no message of a run by"
NOT_EXACT = "is for linear models that are fitted exactly, not for "
NOISY = replace(PRIVATE, noise_multiplier=1.0)
MOMENTS_ALONE = "releases = { statistics = 'moments' }"
BUDGET = """
    epsilon = 2.0
    delta = 1e-4
    releases = { labels = "clear", scores = "clear", statistics = "moments" }
"""
SUBQUERY = {
    "columns": [["price", 'AVG("price")'], ["day", '"day"'], ["cust", 'MIN("cust")']],
    "filters": [],
    "groups": ['"day"'],
    "having": [],
}


# tests/adversary/test_fuzz.py sends thousands more
@pytest.mark.cases("explain", "consensus")
@pytest.mark.parametrize("run", RUNS)
def test_a_malformed_request_is_refused_and_changes_nothing(tmp_path, run):
    """Each request with one name more, and each action's first, wrong in every way."""
    method, settings = RUNS[run]
    seen = set()

    def hostile(action, node, packet):
        more = list(undeclared(packet))
        yield from ((UNDECLARED, changed) for _, changed in more)
        if (action, node) not in seen and node != UK:
            seen.add((action, node))
            yield from spread(list(wrong_headers(packet))[len(more) :], 5, 41)
            yield from spread(wrong_arrays(packet), 5, 41)

    grid = HostileGrid(tmp_path, hostile)
    fuzzed = train(grid, method, **settings)
    assert {answer.action for answer in grid.answers} >= {*ALWAYS, "query.finish"}
    check_refusals(grid.answers)
    for answer in grid.answers:
        if answer.what == UNDECLARED:
            assert re.search(UNDECLARED, answer.error), answer
    # no refusal has changed anything
    if method is not Explain:
        plain = train(HostileGrid(tmp_path), method, **settings)
        assert fuzzed.report.final_train == plain.report.final_train


EVERYTHING = {"labels": "randomised-response", "label_epsilon": 2.0, "predictions": 4.0}
DECLARED = (
    ("c", "age", "range(0, 300)"),
    ("c", "kind", "categories(k0, k1)"),
    ("o", "price", "range(-5, 5) indicator"),
)


# of numbers at the end of what a float can be
@pytest.mark.cases(
    "query.statistics-us-admm-statistics-settings1",
    "train.consensus-us-admm-dp-sgd-settings6",
)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("action", "site", "method", "features", "settings"), CASES["private"]
)
def test_a_malformed_request_of_a_private_run_is_refused(
    tmp_path, action, site, method, features, settings
):
    def hostile(asked, at, packet):
        if (asked, at) == (action, NODES[site]):
            yield from spread(wrong_headers(packet), 3, 11)
            yield from spread(wrong_arrays(packet), 3, 11)

    grid = HostileGrid(tmp_path, hostile, stops=True)
    with pytest.raises(StoppedError):
        train(
            grid,
            method,
            sql=SQL.replace("o.qty AS", "o.qty > 0 AS"),
            privacy=PrivacySettings(features=features, **EVERYTHING),
            encoders=DECLARED,
            **settings,
        )
    check_refusals(grid.answers)


def doubled(packet):
    return Packet({**packet.header, "parts": packet.header["parts"] * 2}, packet.arrays)


def check_refused(folder, run, site, action, change, match, **more):
    method, settings = RUNS[run]
    settings = {**settings, **more}
    answer = refusal(folder, action, NODES[site], change, method, **settings)
    assert re.search(match, f"part {answer.header.get('part')}: {answer.error}")


@refusals(REQUESTS, "malformed", "policy", "secret")
def test_what_is_malformed_against_the_policy_or_about_keys_is_refused_and_named(
    tmp_path, run, site, action, change, match
):
    check_refused(tmp_path, run, site, action, change_of(change), match)


def subquery(**changes):
    return header(*FRAGMENT, "subquery", value={**SUBQUERY, **changes})


BY_DAY = subquery()
GROUPED = subquery(groups=['"salary"'])
HAVING = subquery(having=['AVG("salary") > 0'])


def another_branch(packet):
    """A second SELECT of a UNION ALL over the same shard, with a hidden column."""
    ((first),) = packet.header["parts"]
    second = {**first, "id": 9}
    second["fragment"] = {**first["fragment"], "features": [["price", '"salary"']]}
    proposal = packet.header["proposal"]
    number = str(first["id"])
    proposed = {**proposal["parts"][number], "fragment": second["fragment"]}
    proposal = {**proposal, "parts": {**proposal["parts"], "9": proposed}}
    parts = [first, second]
    return Packet(
        {**packet.header, "proposal": proposal, "parts": parts}, packet.arrays
    )


@refusals(REQUESTS, "shared")
def test_statistics_that_other_shards_may_not_learn(
    tmp_path, run, site, action, change, match
):
    change, policies = change_of(change), {"customers": MOMENTS_ALONE}
    check_refused(tmp_path, run, site, action, change, match, policies=policies)


def test_shares_of_sealed_sums_do_not_leave_in_the_clear(tmp_path):
    change = change_of("part.union.group gone")
    policies = {"customers": MOMENTS_ALONE}
    error = refused(tmp_path, "train.prepare", US, change, policies=policies)
    assert "releases.models = sealed" in error


def test_a_table_without_gram_matrices_takes_no_sum_of_them(tmp_path):
    change = arrays(US_PART, sum=np.ones(13))
    error = refused(
        tmp_path,
        "train.admm",
        US,
        change,
        lou="consensus",
        privacy=PrivacySettings(unions="clear"),
    )
    assert "'sum' does not go with update" in error


@pytest.mark.parametrize(
    ("action", "change", "match"),
    [
        ("query.extract", doubled, "part 0 is listed twice"),
        ("query.statistics", renumbered, "part 7 does not belong to this run at"),
        # a fragment against the policy is not run
        ("query.extract", GROUPED, "group 0 of the sub-query reads column 'sal"),
        ("query.extract", HAVING, "HAVING .* reads column 'salary'"),
        (
            "query.extract",
            BY_DAY,
            r"\(join-only\).* join key 0 reads column 'cust' in an express",
        ),
        # of a table in two shards, which share a key
        (
            "query.extract",
            another_branch,
            "'sealed': the run was proposed with .*'table-0'",
        ),
        # a single row has no statistics and no model
        (
            "query.statistics",
            SINGLE,
            f"{TOO_FEW} statistics of table 'o' would be of too few rows",
        ),
        (
            "train.prepare",
            SINGLE,
            f"{TOO_FEW} model of table 'o' would be of too few rows",
        ),
    ],
)
def test_parts_fragments_and_single_rows_that_the_shop_refuses(
    tmp_path, action, change, match
):
    check_refused(tmp_path, "admm", "shop", action, change, match)


def test_hidden_columns_do_not_exist_for_the_server(tmp_path):
    grid = HostileGrid(tmp_path)
    told = []
    grid._observe = lambda message: told.append(repr(message.content))
    train(grid)
    assert not any("salary" in text for text in told)
    hidden = SQL.replace("o.day", "o.salary")
    with pytest.raises(QueryError, match=r"(?s)salary.*columns: cust, price, day, qty"):
        train(HostileGrid(tmp_path), sql=hidden)


def test_a_rule_about_a_column_that_is_not_there_stops_the_run(tmp_path):
    grid = HostileGrid(tmp_path, policies={"orders": "join-only = ['custmer']"})
    match = r"table 'orders' .*its file.* its policy names an unknown column 'custmer'"
    with pytest.raises(SiteError, match=match):
        train(grid)


def test_rows_that_a_policy_refused_are_not_kept_for_other_requests(tmp_path):
    """After a fragment of one row there are no statistics of that row."""

    def lonely(action, _, packet):
        if action == "query.extract":
            return header(*FRAGMENT, "filters", value=['"price" > 1.5'])(packet)
        return packet

    grid = HostileGrid(tmp_path, instead=lonely)
    with pytest.raises(SiteError, match="min-rows"):
        train(grid)
    site = grid.site(SHOP)
    for lost in (site.source, site.extracted):
        with pytest.raises(MessageError, match="part 0 does not belong to this run"):
            lost(ORDERS)


@pytest.mark.parametrize("kind", ["labels", "models", "scores", "statistics"])
def test_releases_that_may_not_leave(tmp_path, kind):
    rules = POLICIES["orders"].replace('statistics = "moments"', "")
    rules = rules.replace("releases = {", f"releases = {{ {kind} = 'never'")
    # statistics leave tables in several shards alone
    table = "customers" if kind == "statistics" else "orders"
    rules = rules if table == "orders" else "releases = { statistics = 'never' }"
    grid = HostileGrid(tmp_path, policies={table: rules})
    with pytest.raises(SiteError, match=f"releases.{kind} = never.*none may leave"):
        train(grid)
    left = {(part, name) for _, part, name in grid.left if part == ORDERS}
    assert (ORDERS, "scores") not in left
    assert ((ORDERS, "label-values") in left) == (kind != "labels")


def batches(starts, rows):
    starts, rows = np.array(starts, np.int32), np.array(rows, np.int32)
    return arrays(US_PART, batch_start=starts, batch_rows=rows)


def test_a_batch_of_one_row_may_not_have_a_gradient_of_its_own(tmp_path):
    single = batches([0, 1, 3], [0, 1, 2])
    where = tmp_path, "train.prepare", US
    error = refused(
        *where,
        single,
        "sgd",
        policies={"customers": "min-rows = 2"},
        batch_size=12,
    )
    assert "a batch's gradient of table 'c' would be of too few rows" in error


def test_a_real_site_takes_no_secret_of_a_simulation(tmp_path):
    """Everybody knows that one: hashes under it are as good as none."""

    def known(action, node, packet):
        if (action, node) != ("query.extract", SHOP):
            return
        server = SiteKeys(KeyPair())
        secret = GroupSecret.of_simulation(1)
        run = int(packet.header["run"], 16)
        keys = packet.header["public-keys"]
        others = dict.fromkeys(keys, server.public.run.hex())
        for node, key in keys.items():
            shown = {"9": others[node], node: key}
            public = {n: PublicKeys(bytes.fromhex(own)) for n, own in shown.items()}
            forged = {}
            for group in packet.header["sealed"]:
                name = sealed_name(group, public.values())
                text = server.seal(secret, public[node], run, name).hex()
                forged[group] = {"members": ["9", node], "text": text}
            site_keys = dict.fromkeys(shown, "")
            forged_keys = {"public-keys": shown, "site-keys": site_keys}
            changed = {**packet.header, **forged_keys, "sealed": forged}
            yield key, Packet(changed, packet.arrays)

    grid = HostileGrid(tmp_path, known)
    train(grid)
    opened = "the run's secret is for simulations, and known to everybody"
    for answer in grid.answers:
        answer.check_nothing_left()
    assert sum(opened in answer.error for answer in grid.answers) == 1


def in_preparing(change):
    """A server that changes the requests to prepare training."""
    return lambda action, _, packet: (
        change(packet) if action == "train.prepare" else packet
    )


def as_sgd(packet):
    """Say that the run is one of SGD, and go on with ADMM."""
    outline = {**packet.header["outline"], "strategy": "sgd"}
    return Packet({**packet.header, "outline": outline}, packet.arrays)


@pytest.mark.parametrize(
    ("method", "privacy", "change", "stray", "match"),
    [
        ("sgd", PRIVATE, 'outline.strategy = "admm"', OF_SGD, OTHER_METHOD),
        ("admm", NOISY, as_sgd, OF_ADMM | {"parameters"}, OTHER_METHOD),
        ("admm", EXACT, 'part.update = "consensus"', OF_ADMM, "'linear' by 'cons"),
        ("admm", EXACT, 'part.model.kind = "mlp"', OF_ADMM, "'mlp' by"),
    ],
)
def test_what_the_plan_has_no_noise_for_does_not_leave(
    tmp_path, monkeypatch, method, privacy, change, stray, match
):
    """Even if the site did not know that another strategy was proposed."""
    monkeypatch.setattr(prepare, "agree_in_all", lambda *_: None)
    change = change if callable(change) else change_of(change)

    grid = HostileGrid(tmp_path, instead=in_preparing(change))
    match = NOT_EXACT + match if privacy == EXACT else match
    with pytest.raises(SiteError, match=match):
        train(grid, method, privacy=privacy)
    # statistics are sealed, too, and a Gram matrix with noise
    rounds = ("train.admm", "train.sgd", "train.consensus", "train.step")
    assert not stray & {name for action, _, name in grid.left if action in rounds}


def test_a_run_over_joins_begins_with_no_method_without_them(tmp_path):
    """The server may announce any method before its outline is compared."""
    change = change_of('outline.strategy = "personalised"')
    error = refused(tmp_path, "train.prepare", US, change)
    assert "a run by 'personal' does not train over joins" in error


def test_a_plan_for_another_method_has_no_noise_for_this_one(tmp_path, monkeypatch):
    """Even if the site did not know by which method the run trains."""
    monkeypatch.setattr(prepare, "agree_in_all", lambda *_: None)
    monkeypatch.setattr(Site, "family", "admm")

    grid = HostileGrid(tmp_path, instead=in_preparing(as_sgd))
    with pytest.raises(SiteError, match=NO_NOISE):
        train(grid, "admm", privacy=NOISY)
    rounds = ("train.admm", "train.consensus")
    stray = {"share", "parameters"}
    assert not stray & {name for action, _, name in grid.left if action in rounds}


def test_terms_of_privacy_that_are_left_out_have_no_default(tmp_path):
    """A mechanism is never off because a server does not mention it."""
    names = PrivacyTerms.__struct_encode_fields__
    missing = "missing required field `{}`"
    changes = {missing.format(name): header("privacy", name) for name in names}
    answers = answers_to(tmp_path, "train.prepare", US, changes, privacy=EXACT)
    assert len(answers) == len(names)
    check_all_refused(answers)


def test_a_batch_has_a_row_once(tmp_path):
    """Twice, it would add twice what its gradient is clipped to."""

    twice = batches([0, 3], [0, 1, 1])
    no_end = array(US_PART, "batch-start", lambda a: a[:1])
    changes = {
        "the rows of a batch are not ascending and distinct": twice,
        "'batch-start' does not divide 'batch-rows'": no_end,
    }
    where = tmp_path, "train.prepare", US
    answers = answers_to(*where, changes, "sgd", privacy=PRIVATE)
    assert len(answers) == 2
    check_all_refused(answers)


def test_a_batch_goes_by_one_number(tmp_path):
    """Under another one it could be asked for more often than was planned."""

    changes = {
        (path, repr(number)): header(*path, value=number)
        for path in (("batch",), ("step", "next-batch"))
        for number in (-1, -2, 3, 10**6, 1.0, "0", True)
    }
    where = (tmp_path, "train.sgd", SHOP)
    how = {"batch_size": 4}
    answers = answers_to(*where, changes, "sgd", privacy=PRIVATE, **how)
    assert len(answers) == 14
    for answer in answers:
        answer.check_nothing_left()
        path, number = answer.what
        if number.isdigit():
            assert f"'{path[-1]}' is {number}; allowed: " in answer.error
        else:
            assert re.search(rf"'{path[0]}' is .*; allowed: ", answer.error)
            assert f"`$.{'.'.join(path)}`" in answer.error


def test_an_extra_round_is_over_the_plan(tmp_path):
    """The last epoch has nothing left to spend."""
    change = change_of("fit.kappa = 0.5")
    other = once("train.admm", US, {"other": change})
    grid = HostileGrid(tmp_path, other, {"customers": BUDGET})
    with pytest.raises(
        SiteError, match=r"moments of part 2 .* are used up: of key 0, 3 were pl"
    ):
        train(grid, privacy=EXACT, num_epochs=3)
    assert grid.left.count(("train.admm", US_PART, "share")) == 3


def test_training_is_prepared_once(tmp_path):
    grid = HostileGrid(tmp_path, policies={"customers": BUDGET})
    prepared = []

    def again(action, node, packet):
        if (action, node) == ("train.prepare", US):
            prepared.append(packet)
        if (action, node) == ("train.admm", US) and prepared:
            same_round = header("round", value=packet.header["round"])
            yield "again", ("train.prepare", same_round(prepared.pop()))

    grid._changes = again
    train(grid, privacy=EXACT)
    (answer,) = grid.answers
    answer.check_nothing_left()


def test_the_server_cannot_raise_a_budget(tmp_path):
    """It lasts over all runs: this one is enough for two, and not for three."""
    once = Gaussian(noise_multiplier(EXACT.epsilon, EXACT.delta))
    two, three = (epsilon([structs.replace(once, count=runs)], 1e-4) for runs in (2, 3))
    policies = {"customers": BUDGET.replace("2.0", str((two + three) / 2))}
    for _ in range(2):
        train(HostileGrid(tmp_path, policies=policies), privacy=EXACT)
    for asked in (EXACT, replace(EXACT, epsilon=50.0)):
        grid = HostileGrid(tmp_path, policies=policies)
        with pytest.raises(
            SiteError, match=rf"spent epsilon {two:.4g} of .* requested"
        ):
            train(grid, privacy=asked)
        trained = {part for action, part, _ in grid.left if action.startswith("train")}
        assert trained <= {ORDERS}


def test_a_run_without_noise_does_not_fit_a_budget(tmp_path):
    def spend(**how):
        grid = HostileGrid(tmp_path, policies={"customers": BUDGET})
        train(grid, **how)

    match = r"releases.models = private.* with noise only \(run config privacy.features"
    with pytest.raises(SiteError, match=match):
        spend()
    with pytest.raises(SiteError, match="requested: "):
        spend(privacy=replace(EXACT, noise_multiplier=1e-6))
