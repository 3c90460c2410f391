"""Encoders as a run uses them: what sites encode, and what they tell."""

import json
import re

import numpy as np
import pandas as pd
import pytest

from strategies import Explain
from tests.support.federated import (
    LAYOUTS,
    Run,
    one_per_site,
    pieces,
    run,
    run_query,
    store,
    train,
    whole,
)
from tests.support.files import case_table
from tests.support.peers.hostile import HostileGrid
from tests.support.peers.hostile import train as train_hostile
from tp_flower.errors import SiteError
from tp_flower.reports.records import report_dict

CASES = case_table(__file__)
FRAMES = store()
ENCODERS = tuple(map(tuple, CASES["encoders"]))
NAMES = {
    "o": ("day[0]", "day[1]", "online[0]", "online[1]"),
    "c": tuple(f"{name}[{place}]" for name in ("age", "region") for place in range(4)),
    "i": ("price", "weight[0]", "weight[1]"),
}


def encoded(layout: str, **settings: object) -> Run:
    sites = one_per_site(LAYOUTS[layout](FRAMES))
    return run("squared", sites, num_epochs=1, **settings)


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    return {name: encoded(name, encoders=ENCODERS) for name in LAYOUTS}


def test_features_are_encoded_as_the_settings_say(runs):
    encoders = runs["sharded"].problem.encoders
    for alias, names in NAMES.items():
        assert encoders[alias].names == names
        assert encoders[alias].dropped == ()


def test_a_sharded_table_is_encoded_like_an_unsplit_one(runs):
    for alias in NAMES:
        one, other = (
            rows[np.lexsort(rows.round(4).T)]
            for rows in (found.features[alias] for found in runs.values())
        )
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_no_text_and_no_key_reaches_the_server(runs):
    default = encoded("sharded")
    for finished in (*runs.values(), default):
        for seen in finished.seen:
            said = json.dumps(seen.header)
            assert not any(f'"{name}"' in said for name in ("US", "UK", "FR"))
            assert not any(array.dtype.kind in "SU" for array in seen.arrays.values())
            assert '"keys": {' not in said
    assert default.problem.encoders["c"].width == 5


def test_an_encoder_that_does_not_fit_stops_the_run():
    match = r"encoder of c\.region: encoder min-max does not fit a text: use categories"
    with pytest.raises(SiteError, match=match):
        encoded("whole", encoders=(("c", "region", "min-max"),))


def albums() -> dict[str, pd.DataFrame]:
    """Lines of albums: some titles are missing, and the label says which."""
    rows = 600
    kinds = 30
    rng = np.random.default_rng(0)
    titles = [None if k % 3 == 0 else f"t{k}" for k in range(kinds)]
    album = np.minimum(rng.geometric(0.15, rows) - 1, kinds - 1)
    label = (album % 3 == 0) + 0.1 * rng.normal(size=rows)
    lines = pd.DataFrame(
        {"album": album, "y": label, "note": rng.integers(0, 9, rows).astype(str)}
    )
    lines.loc[:9, "note"] = "oops"
    return {
        "lines": lines,
        "albums": pd.DataFrame({"id": np.arange(kinds), "title": titles}),
    }


ALBUMS = """SELECT l.y AS label, al.title, l.note
FROM lines l JOIN albums al ON l.album = al.id"""
CUT = (("al", "title", "one-hot(4)"),)
HOW = {"task": "regression", "num_epochs": 30, "seed": 3}


def split_in_two(frames: dict[str, pd.DataFrame]) -> dict[str, list[pd.DataFrame]]:
    return {name: pieces(frame, len(frame) // 2) for name, frame in frames.items()}


@pytest.mark.parametrize("layout", [whole, split_in_two])
def test_a_missing_category_is_one_and_what_is_lost_is_said(layout):
    sites = one_per_site(layout(albums()))
    finished = run_query(ALBUMS, sites, encoders=CUT, **HOW)
    report = report_dict(finished.report)
    assert report["final"]["test"]["r2"] > 0.8
    title = report["tables"][1]["encoding"][0]
    assert (title["encoder"], title["columns"]) == ("one-hot(4) missing=category", 4)
    assert (title["kept"], title["categories"]) == (3, 20)
    assert 25 < title["missing"] < 60
    warnings = sorted(report["warnings"])
    lost, odd = (text for text in warnings if text[:4] in ("al.t", "l.no"))
    assert lost == (
        f"al.title: 3 of 20 categories kept, {title['other']} % of the joined rows in "
        "(other); max-categories keeps more"
    )
    assert odd.startswith("l.note: most texts are numbers or dates, yet it is read")
    explained = train(sites, ALBUMS, Explain, encoders=CUT, **HOW)
    assert explained.warnings == [*finished.strategy.warnings]
    encodings = [
        [table["encoding"] for table in tables]
        for tables in (explained.explanation["tables"], report["tables"])
    ]
    assert encodings[0] == encodings[1]
    ordinary = train(sites, ALBUMS.replace(", l.note", ""), **HOW)
    assert not re.search("categories|nearly", "\n".join(ordinary.warnings))


def test_a_category_per_row_is_an_identifier():
    frames = albums()
    frames["lines"]["note"] = [f"n{k}" for k in range(600)]
    warnings = train(one_per_site(whole(frames)), ALBUMS, **HOW).warnings
    (warning,) = (text for text in warnings if text.startswith("l.note"))
    words = r"l\.note: \d+ categories in \d+ joined rows, as of an identifier"
    assert re.match(words, warning)


def test_a_policy_hides_the_facts_about_rows(tmp_path):
    rules = "releases = { statistics = 'never' }"
    grid = HostileGrid(tmp_path, policies={"orders": rules, "customers": rules})
    strategy = train_hostile(grid, encoders=tuple(map(tuple, CASES["free"])))
    (orders, customers) = report_dict(strategy.report)["tables"]
    for row in (*orders["encoding"], *customers["encoding"]):
        hidden = {row[key] for key in ("type", "encoder", "missing", "kept")}
        assert hidden == {None}
