"""Statements about the tables that scores hide in: who can forge them, and what a
server gains.
"""

from itertools import product

import numpy as np
import pytest

from tests.support.federated import (
    WatchedGrid,
    on_replies,
    on_requests,
    train,
    write_site,
)
from tests.support.ledgers import ledger_lines
from tests.support.peers.payments import (
    JOINED,
    NAMES,
    RULES,
    counted,
    features,
    others,
    payments,
    written,
)
from tp_flower.errors import SettingsError, SiteError
from tp_flower.protocol.packet import pack_bits

SQL = f"SELECT p.y AS label, {features('p', NAMES)}, {JOINED}"


def run_at(sites, folder, change=None, *, sql=SQL, epochs=1, kind=WatchedGrid):
    """Train with a server that may change what it sends and receives; return all
    messages.
    """
    with kind(sites, change, state=folder / "state") as grid:
        train(grid, sql, "cg", test_fraction=0.0, num_epochs=epochs)
    return grid


def run(folder, change=None, *, clinic=None, rules=RULES, **how):
    clinic = others() if clinic is None else clinic
    sites = written(folder, rules, payments=payments(), clinic=clinic)
    return run_at(sites, folder, change, **how)


def no_cover(cover=1, tables=0):
    """Expect a refusal as so many tables of other sites vary."""
    match = rf"\(cover = {cover}\) refuses: .* and {tables} tables of other sites"
    return pytest.raises(SiteError, match=match)


def relayed(change):
    """A server that changes the statements that it relays to the payments' site."""

    @on_requests("train.prepare")
    def changed(seen):
        for (part, name), array in list(seen.arrays.items()):
            if name.startswith("cover/"):
                replaced = change(name.removeprefix("cover/"), array)
                seen.arrays[part, name] = replaced
        seen.arrays = {
            key: array for key, array in seen.arrays.items() if array is not None
        }

    return changed


FLAT = others(columns=6).assign(**{f"x{k}": np.arange(600) % 7 for k in range(1, 6)})


def test_a_table_that_varies_covers(tmp_path):
    """The owner lowers 'cover', or the run joins more tables, as the refusal says."""
    run(tmp_path)
    with no_cover():
        run(tmp_path / "flat", clinic=FLAT)
    rules = RULES.replace("cover = 1", "cover = 2")
    with no_cover(2, 1):
        run(tmp_path / "two", rules=rules)
    assert counted(tmp_path / "flat") == counted(tmp_path / "two") == 0
    sites = written(
        tmp_path / "more",
        rules,
        payments=payments(),
        clinic=others(),
        lab=others(seed=2),
    )
    of_lab = features("l", [f"x{k}" for k in range(6)])
    sql = SQL.replace(" FROM", f", {of_lab} FROM") + " JOIN lab l ON p.id = l.id"
    run_at(sites, tmp_path / "more", sql=sql)
    assert counted(tmp_path / "more") == 1


def test_another_table_of_the_site_covers_nothing(tmp_path):
    """Scores hide in those of other sites alone."""
    own = {"payments": payments(), "clinic": others()}
    sites = {"shop": write_site(tmp_path / "shop", own, {"payments": RULES})}
    with no_cover():
        run_at(sites, tmp_path)


def test_all_shards_of_a_table_that_covers_vary(tmp_path):
    """Rows that are joined with those of a flat shard would hide in nothing."""
    halves = {"clinic": slice(300), "branch": slice(300, None)}

    def trained(name, change=None, **frames):
        sites = written(tmp_path / name, RULES, payments=payments())
        for site, frame in frames.items():
            half = {"clinic": frame[halves[site]]}
            sites[site] = write_site(tmp_path / name / site, half)
        run_at(sites, tmp_path / name, change)
        return counted(tmp_path / name)

    assert trained("varied", clinic=others(), branch=others()) == 1
    with no_cover():
        trained("flat", clinic=others(), branch=FLAT)
    # rows that are not joined hide nothing, and tell nothing
    far = FLAT.assign(id=FLAT["id"] + 10**6)
    sites = written(tmp_path / "far", RULES, payments=payments(), clinic=others())
    sites["branch"] = write_site(tmp_path / "far" / "branch", {"clinic": far})
    run_at(sites, tmp_path / "far")
    # nor does a server hide a shard: which there are is in the proposal of the run
    without = relayed(lambda part, array: None if part == "1" else array)
    with no_cover():
        trained("hidden", without, clinic=others(), branch=others())


def test_a_server_forges_no_statement(tmp_path):
    """Of a clinic whose columns hardly vary: none of its own, of another run, or
    another part.
    """
    earlier = run(tmp_path / "earlier").arrays("query.rank", replies=True)
    rng = np.random.default_rng(0)
    forgeries = {
        "random": lambda _, array: rng.integers(0, 256, len(array)).astype(np.uint8),
        "flipped": lambda _, array: array ^ np.uint8(1),
        "of another run": lambda part, _: earlier[int(part), "statement"],
    }
    for name, forge in forgeries.items():
        with pytest.raises(SiteError, match="cannot be opened: no site of this run"):
            run(tmp_path / name, relayed(forge), clinic=FLAT)
        assert counted(tmp_path / name) == 0


def test_a_statement_stands_for_no_other_part(tmp_path):
    """The payments' own statement, which says that they vary, in the clinic's place."""
    own = {}

    def change(seen):
        if seen.action == "query.rank" and seen.is_reply:
            own.update(seen.arrays)
        relayed(lambda *_: own[0, "statement"])(seen)

    with pytest.raises(SiteError, match="cannot be opened: no site of this run"):
        run(tmp_path, change, clinic=FLAT)


def test_statements_that_are_left_out_cover_nothing(tmp_path):
    with no_cover():
        run(tmp_path, relayed(lambda part, array: None if part == "1" else array))


def test_a_site_that_sides_with_the_server_covers_with_a_dummy(tmp_path):
    """The limit that the policy's reference states: ``partners`` is the rule about
    that.
    """
    dummy = others(seed=9)
    run(tmp_path, clinic=dummy)
    assert counted(tmp_path) == 1


def test_a_server_that_asks_for_no_ranks_gets_no_scores(tmp_path):
    """As if no policy had asked for them."""

    @on_replies("query.describe")
    def hide(seen):
        for shard in seen.header["shards"]:
            shard.pop("ranks", None)

    with no_cover():
        run(tmp_path / "cover", hide)
    # and beyond what the ranks allow, the site refuses by itself
    rules = RULES.replace("cover = 1", "cover = 0")
    with pytest.raises(
        SiteError, match=r"more score vectors of table 'p', .* of 3 that .* 3 have"
    ):
        run(tmp_path / "ranks", hide, rules=rules, epochs=4)
    assert counted(tmp_path / "ranks") == 3


def test_a_server_that_names_other_rows_gets_no_scores(tmp_path):
    """It asks for the rank of all rows, and for scores of those that differ in one
    column.
    """
    wanted = (payments()["shop"] < 0.0).to_numpy()
    narrower = {
        "trained": lambda _: pack_bits(wanted),
        "rows": lambda _: pack_bits(wanted),
        "multiplicity": lambda counts: counts[wanted],
    }

    def narrow(seen):
        for part, name in seen.arrays.keys() & {*product((0, 1), narrower)}:
            seen.arrays[part, name] = narrower[name](seen.arrays[part, name])

    for action in ("train.prepare", "query.rank"):
        with pytest.raises(
            SiteError, match=r"rows of part [01] are not those of an earlier message"
        ):
            run(tmp_path / action, on_requests(action)(narrow))


def test_a_rank_is_of_the_rows_that_take_part(tmp_path):
    """Rows that differ in three columns alone have no more scores for other rows that
    vary.
    """
    frame = payments()
    alike = frame["id"] < 400
    for name in NAMES[3:]:
        frame.loc[alike, name] = 1.0
    sites = written(tmp_path, RULES, payments=frame, clinic=others()[:400])
    with pytest.raises(SettingsError, match="lets 0 more score vectors leave"):
        run_at(sites, tmp_path)


def test_a_round_that_comes_again_counts_once(tmp_path):
    """A reply that was lost, and a process that was killed after its commit."""

    class Twice(WatchedGrid):
        def _deliver(self, message):
            super()._deliver(message)
            return super()._deliver(message)

    sites = written(tmp_path, RULES, payments=payments(), clinic=others())
    run_at(sites, tmp_path, epochs=2, kind=Twice)
    assert counted(tmp_path) == 2
    assert len(ledger_lines(tmp_path / "state" / "payments", "scores")) == 2
