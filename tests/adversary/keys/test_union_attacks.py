"""What a server, and a site on its side, make of the sums over a table's shards."""

import numpy as np
import pytest

from tests.support import federated
from tests.support.federated import on_replies, on_requests
from tests.support.peers.keyed_sites import stored_keys
from tp_flower.errors import SiteError
from tp_flower.settings import PrivacySettings

CLEAR = PrivacySettings(unions="clear", scores="clear")
READABLE = {"parameters", "coefficients", "theta"}
SUMMED = {"share", "sum"}
NOT_THE_SUM = "the server's sum is not that of the shares of all"
OTHER_SHARDS = "'shards': the run was proposed with "
RUNS = {
    "gram": ("squared", "admm", {}),
    "consensus": ("squared", "admm", {"lou": "consensus"}),
    "mlp": ("squared", "admm", {"model": "mlp", "num_epochs": 2}),
    "sgd": ("squared", "sgd", {"batch_size": 100}),
}
MALFORMED = r"malformed request: .*union.*group"


class Grid(federated.WatchedGrid):
    """Sharded tables, a site per shard, and a server that may change messages."""

    def __init__(self, forge=None):
        frames = federated.store(300, 40)
        shards = {
            **federated.sharded(frames),
            "orders": federated.pieces(frames["orders"], 100, 200),
        }
        super().__init__(federated.one_per_site(shards), forge)


def numbers_in(seen):
    """The arrays of a model in a message that whoever has it can read."""
    return {
        name
        for (_, name), array in seen.arrays.items()
        if name in READABLE or (name in SUMMED and array.dtype != np.uint64)
    }


def fit(grid, kind, **more):
    loss, strategy, settings = RUNS[kind]
    settings = {"num_epochs": 3, "device": "cpu", **settings, **more}
    sql = federated.store_sql(loss)
    return federated.train(
        grid, sql, strategy, task="regression", loss=loss, **settings
    )


@pytest.mark.parametrize("kind", RUNS)
def test_no_readable_array_of_a_model_passes_the_server(kind):
    grids = [Grid(), Grid()]
    fit(grids[0], kind)
    fit(grids[1], kind, privacy=CLEAR)
    read = [{name for seen in grid.seen for name in numbers_in(seen)} for grid in grids]
    assert not read[0]
    # in the clear it is the same arrays, and nothing that was not summed
    assert read[1] == SUMMED
    sealed = [seen.arrays[key] for seen in grids[0].seen for key in words_of(seen)]
    words = np.concatenate(sealed)
    assert len(np.unique(words)) == len(words)


def test_theta_and_scores_no_longer_tell_the_features():
    """h_t = X theta_t for t = 1 ... T: the attack on sharded tables, in both forms."""
    solved = {}
    for name, privacy in (("clear", CLEAR), ("sealed", PrivacySettings())):
        grid = Grid()
        fit(grid, "consensus", num_epochs=12, l2=0.0, privacy=privacy)
        solved[name] = attack(grid)
    # some table's rows are read whole from the clear
    assert min(solved["clear"]) < 1e-3
    # and from sealed sums there is nothing to solve with
    assert not solved["sealed"]


def attack(grid):
    """The relative errors of scores predicted for an epoch that was left out.

    The server has theta, the mean of the last proposals, and h of every epoch; X is
    the solution of its equations.
    """
    theta = {}
    scores = {}
    for seen in grid.seen:
        for (part, name), array in seen.arrays.items():
            if name == "sum" and array.dtype == float:
                theta.setdefault(part, []).append(array[:-1] / array[-1])
            if seen.action == "train.consensus" and name == "scores":
                # masked words are no scores: their sum with nobody's is uniform
                scores.setdefault(part, []).append(array.astype(float))
    errors = []
    for part, found in theta.items():
        known = np.array(found)
        left = np.column_stack(scores[part])
        rows, *_ = np.linalg.lstsq(known[:-1], left.T[:-1], rcond=1e-7)
        predicted = known[-1] @ rows
        errors.append(np.abs(predicted - left.T[-1]).max() / np.abs(left).max())
    return errors


def sums_of(seen):
    return [key for key in seen.arrays if key[1] == "sum"]


def words_of(seen):
    """The sealed shares of a reply."""
    return [
        key
        for key, array in seen.arrays.items()
        if key[1] == "share" and array.dtype == np.uint64
    ]


def other_sums(change):
    """A server that changes the sums that it sends."""

    def forge(seen):
        for key in sums_of(seen):
            seen.arrays[key] = change(seen.arrays[key])

    return forge


def with_first(words):
    return np.append(words[0] + np.uint64(1), words[1:])


def with_check(words):
    return np.append(words[:-1], words[-1] ^ np.uint64(1))


def one_forged(seen):
    """Forge the words of one shard, on their way to the sum."""
    if seen.is_reply and seen.node % 2:
        for key in words_of(seen):
            seen.arrays[key][:] = 7


class Memory:
    """A server that sends the first sum it has made again and again."""

    def __init__(self):
        self.first = {}

    def __call__(self, seen):
        for key in sums_of(seen):
            size = len(seen.arrays[key])
            self.first.setdefault((key, size), seen.arrays[key].copy())
            seen.arrays[key] = self.first[key, size].copy()


FORGERIES = {
    "changed_sum": other_sums(with_first),
    "changed_check": other_sums(with_check),
    "in_the_clear": other_sums(lambda words: words.astype(float)),
    "no_sum": other_sums(np.zeros_like),
    "one_forged": one_forged,
    "Memory": None,
}


@pytest.mark.cases(
    "changed_sum-consensus",
    "changed_check-mlp",
    "in_the_clear-sgd",
    "no_sum-gram",
    "one_forged-sgd",
    "Memory-gram",
)
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("forgery", FORGERIES)
def test_shards_refuse_what_is_not_the_sum_of_their_words(kind, forgery):
    grid = Grid(FORGERIES[forgery] or Memory())
    with pytest.raises(SiteError, match=f"site '.*', table '.*': .* {NOT_THE_SUM}"):
        fit(grid, kind)


def lists_shards(forge):
    """A server that lists the shards of every sum, as proposed, and then forges it.

    An honest one lists them where they are not all that were proposed.
    """
    keys = {}
    parts = {}

    @on_requests("query.extract", "train.prepare")
    def change(seen):
        if seen.action == "query.extract":
            keys.update(seen.header["public-keys"])
            parts.update(seen.header["proposal"]["parts"])
            return
        for part in seen.header["parts"]:
            table = parts[str(part["id"])]["table"]
            shards = {
                n: keys[p["node"]] for n, p in parts.items() if p["table"] == table
            }
            part["union"].setdefault("shards", shards)
        forge(seen)

    return change


def test_a_list_of_all_shards_says_no_more_than_none():
    grids = [Grid(), Grid(lists_shards(lambda _: None))]
    models = [fit(grid, "gram", num_epochs=1).report.final_train for grid in grids]
    assert models[0] == models[1]


def without(number):
    """A server that leaves a shard out of the sums, and says so to some."""

    @lists_shards
    def forge(seen):
        for part in seen.header["parts"]:
            shards = part["union"]["shards"]
            if str(number) in shards and str(part["id"]) != str(number):
                del shards[str(number)]

    return forge


def test_shards_that_know_of_different_shards_do_not_open_a_sum():
    """A consensus is of the shards with rows; all others are of all shards, as
    proposed.
    """
    with pytest.raises(SiteError, match=NOT_THE_SUM):
        fit(Grid(without(0)), "consensus")
    with pytest.raises(SiteError, match=OTHER_SHARDS):
        fit(Grid(without(0)), "gram")


@lists_shards
def own_left_out(seen):
    for part in seen.header["parts"]:
        del part["union"]["shards"][str(part["id"])]


def test_a_shard_with_rows_is_in_the_sum():
    missing = "'union' lacks this shard, which has rows to train on"
    for kind, match in (
        ("gram", OTHER_SHARDS),
        ("sgd", OTHER_SHARDS),
        ("consensus", missing),
    ):
        with pytest.raises(SiteError, match=match):
            fit(Grid(own_left_out), kind)


@pytest.mark.parametrize(
    ("group", "match"),
    [
        *((group, MALFORMED) for group in ("run", "join-0", "table-x")),
        (
            "table-9",
            (
                "'group': the run was proposed with 'table-.', and the request says "
                "'table-9'"
            ),
        ),
    ],
)
def test_only_a_table_s_key_seals_its_sums(group, match):
    @on_requests("train.prepare")
    def other(seen):
        for part in seen.header["parts"]:
            part["union"]["group"] = group

    with pytest.raises(SiteError, match=match):
        fit(Grid(other), "gram")


def test_two_shards_of_one_number_have_different_masks():
    """Else the difference of two shards' words would be that of their arrays."""

    @lists_shards
    def renumber(seen):
        for part in seen.header["parts"]:
            union = part.get("union")
            if union is not None:
                first = min(union["shards"], key=int)
                union["shards"] = {str(part["id"]): union["shards"][first]}

    with pytest.raises(SiteError, match=OTHER_SHARDS):
        fit(Grid(renumber), "gram")


def test_only_the_shards_of_a_table_have_its_key():
    grid = Grid()
    keys = {}

    @on_replies("query.extract")
    def look(seen):
        keys[seen.node] = stored_keys(grid, seen.node)

    grid.change = look
    fit(grid, "gram", num_epochs=1)
    tables = [{n for n in own if n.startswith("table")} for own in keys.values()]
    assert sorted(map(sorted, tables)) == [
        *[["table-0"]] * 3,
        *[["table-1"]] * 2,
        *[["table-2"]] * 2,
    ]
    values = {key for own in keys.values() for n, key in own.items() if "table" in n}
    assert len(values) == 3
