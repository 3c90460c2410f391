"""One attack on each message: what a site replies to a request with one thing changed.

The server is curious and departs from the protocol, in the middle of a good run. Other
modules attack what several messages tell together.
"""

import re

import numpy as np
import pytest

from strategies import Explain
from strategies.search.run import Search
from tests.support.peers.hostile import (
    OF_COVARIANCE,
    OF_MOMENTS,
    OF_SINGLE_SITES,
    ORDERS,
    SHOP,
    SQL,
    UK,
    UK_PART,
    US,
    WITH_BINS,
    WITH_COVER,
    array,
    arrays,
    change_of,
    header,
)
from tests.support.peers.hostile_runs import answers_to
from tp_flower.methods.admm.messages import TRAIN_ADMM
from tp_flower.methods.boost.messages import (
    TRAIN_BAG,
    TRAIN_BOOST,
    TRAIN_PAIRS,
    TRAIN_REGIONS,
)
from tp_flower.methods.cg.messages import TRAIN_DESCENT, TRAIN_DIRECTION
from tp_flower.methods.coreset.messages import (
    TRAIN_DRAW,
    TRAIN_MEASURE,
    TRAIN_ROWS,
    TRAIN_WEIGH,
)
from tp_flower.methods.moments.messages import (
    TRAIN_INFORMATION,
    TRAIN_MOMENTS,
    TRAIN_SOLUTION,
    TRAIN_SOLVE,
)
from tp_flower.methods.personalised.messages import (
    TRAIN_PERSONAL,
    TRAIN_PERSONALISE,
    TRAIN_SUMMARISE,
)
from tp_flower.methods.sgd.messages import TRAIN_SGD, TRAIN_STEP
from tp_flower.protocol.messages import ACTIONS, Action
from tp_flower.protocol.packet import Packet, pack_bits

PART = ("parts", 0)
OWN_LABELS = {
    "sql": "SELECT o.qty AS label, o.price, o.day FROM orders o",
    "test_fraction": 0.4,
    "policies": OF_SINGLE_SITES,
}


def more_groups(packet):
    """Let the leader make a key for a join of one that is not in it."""
    groups = {**packet.header["groups"], "join-7": ["2", "9"]}
    return Packet({**packet.header, "groups": groups}, packet.arrays)


def huge_step(packet):
    """Drive one row's score out of range, for the error that tells of it."""

    def change(step):
        changed = np.zeros_like(step)
        changed[0] = 1e29
        return changed

    return array(ORDERS, "step", change)(packet)


def second_weighting(packet):
    """Let the first row weigh one more in a second weighting."""

    def change(told):
        other = told.copy()
        other[:, 0] += 1
        return np.concatenate([told, other])

    return array(ORDERS, "weights", change)(packet)


def envelope(packet):
    return {key: packet.header[key] for key in ("run", "round", "after")}


def own_parameters(packet):
    """Set the parameters of a table that has one shard, to read its scores of them."""
    facts = {"evaluate": False, "scores-number": 9}
    unit = {(ORDERS, "parameters"): np.array([1.0, 0.0, 0.0])}
    return Action.CONSENSUS, Packet({**envelope(packet), **facts}, unit)


def rows_too(packet):
    """Ask for the rows in the middle of ADMM."""
    return TRAIN_ROWS, Packet({**envelope(packet), "seed": 0, "clusters": 10}, {})


TRIGGERS = {TRAIN_ROWS: TRAIN_ADMM, Action.CONSENSUS: TRAIN_ADMM}
"""The request that another one comes before."""

CG = (TRAIN_DESCENT, TRAIN_DIRECTION)
SGD = (TRAIN_SGD, TRAIN_STEP)
DRAWING = (TRAIN_MEASURE, TRAIN_DRAW, TRAIN_WEIGH)
MOMENTS = (TRAIN_MOMENTS, TRAIN_SOLUTION)
ONCE = {"num_epochs": 1, "test_fraction": 0.0, "policies": OF_MOMENTS}
WITH_ERRORS = {
    "standard_errors": "model",
    "num_epochs": 0,
    "test_fraction": 0.0,
    "policies": {
        name: rules.replace("min-rows = 3", "min-rows = 1")
        for name, rules in OF_COVARIANCE.items()
    },
}
BINNED = {"bins": 4, "validation_fraction": 0.3}
PERSONAL = (TRAIN_PERSONALISE, TRAIN_SUMMARISE, TRAIN_PERSONAL)
RUNS = {
    **dict.fromkeys(CG, ("cg", {})),
    **dict.fromkeys((TRAIN_BOOST, TRAIN_BAG), ("boost", {})),
    Action.RANK: (Explain, {"mode": "explain", "policies": WITH_COVER}),
    Action.BINS: ("cg", {**BINNED, "policies": WITH_BINS}),
    Action.NEXT: (Search, {"folds": 2}),
    **dict.fromkeys(SGD, ("sgd", {"batch_size": 5})),
    **dict.fromkeys(DRAWING, ("admm", {"coreset_size": 6})),
    **dict.fromkeys(MOMENTS, ("moments", ONCE)),
    TRAIN_SOLVE: ("moments", {**ONCE, "moments_to": "label-site"}),
    TRAIN_INFORMATION: ("cg", WITH_ERRORS),
    **dict.fromkeys(PERSONAL, ("personalised", OWN_LABELS)),
}
"""The run that has the request; of all others it is one of ADMM."""

ROW_1 = pack_bits(np.arange(12) == 1)
TRAINED_1 = arrays(ORDERS, trained=ROW_1)
JOINED_1 = arrays(ORDERS, trained=ROW_1, multiplicity=np.ones(1, np.int32))
RANKED_1 = arrays(ORDERS, rows=ROW_1)
NO_NUMBERS = array(ORDERS, "personal", lambda a: np.full_like(a, np.nan))
TWO_PASSES = array(ORDERS, "passes", lambda bits: bits | 4)
MORE_PARAMETERS = array(ORDERS, "parameters", lambda own: np.append(own, 1.0))
OTHER_MOMENTS = array(ORDERS, "products/0-0-1", lambda words: words + np.uint64(1))
OTHER_CASE = change_of('tables = ["ORDERS", "orders", "*"]')
EARLIER_MASKS = change_of("scores-number = 0")
NO_JOINS = change_of("masking = null")
OTHER_PLACE = change_of("part.place = 7")
PATH = change_of('model-name = "../../x"')
MANY_ROWS = change_of("part.rows = 1000000")
MANY_JOINED_ROWS = header(*PART, "joined-rows", value=10**30)
LABEL = header(*PART, "fragment", "features", 0, 1, value='"qty"')
OUT_OF_RANGE = (
    r"a score is out of range; the run's fixed point allows up to [\d.e+]+: train"
)
SUM = "sum is not that of the shares of all 2 shards"
ATTACKS = {
    # a hidden column by another case of the table's name
    Action.DESCRIBE: (SHOP, OTHER_CASE, None),
    Action.SEAL: (SHOP, more_groups, "'public-keys' lacks nodes"),
    # the label's column as a feature
    Action.EXTRACT: (SHOP, LABEL, "policy .* reads column 'qty'"),
    Action.STATISTICS: (SHOP, JOINED_1, "min-rows.* the statistics of table 'o'"),
    # the encoder of some shards alone, to see what another one adds
    Action.FIT: (UK, array(UK_PART, "statistics/2"), "has no 'statistics/2'"),
    # whether a row varies beside another
    Action.RANK: (SHOP, RANKED_1, "min-rows.* the rank of table 'o'"),
    # a fit twice, whose masks have hidden other scores
    Action.NEXT: (SHOP, change_of("fit = 2"), "'fit': the run was proposed with 1"),
    # scores without the masks that were proposed
    Action.PREPARE: (US, NO_JOINS, "'masking': the run was proposed with True"),
    TRAIN_ADMM: (SHOP, huge_step, OUT_OF_RANGE),
    Action.CONSENSUS: (SHOP, own_parameters, "the server may not set its model"),
    # masks of products that are no other table's
    TRAIN_DESCENT: (SHOP, OTHER_PLACE, "'place': the run was proposed with 0, and"),
    # another sum than the shards', to read the gradient that one of them adds
    TRAIN_DIRECTION: (UK, array(UK_PART, "sum", lambda words: words + 1), SUM),
    # the masks of an earlier round again, for the difference of two scores
    TRAIN_SGD: (US, EARLIER_MASKS, "'scores-number'"),
    TRAIN_STEP: (US, EARLIER_MASKS, "'scores-number'"),
    # more trees than the site has time and memory for
    TRAIN_BOOST: (US, change_of("growth.trees = 1000000000"), "malformed"),
    # the trees of some shards alone, to see what another one adds
    TRAIN_BAG: (UK, array(UK_PART, "trees/2"), "has no 'trees/2'"),
    # the leverage of a row
    TRAIN_MEASURE: (SHOP, TRAINED_1, "min-rows|multiplicity|'trained'"),
    TRAIN_DRAW: (SHOP, MANY_ROWS, "malformed|at most|allowed"),
    # a table that is said to be alone has no masks
    TRAIN_WEIGH: (SHOP, MANY_JOINED_ROWS, "malformed|too large"),
    # rows of a run that has drawn none
    TRAIN_ROWS: (SHOP, rows_too, "'train.rows' is no message of a run by 'admm'"),
    # two sums that differ in few rows
    TRAIN_MOMENTS: (SHOP, TWO_PASSES, "'passes' has a row in several passes"),
    # sums that differ in one row
    TRAIN_INFORMATION: (SHOP, second_weighting, "'weights'|passes"),
    TRAIN_SOLVE: (SHOP, OTHER_MOMENTS, "it has altered words"),
    TRAIN_SOLUTION: (SHOP, MORE_PARAMETERS, "'parameters'"),
    TRAIN_PERSONALISE: (SHOP, TRAINED_1, "min-rows.* the model of table 'o'|a row is"),
    TRAIN_SUMMARISE: (SHOP, change_of("summaries = 7"), "malformed"),
    TRAIN_PERSONAL: (SHOP, NO_NUMBERS, "personal"),
    # finer bins than the run was proposed with
    Action.BINS: (SHOP, change_of("part.bins = 200"), "'bins': the run was proposed"),
    Action.FINISH: (SHOP, PATH, r"model name '\.\./\.\./x' is not allowed"),
}
OF_REGIONS = dict.fromkeys(
    (TRAIN_REGIONS, TRAIN_PAIRS, Action.DIVIDE), "tests/runs/training/test_regions.py"
)
ELSEWHERE = {
    **OF_REGIONS,
    Action.SCORE: "tests/adversary/test_predict_hostile.py",
    Action.INSPECT: "tests/runs/inference/test_inspection.py",
    Action.CUTOFFS: "tests/adversary/messages/test_sealed_cutoffs.py",
    Action.PARTIALS: "tests/adversary/messages/test_sealed_partials.py",
    Action.SESSION: "tests/faults/test_sessions.py",
}


def test_every_message_is_attacked():
    assert {*ATTACKS, *ELSEWHERE} == {*ACTIONS.values()}


@pytest.mark.parametrize("action", ATTACKS, ids=str)
def test_a_site_gives_nothing_more(tmp_path, action):
    node, change, match = ATTACKS[action]
    method, settings = RUNS.get(action, ("admm", {}))
    how = {"sql": SQL} if "mode" in settings else {"sql": SQL, "num_epochs": 2}
    asked = TRIGGERS.get(action, action)
    changes = {"it": change}
    (answer, *_) = answers_to(tmp_path, asked, node, changes, method, **how | settings)
    if match is None:
        assert "salary" not in str(answer.header)
        return
    answer.check_nothing_left()
    assert re.search(match, answer.error), answer.error
