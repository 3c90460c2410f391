"""Label rows that a join loses, and splits that do not fit the label, are warned of."""

import numpy as np
import pandas as pd
import pytest

from strategies.explain.explanation import Explain
from tests.support.examples.explained import printed
from tests.support.examples.store_runs import FRAMES, LEFT, trained
from tests.support.federated import ALIASES, SOURCE, train, whole
from tests.support.reference.joins import joined_positions

NUMBERS = np.arange(10)
SQL = "SELECT o.x AS label, c.z FROM o JOIN c ON o.k = c.k"
LOST = "only 4 of 10 label rows are joined: 6 have no match in c on o.k = c.k"


def keyed(left, right, sql=SQL):
    o = pd.DataFrame({"k": left, "x": NUMBERS * 1.5})
    c = pd.DataFrame({"k": right, "z": NUMBERS**2.0})
    explained = train([{"o": [o]}, {"c": [c]}], sql, Explain)
    return explained.warnings, explained.explanation


def test_nearly_equal_keys_are_hinted_at_by_their_types():
    upper, lower = (
        np.array([f"{letter}{k}" for k in NUMBERS], object) for letter in "Cc"
    )
    lower[:4] = upper[:4]
    (warning,), explanation = keyed(upper, lower)
    assert warning.startswith(LOST)
    assert warning.endswith(
        "texts, which must agree in case, spaces and leading zeros: try "
        "LOWER(TRIM(...)) on both sides, or CAST(... AS BIGINT) where they are numbers"
    )
    lost = [{"step": "c on o.k = c.k", "rows": 6}]
    assert explanation["label-rows"] == {"rows": 10, "joined": 4, "lost": lost}
    reason = (
        "the label is a number: it has 10 values, from 0 to 13.5; to train on them as "
        "classes set "
        'task = "classification"'
    )
    line = "Label rows: 4 of 10 are joined; 6 have no match in c on o.k = c.k."
    assert f"Task: regression, because {reason}. {line}" in " ".join(
        printed(explanation).split()
    )
    mended = SQL.replace("o.k = c.k", "LOWER(TRIM(o.k)) = LOWER(TRIM(c.k))")
    assert keyed(upper, lower, mended)[0] == []
    assert keyed(NUMBERS, NUMBERS + 6)[0] == [LOST]
    assert keyed(NUMBERS, NUMBERS + 5)[0] == []


@pytest.mark.parametrize("join", ["JOIN", "LEFT JOIN"])
def test_rows_without_a_key_are_counted_apart(join):
    """And a few texts in another form are hinted at beside the counts."""
    plain = np.array([f"c{k}" for k in NUMBERS], object)
    typed = np.array([None, None, "C2", *plain[3:]], object)
    on = "" if join == "LEFT JOIN" else " on o.k = c.k"
    said = (
        f"3 {'of 10 rows ' * (not on)}have no match in c{on}, 2 of them without a key"
    )
    warnings, explanation = keyed(typed, plain, SQL.replace("JOIN", join))
    text = " ".join(printed(explanation).split())
    assert warnings == []
    assert f"{said} (keys of o.k = c.k are texts, which must agree in case" in text
    assert explanation["join-steps"][1]["keyless-before"] == 2
    mended = SQL.replace("JOIN", join).replace("o.k = c.k", "LOWER(o.k) = LOWER(c.k)")
    text = " ".join(printed(keyed(typed, plain, mended)[1]).split())
    assert "2 of 10 rows have no match in c." in text if not on else "2 have" in text
    # neither numbers nor NULL have a form
    typed = np.array([None, None, *plain[2:]], object)
    assert "keys of o.k" not in printed(keyed(typed, plain, SQL)[1])
    _, explanation = keyed(np.where(NUMBERS < 3, 99, NUMBERS), NUMBERS, SQL)
    assert explanation["label-rows"]["lost"] == [{"step": "c on o.k = c.k", "rows": 3}]


def test_a_left_join_that_finds_little_says_so():
    """Keys of another form lose no label row there, and the table says nothing."""
    sql = SQL.replace("JOIN", "LEFT JOIN")
    padded = np.array([f"{k:03d}" for k in NUMBERS], object)
    plain = np.array([str(k) for k in NUMBERS], object)
    (warning,), explanation = keyed(plain, padded, sql)
    step = "10 of 10 rows have no match in c on o.k = c.k, and nothing from it; keys"
    assert warning.startswith(step)
    line = "10 of 10 are joined; 10 of 10 rows have no match in c."
    assert line in " ".join(printed(explanation).split())
    # what the warning says to write
    cast = "CAST(o.k AS BIGINT) = CAST(c.k AS BIGINT)"
    warnings, explanation = keyed(plain, padded, sql.replace("o.k = c.k", cast))
    assert warnings == []
    assert "no match" not in printed(explanation)
    # half is no reason to warn
    warnings, explanation = keyed(NUMBERS, NUMBERS + 5, sql)
    assert warnings == []
    assert "; 5 of 10 rows have no match in c." in " ".join(
        printed(explanation).split()
    )


@pytest.mark.parametrize(("source", "lost"), [(SOURCE, "ci"), (LEFT, "")])
def test_steps_lose_the_label_rows_that_the_join_lacks(source, lost):
    rows = trained("squared", "sharded", "cg", source, num_epochs=1).report.content("")
    joined = len(
        {order for order, *_ in joined_positions(whole(FRAMES), ALIASES, source)}
    )
    counts = rows["label-rows"]
    assert (counts["rows"], counts["joined"]) == (60, joined)
    assert [item["step"][0] for item in counts["lost"]] == list(lost)
    assert sum(item["rows"] for item in counts["lost"]) == 60 - joined


def test_a_label_whose_rows_are_whole_classes_is_offered_the_split_that_fits():
    genre = np.repeat(np.arange(12), [300, 90, 60, 30, 20, 10, *[5] * 6])
    sites = [
        {"genre": [pd.DataFrame({"id": np.arange(12), "name": list("abcdefghijkl")})]},
        {
            "track": [
                pd.DataFrame({"genre": genre, "ms": genre + np.arange(len(genre)) % 7})
            ]
        },
    ]
    sql = "SELECT g.name AS label, t.ms FROM genre g JOIN track t ON t.genre = g.id"
    share, untrained = train(sites, sql, Explain, seed=5).warnings
    assert share.startswith(
        "1.9% of the joined rows are held out (random rows), the settings ask"
    )
    # labels that stay at their site do not say which classes are trained on
    moments = {"strategy": "moments", "num_epochs": 0}
    assert train(sites, sql, Explain, seed=5, **moments).warnings == [share]
    assert untrained.startswith("no training row has 2 of the label's classes (")
    assert untrained.endswith('. With test-split = "random(t)" it is none of them')
    explained = train(sites, sql, Explain, seed=5, test_split="random(t)")
    assert explained.warnings == []
    assert explained.explanation["joined-rows"] == {"train": 432, "test": 108}


def test_a_share_that_few_groups_miss_is_said_to_be_theirs():
    """Every row is joined once."""
    k = np.arange(100)
    rows = pd.DataFrame({"y": k * 1.0, "x": k % 7, "ward": [f"w{i % 10}" for i in k]})
    sql = "SELECT t.y AS label, t.x FROM t"
    shares = [
        train([{"t": [rows]}], sql, Explain, seed=seed, test_split="group(t.ward)")
        for seed in range(6)
    ]
    warned = [text for run in shares for text in run.warnings if "held out" in text]
    assert warned
    assert all(
        text.endswith(
            "a hash of t.ward holds out whole groups of rows, and these are few, or of "
            "unequal sizes"
        )
        for text in warned
    )
