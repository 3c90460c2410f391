"""A server that asks for what it should not gets a refusal, and nothing leaves."""

import re
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from client_apps.rounds.site import Site
from strategies import Explain, TablePuppetADMM, TablePuppetSGD
from tests.support.peers.hostile import (
    FOREIGN,
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
    header,
    train,
    undeclared,
    wrong_arrays,
    wrong_headers,
)
from tests.support.peers.hostile_runs import once, refusal, refused, spread
from tp_flower.errors import MessageError, QueryError, SiteError
from tp_flower.privacy.accounting import epsilon, noise_multiplier
from tp_flower.privacy.key_agreement import (
    GroupSecret,
    KeyPair,
    PublicKeys,
    SiteKeys,
)
from tp_flower.privacy.mechanisms import Gaussian
from tp_flower.protocol.packet import Packet, pack_bits
from tp_flower.protocol.training_messages import PrivacyTerms
from tp_flower.settings import PrivacySettings

ROWS = 12
FRAGMENT = ("parts", 0, "fragment")
CONSENSUS = {"lou": "consensus", "inner_rounds": 2}
# categories come in the order of their hashes, which differ from run to run: so would
# the columns that the first weights are of
TORCH = {"model": "mlp", "num_epochs": 1, "sql": SQL.replace(", c.kind", "")}
RUNS = [
    pytest.param(TablePuppetADMM, {}, id="admm"),
    pytest.param(TablePuppetADMM, CONSENSUS, id="consensus"),
    pytest.param(TablePuppetADMM, TORCH, id="torch"),
    pytest.param(TablePuppetSGD, {"batch_size": 5}, id="sgd"),
    pytest.param(Explain, {"mode": "explain"}, id="explain"),
]


# whatever a request holds, a site answers it on purpose


def malformed(number, of):
    """Each action's first request to a site, wrong in every way of one share."""
    seen = set()

    def hostile(action, node, packet):
        if (action, node) in seen or node == UK:
            return
        seen.add((action, node))
        yield from spread(wrong_headers(packet), number, of)
        yield from spread(wrong_arrays(packet), number, of)

    return hostile


ALWAYS = {"query.describe", "query.seal", "query.extract"}


def check_malformed(folder, method, settings, share):
    plain = train(HostileGrid(folder), method, **settings)
    grid = HostileGrid(folder, malformed(*share))
    fuzzed = train(grid, method, **settings)
    last = "query.check" if method is Explain else "train.prepare"
    assert {answer.action for answer in grid.answers} >= {*ALWAYS, last}
    for answer in grid.answers:
        assert not FOREIGN.match(answer.error), answer
        if answer.error:
            answer.check_nothing_left()
    # no refusal has changed anything
    if method is not Explain:
        assert fuzzed.report.final_train == plain.report.final_train


# tests/adversary/test_fuzz.py sends thousands more
@pytest.mark.parametrize(("method", "settings"), RUNS)
def test_a_malformed_request_is_refused_and_changes_nothing(tmp_path, method, settings):
    check_malformed(tmp_path, method, settings, share=(5, 41))


@pytest.mark.parametrize(("method", "settings"), RUNS)
def test_whatever_is_not_declared_is_refused(tmp_path, method, settings):
    grid = HostileGrid(tmp_path, lambda _, __, packet: undeclared(packet))
    train(grid, method, **settings)
    last = "query.check" if method is Explain else "query.finish"
    assert {answer.action for answer in grid.answers} >= {*ALWAYS, last}
    for answer in grid.answers:
        answer.check_nothing_left()
        refusals = "not declared|none are declared|not listed|there to another request"
        assert re.search(refusals, answer.error), answer


EVERYTHING = {
    "labels": "randomised-response",
    "label_epsilon": 2.0,
    "predictions": 4.0,
}
DECLARED = (
    ("c", "age", "range(0, 300)"),
    ("c", "kind", "categories(k0, k1)"),
    ("o", "price", "range(-5, 5) indicator"),
)


# of numbers at the end of what a float can be
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("action", "node", "method", "features", "settings"),
    [
        ("query.extract", SHOP, TablePuppetADMM, "statistics", {}),
        ("query.statistics", US, TablePuppetADMM, "statistics", {}),
        ("train.prepare", US, TablePuppetADMM, "statistics", {}),
        ("train.prepare", US, TablePuppetADMM, "dp-sgd", {}),
        ("train.prepare", US, TablePuppetSGD, "dp-sgd", {"batch_size": 6}),
        ("train.admm", US, TablePuppetADMM, "statistics", {}),
        ("train.consensus", US, TablePuppetADMM, "dp-sgd", {"inner_rounds": 2}),
        ("train.sgd", US, TablePuppetSGD, "dp-sgd", {"batch_size": 6}),
    ],
)
def test_a_malformed_request_of_a_private_run_is_refused(
    tmp_path, action, node, method, features, settings
):
    def hostile(asked, at, packet):
        if (asked, at) == (action, node):
            yield from spread(wrong_headers(packet), 3, 11)
            yield from spread(wrong_arrays(packet), 3, 11)

    grid = HostileGrid(tmp_path, hostile, stops=True)
    privacy = PrivacySettings(features=features, **EVERYTHING)
    with pytest.raises(StoppedError):
        train(
            grid,
            method,
            sql=SQL.replace("o.qty AS", "o.qty > 0 AS"),
            privacy=privacy,
            encoders=DECLARED,
            **settings,
        )
    for answer in grid.answers:
        assert not FOREIGN.match(answer.error), answer
        if answer.error:
            answer.check_nothing_left()


def renumbered(packet):
    """Speak of a part that the site does not have."""
    arrays = {(7, name): values for (_, name), values in packet.arrays.items()}
    return Packet(header("parts", 0, "id", value=7)(packet).header, arrays)


@pytest.mark.parametrize(
    ("action", "node", "change", "match"),
    [
        ("query.describe", SHOP, header("tables"), "request: it has no 'tables'"),
        (
            "query.describe",
            SHOP,
            header("tables", value="orders"),
            "'tables' is 'orders'; allowed: `array`",
        ),
        ("query.extract", SHOP, header("parts"), "'parts' must be a list of objects"),
        ("query.extract", SHOP, header("parts", 0, "id", value=1 << 31), "no 'id'; al"),
        ("query.extract", SHOP, header("parts", 0, "id", value=True), "no 'id'; allow"),
        (
            "query.extract",
            SHOP,
            header("parts", 0, "shard", value=-1),
            "part 0: .* 'shard' is -1; allowed: `int` >= 0 ",
        ),
        (
            "query.extract",
            SHOP,
            header("parts", 0, "shard", value=1),
            "part 0: malformed request: 'shard' is 1; the site hosts 1$",
        ),
        ("query.extract", SHOP, header(*FRAGMENT), "part 0: .* it has no 'fragment'"),
        (
            "query.extract",
            SHOP,
            header("parts", 0, "groups", value=True),
            "the fragment has no groups",
        ),
        (
            "query.extract",
            SHOP,
            lambda p: Packet({**p.header, "parts": p.header["parts"] * 2}, p.arrays),
            "part 0 is listed twice",
        ),
        (
            "query.statistics",
            SHOP,
            renumbered,
            "part 7 is none of this run at this site",
        ),
        (
            "query.statistics",
            SHOP,
            header("parts", 0, "id", value=7),
            r"it has arrays of parts \[0\], not listed",
        ),
        (
            "query.statistics",
            SHOP,
            array(ORDERS, "rows", lambda a: a[:-1]),
            "not a mask of 12 rows",
        ),
        (
            "query.statistics",
            SHOP,
            header("parts", 0, "encoders", "specs", "price", value="standard(("),
            "part 0: .* 'encoders' is not of the form that it has in a run",
        ),
        (
            "train.prepare",
            SHOP,
            header("outline", "strategy", value="fedavg"),
            r"'outline' is .*\(admm\|sgd\|.* - at `\$\.outline\.strategy`",
        ),
        (
            "train.prepare",
            SHOP,
            header("privacy", "clip", value=-1.0),
            r"'privacy' is .*>= 1e-12 - at `\$\.privacy\.clip`",
        ),
        (
            "train.prepare",
            SHOP,
            header("parts", 0, "joined-rows", value=0),
            "part 0: .* 'joined-rows' is 0; allowed: `int` >= 1 ",
        ),
        (
            "train.prepare",
            SHOP,
            header("parts", 0, "encoder", "encodings", 0, "scale", value=0.0),
            "malformed encoder: .*'price': centre, scale, fill or limit is out",
        ),
        (
            "train.prepare",
            SHOP,
            array(ORDERS, "multiplicity", lambda a: a * 0 + 10**6),
            "array 'multiplicity' must hold numbers from 1 to",
        ),
        (
            "train.prepare",
            SHOP,
            array(ORDERS, "multiplicity", lambda a: a.astype(np.float64)),
            r"'multiplicity' is float64 of shape .*; allowed: int32 of shape trained",
        ),
        (
            "train.admm",
            SHOP,
            array(ORDERS, "target", lambda a: np.full_like(a, np.nan)),
            "part 0: .* array 'target' has numbers that are not finite or out of range",
        ),
        (
            "train.admm",
            SHOP,
            array(ORDERS, "target", lambda a: np.concatenate([a, a], axis=1)),
            r"'target' is float32 of shape .*; allowed: .* \d+ \(trained\) x 1 \(outp",
        ),
        (
            "train.admm",
            SHOP,
            header("fit", "kappa", value=0),
            "'fit' is .*'kappa': 0.*; allowed: ",
        ),
        (
            "train.consensus",
            US,
            array(US_PART, "parameters", lambda a: a[None]),
            r"'parameters' is float64 of shape \(1, \d\)",
        ),
    ],
)
def test_what_is_malformed_is_named(tmp_path, action, node, change, match):
    answer = refusal(tmp_path, action, node, change)
    assert re.search(match, f"part {answer.header.get('part')}: {answer.error}")


# what the policy of a table does not allow


SUBQUERY = {
    "columns": [["price", 'AVG("price")'], ["day", '"day"'], ["cust", 'MIN("cust")']],
    "filters": [],
    "groups": ['"day"'],
    "having": [],
}


def subquery(**changes):
    return header(*FRAGMENT, "subquery", value={**SUBQUERY, **changes})


def another_branch(packet):
    """A second SELECT of a UNION ALL over the same shard, with a hidden column."""
    ((first),) = packet.header["parts"]
    second = {**first, "id": 9}
    second["fragment"] = {**first["fragment"], "features": [["price", '"salary"']]}
    return Packet({**packet.header, "parts": [first, second]}, packet.arrays)


FEATURE = (*FRAGMENT, "features", 0, 1)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (header(*FEATURE, value='"salary"'), r"\(columns\).* 'salary'; it may read pr"),
        (header(*FEATURE, value='"nonsense"'), r"\(columns\).* 'nonsense'; it may re"),
        (
            header(*FEATURE, value='CASE WHEN "SALARY" > 0 THEN 1 ELSE "price" END'),
            r"\(columns\) refuses: feature 'price' reads column 'SALARY'",
        ),
        (
            header(*FRAGMENT, "filters", value=['"price" < 9', '"salary" > 0']),
            r"\(columns\) refuses: filter 1 reads column 'salary'",
        ),
        (subquery(groups=['"salary"']), "group 0 of the sub-query reads column 'sal"),
        (subquery(having=['AVG("salary") > 0']), "HAVING .* reads column 'salary'"),
        (subquery(), r"\(join-only\).* join key 0 reads column 'cust' in an express"),
        (another_branch, r"feature 'price' reads column 'salary'"),
        (header(*FRAGMENT, "label", value='"cust"'), r"\(join-only\).* the label"),
        (header(*FRAGMENT, "label", value='"price"'), r"\(labels\).* may read qty"),
        (header(*FEATURE, value='"qty"'), r"\(columns\).* reads column 'qty'"),
        (header(*FEATURE, value='"cust"'), r"\(join-only\).* reads column 'cust'"),
        (
            header(*FRAGMENT, "keys", 0, 0, value='"cust" = 3'),
            r"\(join-only\).* 'cust' in an expression; the column itself may",
        ),
        (header(*FRAGMENT, "keys", 0, 0, value='"salary"'), "join key 0 reads"),
        (header(*FRAGMENT, "filters", value=['"price" > 1e9']), r"\(min-rows\)"),
    ],
)
def test_a_fragment_against_the_policy_is_not_run(tmp_path, change, match):
    assert re.search(match, refused(tmp_path, "query.extract", SHOP, change))


def test_hidden_columns_do_not_exist_for_the_server(tmp_path):
    grid = HostileGrid(tmp_path)
    told = []
    grid._observe = lambda message: told.append(repr(message.content))
    train(grid)
    assert not any("salary" in text for text in told)
    with pytest.raises(QueryError, match=r"(?s)salary.*columns: cust, price, day, qty"):
        train(HostileGrid(tmp_path), sql=SQL.replace("o.day", "o.salary"))


def test_a_rule_about_a_column_that_is_not_there_stops_the_run(tmp_path):
    grid = HostileGrid(tmp_path, policies={"orders": "join-only = ['custmer']"})
    match = r"table 'orders' .*its file.* its policy names column 'custmer': there is"
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
    site = Site(grid.contexts[SHOP], grid.run_name)
    for lost in (lambda: site.source(ORDERS), lambda: site.extracted(ORDERS)):
        with pytest.raises(MessageError, match="part 0 is none of this run"):
            lost()


def one_row(rows):
    mask = np.zeros(rows, np.bool_)
    mask[4] = True
    return pack_bits(mask)


def one_trained_row(packet):
    arrays = {
        **packet.arrays,
        (ORDERS, "trained"): one_row(ROWS),
        (ORDERS, "multiplicity"): np.ones(1, np.int32),
    }
    return Packet(packet.header, arrays)


@pytest.mark.parametrize(
    ("action", "change", "match"),
    [
        (
            "query.statistics",
            array(ORDERS, "rows", lambda _: one_row(ROWS)),
            r"\(min-rows\) refuses: the statistics of table 'o' would be of too few",
        ),
        (
            "train.prepare",
            one_trained_row,
            r"\(min-rows\) refuses: the model of table 'o' would be of too few rows",
        ),
        *(
            (
                "query.statistics",
                header("parts", 0, "encoders", "specs", "price", value=encoder),
                rf"statistics = moments\).* of o\.price is fitted to {needs}; ",
            )
            for encoder, needs in [
                ("min-max", "range"),
                ("bins(4)", "range"),
                ("quantile-bins(4)", "quantiles"),
                ("standard missing=median", "quantiles"),
                ("min-max missing=median", "quantiles and range"),
            ]
        ),
    ],
)
def test_single_rows_and_finer_statistics(tmp_path, action, change, match):
    assert re.search(match, refused(tmp_path, action, SHOP, change))


def test_statistics_that_may_not_leave(tmp_path):
    rules = POLICIES["orders"].replace("moments", "never")
    match = (
        r"releases.statistics = never.* o\.price is .*; none may leave the site; set"
    )
    with pytest.raises(SiteError, match=match):
        train(HostileGrid(tmp_path, policies={"orders": rules}))


@pytest.mark.parametrize("kind", ["labels", "models", "scores"])
def test_releases_that_may_not_leave(tmp_path, kind):
    rules = POLICIES["orders"].replace(
        "statistics =", f"{kind} = 'never', statistics ="
    )
    grid = HostileGrid(tmp_path, policies={"orders": rules})
    with pytest.raises(SiteError, match=f"releases.{kind} = never.*none may leave"):
        train(grid)
    left = {(part, name) for _, part, name in grid.left if part == ORDERS}
    assert (ORDERS, "scores") not in left
    assert ((ORDERS, "label-values") in left) == (kind != "labels")


def test_a_batch_of_one_row_may_not_have_a_gradient_of_its_own(tmp_path):
    def lonely(packet):
        start = np.array([0, 1, 3], np.int32)
        arrays = {
            **packet.arrays,
            (US_PART, "batch-start"): start,
            (US_PART, "batch-rows"): np.array([0, 1, 2], np.int32),
        }
        return Packet(packet.header, arrays)

    error = refused(
        tmp_path,
        "train.prepare",
        US,
        lonely,
        TablePuppetSGD,
        policies={"customers": "min-rows = 2"},
        batch_size=12,
    )
    assert "a batch's gradient of table 'c' would be of too few rows" in error


# a secret that is none


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (header("sealed"), "malformed request: it has no 'sealed'"),
        (header("sealed", value=""), "cannot be opened"),
        (header("sealed", value="00" * 80), "cannot be opened"),
        (header("leader-key", value="00" * 32), "is not a key of X25519"),
        (header("leader-key", value="09" * 32), "cannot be opened"),
        (
            header("keys", value="none"),
            "'keys' is 'none'; allowed: `str` .*file.pin",
        ),
        (header("keys", value="file"), "takes the key .* and the server asks for"),
        (header("keys", value="pinned"), "takes the key .* and the server asks for"),
        (header("public-keys", value=[]), "lack this site's"),
        (header("parts", 0, "key-groups", value=[]), "'key-groups' must name a group"),
    ],
)
def test_no_key_leaves_unhashed(tmp_path, change, match):
    assert re.search(match, refused(tmp_path, "query.extract", SHOP, change))


def test_a_real_site_takes_no_secret_of_a_simulation(tmp_path):
    """Everybody knows that one: hashes under it are as good as none."""

    def known(action, node, packet):
        if (action, node) != ("query.extract", SHOP):
            return
        server, secret = SiteKeys(KeyPair()), GroupSecret.of_simulation(1)
        for key in packet.header["public-keys"]:
            public = PublicKeys(bytes.fromhex(key))
            sealed = server.seal(secret, public, int(packet.header["run"], 16))
            told = {"sealed": sealed.hex(), "leader-key": server.public.run.hex()}
            yield key, Packet({**packet.header, **told}, packet.arrays)

    grid = HostileGrid(tmp_path, known)
    train(grid)
    opened = "the run's secret is that of a simulation, which is known to everybody"
    for answer in grid.answers:
        answer.check_nothing_left()
    assert sum(opened in answer.error for answer in grid.answers) == 1


# a run that strays from what it said it would be


PRIVATE = PrivacySettings(features="dp-sgd", epsilon=1.0)
EXACT = PrivacySettings(features="statistics", epsilon=1.0)


def as_sgd(packet):
    """Say that the run is one of SGD, and go on with ADMM."""
    outline = {**packet.header["outline"], "strategy": "sgd"}
    outline |= {"batch-uses": 1, "batch-rate": 0.0}
    return Packet({**packet.header, "outline": outline}, packet.arrays)


def instead_of(action, change):
    """Change every request of one kind."""

    def instead(asked, _, packet):
        return change(packet) if asked == action else packet

    return instead


@pytest.mark.parametrize(
    ("method", "privacy", "change", "stray", "match"),
    [
        (
            TablePuppetSGD,
            PRIVATE,
            header("outline", "strategy", value="admm"),
            {"gradient", "batch-scores", "tested-scores"},
            "its plan has no noise for gradients",
        ),
        (
            TablePuppetADMM,
            replace(PRIVATE, noise_multiplier=1.0),
            as_sgd,
            {"moments", "proposal", "parameters"},
            "its plan has no noise for",
        ),
        (
            TablePuppetADMM,
            EXACT,
            header("parts", 0, "update", value="consensus"),
            {"moments", "proposal"},
            "is of linear models that are fitted exactly, not of 'linear' by 'cons",
        ),
        (
            TablePuppetADMM,
            EXACT,
            header("parts", 0, "model", "kind", value="mlp"),
            {"moments", "proposal"},
            "is of linear models that are fitted exactly, not of 'mlp' by",
        ),
    ],
)
def test_what_the_plan_has_no_noise_for_does_not_leave(
    tmp_path, method, privacy, change, stray, match
):
    grid = HostileGrid(tmp_path, instead=instead_of("train.prepare", change))
    with pytest.raises(SiteError, match=match):
        train(grid, method, privacy=privacy)
    assert not stray & {name for _, _, name in grid.left}


def test_terms_of_privacy_that_are_left_out_have_no_default(tmp_path):
    """A mechanism is never off because a server does not mention it."""

    def without(name):
        def change(packet):
            terms = dict(packet.header["privacy"])
            del terms[name]
            return Packet({**packet.header, "privacy": terms}, packet.arrays)

        return change

    names = PrivacyTerms.__struct_encode_fields__
    changes = {name: without(name) for name in names}
    grid = HostileGrid(tmp_path, once("train.prepare", US, **changes), stops=True)
    with pytest.raises(StoppedError):
        train(grid, privacy=EXACT)
    assert len(grid.answers) == len(names)
    for name, answer in zip(names, grid.answers, strict=True):
        assert f"missing required field `{name}`" in answer.error
        answer.check_nothing_left()


def test_an_outsider_sees_scores_without_noise(tmp_path):
    change = header("privacy", "adversary", value="outsider")
    error = refused(
        tmp_path, "train.prepare", US, change, TablePuppetSGD, privacy=PRIVATE
    )
    assert "privacy.adversary: 'outsider' needs privacy.predictions" in error


def test_a_batch_has_a_row_once(tmp_path):
    """Twice, it would add twice what its gradient is clipped to."""

    def twice(packet):
        arrays = {
            **packet.arrays,
            (US_PART, "batch-start"): np.array([0, 3], np.int32),
            (US_PART, "batch-rows"): np.array([0, 1, 1], np.int32),
        }
        return Packet(packet.header, arrays)

    def refused_for(change):
        return refused(
            tmp_path, "train.prepare", US, change, TablePuppetSGD, privacy=PRIVATE
        )

    assert "a batch has a row twice" in refused_for(twice)
    no_end = array(US_PART, "batch-start", lambda a: a[:1])
    assert "'batch-start' does not divide 'batch-rows'" in refused_for(no_end)


def test_a_batch_goes_by_one_number(tmp_path):
    """Under another one it could be asked for more often than was planned."""

    def renamed(action, node, packet):
        if (action, node) == ("train.sgd", SHOP):
            for path in (("batch",), ("step", "next-batch")):
                for number in (-1, -2, 3, 10**6, 1.0, "0", True):
                    yield (path, number), header(*path, value=number)(packet)

    grid = HostileGrid(tmp_path, renamed, stops=True)
    with pytest.raises(StoppedError):
        train(grid, TablePuppetSGD, batch_size=4, privacy=PRIVATE)
    assert len(grid.answers) == 14
    for answer in grid.answers:
        answer.check_nothing_left()
        path, number = answer.what
        if type(number) is int and number >= 0:
            assert f"'{path[-1]}' is {number}; allowed: " in answer.error
        else:
            assert re.search(rf"'{path[0]}' is .*; allowed: ", answer.error)
            assert f"`$.{'.'.join(path)}`" in answer.error


def test_a_model_of_one_shard_is_not_the_servers_to_set(tmp_path):
    def set_model(action, node, packet):
        if (action, node) == ("train.admm", SHOP):
            arrays = {(ORDERS, "parameters"): np.ones(3)}
            yield "set", ("train.consensus", Packet(packet.header, arrays))

    grid = HostileGrid(tmp_path, set_model)
    train(grid)
    for answer in grid.answers:
        answer.check_nothing_left()
        assert "table o: its model is not another's to set" in answer.error
    assert grid.answers


# what was planned, and no more


BUDGET = """
    epsilon = 2.0
    delta = 1e-4
    releases = { labels = "clear", scores = "clear", statistics = "moments" }
"""


def test_an_extra_round_is_over_the_plan(tmp_path):
    """The last epoch has nothing left to spend."""
    other = once("train.admm", US, other=header("fit", "kappa", value=0.5))
    grid = HostileGrid(tmp_path, other, {"customers": BUDGET})
    with pytest.raises(SiteError, match=r"moments of part 2 .* are used up: 3 were pl"):
        train(grid, privacy=EXACT, num_epochs=3)
    assert grid.left.count(("train.admm", US_PART, "moments")) == 3


def test_training_is_prepared_once(tmp_path):
    grid = HostileGrid(tmp_path, policies={"customers": BUDGET})
    first, arrays = [], []

    def again(action, node, packet):
        if (action, node) == ("train.prepare", US):
            first.append(packet)
            arrays.append(packet.arrays)
        if (action, node) == ("train.admm", US) and len(first) == 1:
            told = {**first.pop().header, "round": packet.header["round"]}
            yield "again", ("train.prepare", Packet(told, arrays.pop()))

    grid._changes = again
    train(grid, privacy=EXACT)
    (answer,) = grid.answers
    answer.check_nothing_left()


def test_the_server_cannot_raise_a_budget(tmp_path):
    """It lasts over all runs: this one is enough for two, and not for three."""
    once = Gaussian(noise_multiplier(EXACT.epsilon, EXACT.delta))
    two, three = (epsilon([structs.replace(once, count=runs)], 1e-4) for runs in (2, 3))
    rules = BUDGET.replace("2.0", str((two + three) / 2))
    policies = {"customers": rules}
    for _ in range(2):
        train(HostileGrid(tmp_path, policies=policies), privacy=EXACT)
    for asked in (EXACT, replace(EXACT, epsilon=50.0)):
        grid = HostileGrid(tmp_path, policies=policies)
        with pytest.raises(SiteError, match=rf"spent epsilon {two:.4g} of .* asked"):
            train(grid, privacy=asked)
        trained = {part for action, part, _ in grid.left if action.startswith("train")}
        assert trained <= {ORDERS}


def test_a_run_without_noise_does_not_fit_a_budget(tmp_path):
    grid = HostileGrid(tmp_path, policies={"customers": BUDGET})
    match = r"releases.models = private.* with noise only \(run config privacy.features"
    with pytest.raises(SiteError, match=match):
        train(grid)
    noiseless = replace(EXACT, noise_multiplier=1e-6)
    with pytest.raises(SiteError, match="asked for is"):
        train(HostileGrid(tmp_path, policies={"customers": BUDGET}), privacy=noiseless)
