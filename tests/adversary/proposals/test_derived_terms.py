"""Requests that say something else than the proposal of their run, and proposals that
lie.
"""

import numpy as np
import pandas as pd
import pytest

from tests.support.federated import (
    WatchedGrid,
    on_requests,
    one_per_site,
    run,
    run_query,
    sharded,
    store,
    train,
    write_site,
)
from tests.support.ledgers import ledger_lines
from tests.support.peers.hostile import (
    GONE,
    ORDERS,
    SHOP,
    US,
    arrays,
    change_of,
    header,
)
from tests.support.peers.hostile_runs import refused
from tests.support.peers.keyed_sites import AB, SQL, KeyedGrid, proposal_of
from tp_flower.errors import MappingError, SiteError
from tp_flower.methods.admm.messages import TRAIN_ADMM
from tp_flower.methods.boost.messages import TRAIN_BOOST
from tp_flower.methods.cg.messages import TRAIN_DESCENT
from tp_flower.methods.method import METHODS
from tp_flower.methods.sgd.messages import TRAIN_SGD
from tp_flower.protocol.messages import Action
from tp_flower.protocol.packet import pack_bits
from tp_flower.protocol.proposal import Proposal
from tp_flower.settings import PrivacySettings
from tp_flower.settings.rules import rules_of
from tp_flower.terms.run_terms import RunTerms

MLP = {"model": "mlp", "hidden_sizes": (4,)}
NOISY = PrivacySettings(features="dp-sgd")
PREPARED = [
    # what is asked for, and what the refusal names
    ("outline.epochs = 500", "epochs"),
    ('outline.strategy = "sgd"', "strategy"),
    ("masking = null", "masking|scores = masked"),
    ("masking.tables = 1", "tables"),
    ("part.l2 = 0.0", "l2"),
    ('part.model.kind = "mlp"', "model.kind"),
    ("part.model.intercept = false", "intercept"),
    ("part.model.seed = 5", "seed"),
    ('part.update = "given"', "update|models = sealed"),
]
EXTRACTED = [
    ("part.groups = true", "groups"),
    ('part.local-label = "auto"', "local-label"),
    ("proposal.query = 7", "proposal"),
    ("proposal.joins = []", "sealed"),
    ('proposal.outer = ["x"]', "names 'x', which no part"),
    ("proposal.settings.l3 = 1", "settings of the run's"),
    ("proposal.settings.rho = []", "settings|malformed"),
    ('proposal.settings.mode = "bake"', "settings of the"),
    ('proposal.joins.0.right = "o"', "joins 'o' to its"),
    ("proposal.joins.0.left-key = 1", "keys of table 'o'"),
]
LATER = [
    *(("train.prepare", change, {}, match) for change, match in PREPARED),
    ("train.prepare", "privacy.epsilon = 90.0", {"privacy": NOISY}, "epsilon"),
    ("train.prepare", 'privacy.features = "clear"', {"privacy": NOISY}, "features"),
    ("train.prepare", "part.model.hidden_sizes = [9, 9]", MLP, "hidden_sizes"),
    ("query.statistics", 'part.encoders.specs.price = "copy"', {}, "encoders"),
    ("query.statistics", "part.encoders.max_categories = 9", {}, "encoders"),
    *(("query.extract", change, {}, match) for change, match in EXTRACTED),
]
OF_PART = [
    (("site",), "else", "site"),
    (("shard",), 3, "shard"),
    (("node",), "4", "public keys"),
    ((), GONE, "public keys"),
]


def check_named(folder, action, change, match, **settings):
    """Assert that a changed request is refused in one of these words."""
    error = refused(folder, action, SHOP, change, **{"num_epochs": 2, **settings})
    assert any(name in error for name in match.split("|")), error


@pytest.mark.parametrize(("action", "change", "settings", "match"), LATER)
def test_a_request_that_contradicts_the_proposal_is_refused_and_named(
    tmp_path, action, change, settings, match
):
    check_named(tmp_path, action, change_of(change), match, **settings)


@pytest.mark.parametrize(("path", "value", "match"), OF_PART)
def test_a_proposal_has_the_parts_of_the_request(tmp_path, path, value, match):
    change = header("proposal", "parts", "0", *path, value=value)
    check_named(tmp_path, "query.extract", change, match)


def test_a_refusal_has_the_field_both_values_and_a_line_in_the_ledger(tmp_path):
    @on_requests("train.prepare")
    def lie(seen):
        seen.header["outline"]["epochs"] = 500

    grid = KeyedGrid(tmp_path, AB, lie).pin()
    text = "'epochs': the run was proposed with 2, and the request says 500"
    with pytest.raises(SiteError, match=text):
        train(grid, SQL, num_epochs=2)
    for folder in grid.folders.values():
        (line,) = ledger_lines(folder / "state", "refuse")
        assert text in line["reason"]


@pytest.mark.parametrize(
    ("method", "action", "settings"),
    [
        ("cg", TRAIN_DESCENT, {}),
        ("admm", TRAIN_ADMM, {}),
        ("boost", TRAIN_BOOST, {}),
        ("sgd", TRAIN_SGD, {"batch_size": 6}),
    ],
)
def test_rounds_beyond_the_proposed_epochs_bring_no_scores(
    tmp_path, method, action, settings
):
    path = ("terms",) if action is TRAIN_DESCENT else ()
    path = ("step",) if action is TRAIN_SGD else path
    change = header(*path, "scores-number", value=1000)
    error = refused(tmp_path, action, SHOP, change, method, num_epochs=2, **settings)
    assert "'scores-number': the run was proposed with " in error


def test_sums_over_the_shards_end_with_the_proposed_epochs(monkeypatch):
    """The shards of a table cannot be asked for more sums than the run needs."""
    monkeypatch.setattr(RunTerms, "most_sums", lambda *_: 2)
    sites = one_per_site(sharded(store()))
    match = (
        "the run was proposed with 2 sums over the shards of table '.', and .* asks "
        "for 3"
    )
    with pytest.raises(SiteError, match=match):
        run("squared", sites, num_epochs=3)


def test_a_sum_is_over_the_shards_that_the_proposal_has(tmp_path):
    """Or a shard that sides with the server would read what one of the others adds."""
    alone = change_of("part.union.shards = {}")
    error = refused(tmp_path, "train.prepare", US, alone, num_epochs=2)
    assert "'shards': the run was proposed with {'1': '" in error


def test_training_rows_are_the_same_in_every_message(tmp_path):
    four = pack_bits(np.arange(12) < 4)
    fewer = arrays(ORDERS, trained=four, multiplicity=np.ones(4, np.int32))
    error = refused(tmp_path, "train.prepare", SHOP, fewer, num_epochs=2)
    assert "the training rows of part 0 are not those of an earlier message" in error


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_run_begins_with_messages_of_its_own_method_alone(method):
    """A site takes no other method's first message, whoever has registered it."""
    settings = {"mode": "train", "strategy": method.name}
    if method.name == "cg":
        settings["standard-errors"] = "model"
    proposal = Proposal(query="", parts={}, joins=[], outer=[], settings=settings)
    terms = RunTerms(proposal)
    begins = {action for each in METHODS.values() for action in rules_of(each).begins}
    assert begins
    for action in begins:
        assert terms.allows(action) == (action in method.actions)


@pytest.mark.parametrize(
    ("settings", "is_allowed"),
    [
        ({"mode": "train", "strategy": "admm"}, True),
        ({"mode": "predict", "strategy": "admm", "model-name": "m"}, True),
        ({"mode": "serve", "strategy": "admm", "model-name": "m"}, False),
        ({"mode": "train", "strategy": "moments"}, False),
        ({"mode": "explain", "strategy": "moments"}, False),
    ],
)
def test_ranks_are_told_only_of_rows_whose_scores_leave(settings, is_allowed):
    """By moments with noise the rank of a table's rows would leave without any."""
    proposal = Proposal(query="", parts={}, joins=[], outer=[], settings=settings)
    assert RunTerms(proposal).allows(Action.RANK) == is_allowed


def test_a_run_that_is_explained_is_not_trained(tmp_path):
    """Nor is a run that trains asked for predictions, or the other way round."""

    @on_requests("query.extract")
    def as_explained(seen):
        seen.header["proposal"]["settings"]["mode"] = "explain"

    grid = KeyedGrid(tmp_path, AB, as_explained).pin()
    match = (
        r"'mode': the run was proposed with 'explain, strategy admm', and "
        r".*train\.prepare"
    )
    with pytest.raises(SiteError, match=match):
        train(grid, SQL)


def test_sites_that_were_told_of_different_runs_share_no_key(tmp_path):
    """Neither do their hashes join, nor would their masks cancel."""

    @on_requests("query.extract")
    def differ(seen):
        if seen.node == 3:
            proposal = seen.header["proposal"]
            proposal["query"] += " -- and something that b would not like"

    grid = KeyedGrid(tmp_path, AB, differ).pin()
    with pytest.raises(MappingError):
        train(grid, SQL)
    first, second = ({row.tobytes() for row in rows} for rows in grid.hashes().values())
    assert len(first) == len(second) == 4
    assert not first & second
    assert len(set(grid.secrets.values())) == 2


def test_a_proposal_of_another_run_does_not_cover_this_one(tmp_path):
    """The owners may have approved it; what the run asks for is compared with it all
    the same.
    """
    first = KeyedGrid(tmp_path / "first", AB).pin()
    train(first, SQL, l2=0.5)
    approved = first.sent("query.extract")[0].header["proposal"]

    @on_requests("query.extract")
    def replay(seen):
        keys = seen.header["site-keys"]
        parts = approved["parts"].items()
        replayed = {n: {**part, "site-key": keys[part["node"]]} for n, part in parts}
        assert {part["node"] for _, part in parts} == keys.keys()
        seen.header["proposal"] = {**approved, "parts": replayed}

    grid = KeyedGrid(tmp_path / "second", AB, replay).pin()
    with pytest.raises(
        SiteError, match=r"'l2': the run was proposed with 0\.5, and the request"
    ):
        train(grid, SQL, l2=0.0)


def test_a_site_key_that_the_proposal_names_is_the_one_that_the_secret_is_sealed_to(
    tmp_path,
):
    @on_requests("query.extract")
    def rename(seen):
        seen.header["proposal"]["parts"]["1"]["site-key"] = "ab" * 32

    grid = KeyedGrid(tmp_path, AB, rename).pin()
    with pytest.raises(SiteError, match="'site keys': the run was proposed with 'abab"):
        train(grid, SQL)
    assert not grid.leaked()


def test_both_ends_read_one_proposal():
    finished = run_query(SQL, [{"a": AB["a"]}, {"b": AB["b"]}], num_epochs=1)
    proposals = [proposal_of(seen.header) for seen in finished.sent("query.extract")]
    assert len({proposal.fingerprint for proposal in proposals}) == 1
    assert proposals[0].query == finished.strategy.query.to_sql()
    assert proposals[0].settings["num-epochs"] == 1


TWO_ALIASES = "SELECT a.y AS label, a.x, b.x AS x_of_b FROM t a JOIN t b ON a.k = b.k"


def persons(rows=400):
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"k": np.arange(rows), "x": rng.normal(size=rows)})
    frame.loc[7, "x"] = np.nan
    return frame.assign(y=rng.normal(size=rows))


class MissingBits(WatchedGrid):
    """A server that reads whether a row's value is missing: two aliases, all but one
    row in one.
    """

    def __init__(self, folder, policy, row):
        self.row = row
        self.columns = []
        site = write_site(folder, {"t": persons()}, {"t": policy})
        super().__init__([site], self._ask)
        self.keep_state(2, folder / "state")

    def _ask(self, seen):
        if seen.action != "query.statistics":
            return
        if seen.is_reply:
            parts = {part["id"]: part for part in seen.header.get("parts", ())}
            self.columns = [
                part["columns"]["features"] for _, part in sorted(parts.items())
            ]
            return
        without = np.arange(400) != self.row
        for number in (0, 1):
            rows = np.ones(400, np.bool_) if number == 0 else without
            seen.arrays[number, "trained"] = pack_bits(rows)
            seen.arrays[number, "multiplicity"] = np.ones(int(rows.sum()), np.int32)


@pytest.mark.parametrize(("row", "is_missing"), [(7, True), (8, False)])
def test_two_aliases_tell_of_a_single_row_without_min_rows_and_are_refused_with_it(
    tmp_path, row, is_missing
):
    settings = {
        "num_epochs": 1,
        "encoders": "a.x=standard indicator; b.x_of_b=standard indicator",
    }
    grid = MissingBits(tmp_path / "open", "min-rows = 1", row)
    with pytest.raises(SiteError, match="training rows of part"):
        train(grid, TWO_ALIASES, **settings)
    ((first,), (second,)) = (features.values() for features in grid.columns)
    # an indicator is constant where no value is missing
    assert (first != second) == is_missing
    grid = MissingBits(tmp_path / "strict", "min-rows = 50", row)
    match = (
        r"\(min-rows\) refuses: the difference of the training rows of two aliases of "
        r"table 't'"
    )
    with pytest.raises(SiteError, match=match):
        train(grid, TWO_ALIASES, **settings)
    assert not grid.columns


def test_two_aliases_of_the_same_rows_are_trained(tmp_path):
    site = write_site(tmp_path, {"t": persons()}, {"t": "min-rows = 50"})
    assert train([site], TWO_ALIASES, num_epochs=1).report.history


def test_personalised_rounds_end_with_the_proposed_epochs():
    """Each tells a gradient and metrics of every site, at parameters that the server
    chooses.
    """
    sites = [{"t": persons(200)}, {"t": persons(300)}]

    @on_requests("query.extract")
    def fewer(seen):
        seen.header["proposal"]["settings"]["num-epochs"] = 1

    match = (
        "the run was proposed with 2 rounds of parameters, and the request is one more"
    )
    with pytest.raises(SiteError, match=match):
        train(
            WatchedGrid(sites, fewer),
            "SELECT y AS label, x FROM t",
            "personalised",
            num_epochs=3,
        )
