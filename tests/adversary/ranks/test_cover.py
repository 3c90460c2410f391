"""Statements about the tables that scores hide in: who can forge them, and what a
server gains.
"""

from contextlib import closing
from functools import partial

import numpy as np
import pytest

from client_apps.data.ledger import open_ledger
from strategies import TablePuppetCG
from tests.support.federated import WatchedGrid, train, write_site
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


def run(folder, change=None, *, clinic=None, rules=RULES, sql=SQL, epochs=1):
    """Train with a server that may change what it sends and receives; return all
    messages.
    """
    clinic = others() if clinic is None else clinic
    sites = written(folder, rules, payments=payments(), clinic=clinic)
    with closing(WatchedGrid(sites, change, state=folder / "state")) as grid:
        train(grid, sql, TablePuppetCG, test_fraction=0.0, num_epochs=epochs)
    return grid


def relayed(change):
    """A server that changes the statements that it relays to the payments' site."""

    def changed(seen):
        if seen.action == "train.prepare" and not seen.is_reply:
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
    with pytest.raises(
        SiteError, match=r"\(cover = 1\) refuses: .* and 0 tables of other sites"
    ):
        run(tmp_path / "flat", clinic=FLAT)
    with pytest.raises(
        SiteError, match=r"\(cover = 2\) refuses: .* and 1 tables of other sites"
    ):
        run(tmp_path / "two", rules=RULES.replace("cover = 1", "cover = 2"))
    assert counted(tmp_path / "flat") == counted(tmp_path / "two") == 0
    rules = RULES.replace("cover = 1", "cover = 2")
    more = {"clinic": others(), "lab": others(seed=2)}
    sites = written(tmp_path / "more", rules, payments=payments(), **more)
    of_lab = features("l", [f"x{k}" for k in range(6)])
    sql = SQL.replace(" FROM", f", {of_lab} FROM") + " JOIN lab l ON p.id = l.id"
    with closing(WatchedGrid(sites, state=tmp_path / "more" / "state")) as grid:
        train(grid, sql, TablePuppetCG, test_fraction=0.0, num_epochs=1)
    assert counted(tmp_path / "more") == 1


def test_another_table_of_the_site_covers_nothing(tmp_path):
    """Scores hide in those of other sites alone."""
    own = {"payments": payments(), "clinic": others()}
    sites = {"shop": write_site(tmp_path / "shop", own, {"payments": RULES})}
    with (
        closing(WatchedGrid(sites, state=tmp_path / "state")) as grid,
        pytest.raises(
            SiteError, match=r"\(cover = 1\) refuses: .* and 0 tables of other sites"
        ),
    ):
        train(grid, SQL, TablePuppetCG, test_fraction=0.0, num_epochs=1)


def test_all_shards_of_a_table_that_covers_vary(tmp_path):
    """Rows that are joined with those of a flat shard would hide in nothing."""
    halves = {"clinic": slice(300), "branch": slice(300, None)}

    def trained(name, change=None, **frames):
        sites = written(tmp_path / name, RULES, payments=payments())
        for site, frame in frames.items():
            sites[site] = write_site(
                tmp_path / name / site, {"clinic": frame[halves[site]]}
            )
        with closing(
            WatchedGrid(sites, change, state=tmp_path / name / "state")
        ) as grid:
            train(grid, SQL, TablePuppetCG, test_fraction=0.0, num_epochs=1)
        return counted(tmp_path / name)

    assert trained("varied", clinic=others(), branch=others()) == 1
    with pytest.raises(
        SiteError, match=r"\(cover = 1\) refuses: .* and 0 tables of other sites"
    ):
        trained("flat", clinic=others(), branch=FLAT)
    # rows that are not joined hide nothing, and tell nothing
    far = FLAT.assign(id=FLAT["id"] + 10**6)
    sites = written(tmp_path / "far", RULES, payments=payments(), clinic=others())
    sites["branch"] = write_site(tmp_path / "far" / "branch", {"clinic": far})
    with closing(WatchedGrid(sites, state=tmp_path / "far" / "state")) as grid:
        train(grid, SQL, TablePuppetCG, test_fraction=0.0, num_epochs=1)
    # nor does a server hide a shard: which there are is in the proposal of the run
    without = relayed(lambda part, array: None if part == "1" else array)
    with pytest.raises(
        SiteError, match=r"\(cover = 1\) refuses: .* and 0 tables of other sites"
    ):
        trained("hidden", without, clinic=others(), branch=others())


def test_a_server_forges_no_statement(tmp_path):
    """Of a clinic whose columns hardly vary: none of its own, of another run, or
    another part.
    """
    earlier = run(tmp_path / "earlier").arrays("query.rank", replies=True)
    stated = {
        str(part): array
        for (part, name), array in earlier.items()
        if name == "statement"
    }
    rng = np.random.default_rng(0)
    forgeries = {
        "random": lambda _, array: rng.integers(0, 256, len(array)).astype(np.uint8),
        "flipped": lambda _, array: array ^ np.uint8(1),
        "of another run": lambda part, _: stated[part],
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
            own.update(
                {
                    part: a
                    for (part, name), a in seen.arrays.items()
                    if name == "statement"
                }
            )
        relayed(lambda *_: own[0])(seen)

    with pytest.raises(SiteError, match="cannot be opened: no site of this run"):
        run(tmp_path, change, clinic=FLAT)


def test_statements_that_are_left_out_cover_nothing(tmp_path):
    with pytest.raises(SiteError, match=r"\(cover = 1\) refuses: .* and 0 tables"):
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

    def hide(seen):
        if seen.action == "query.describe" and seen.is_reply:
            for shard in seen.header["shards"]:
                shard.pop("ranks", None)

    with pytest.raises(SiteError, match=r"\(cover = 1\) refuses: .* and 0 tables"):
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

    def narrow(action, seen):
        if seen.action == action and not seen.is_reply:
            for part, name in seen.arrays.keys() & {
                (p, n) for p in (0, 1) for n in narrower
            }:
                seen.arrays[part, name] = narrower[name](seen.arrays[part, name])

    for action in ("train.prepare", "query.rank"):
        with pytest.raises(
            SiteError, match=r"rows of part [01] are not those of an earlier message"
        ):
            run(tmp_path / action, partial(narrow, action))


def test_a_rank_is_of_the_rows_that_take_part(tmp_path):
    """Rows that differ in three columns alone have no more scores for other rows that
    vary.
    """
    frame = payments()
    alike = frame["id"] < 400
    for name in NAMES[3:]:
        frame.loc[alike, name] = 1.0
    sites = written(tmp_path, RULES, payments=frame, clinic=others()[:400])
    with (
        closing(WatchedGrid(sites, state=tmp_path / "state")) as grid,
        pytest.raises(SettingsError, match="lets 0 more score vectors leave"),
    ):
        train(grid, SQL, TablePuppetCG, test_fraction=0.0, num_epochs=1)


def test_a_round_that_comes_again_counts_once(tmp_path):
    """A reply that was lost, and a process that was killed after its commit."""

    class Twice(WatchedGrid):
        def _deliver(self, message):
            super()._deliver(message)
            return super()._deliver(message)

    sites = written(tmp_path, RULES, payments=payments(), clinic=others())
    with closing(Twice(sites, state=tmp_path / "state")) as grid:
        train(grid, SQL, TablePuppetCG, test_fraction=0.0, num_epochs=2)
    assert counted(tmp_path) == 2
    ledger = open_ledger(str(tmp_path / "state" / "payments"))
    assert sum('"event":"scores"' in line for line in ledger.export()) == 2
