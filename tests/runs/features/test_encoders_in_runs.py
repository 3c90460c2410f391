"""Encoders as a run uses them: what sites encode, and what they tell."""

import json

import numpy as np
import pytest

from tests.support.federated import Run, one_per_site, run, sharded, store, whole
from tests.support.files import case_table
from tp_flower.errors import SiteError

CASES = case_table(__file__)
FRAMES = store()
ENCODERS = tuple(map(tuple, CASES["encoders"]))
NAMES = {
    "o": ("day[0]", "day[1]", "online[0]", "online[1]"),
    "c": tuple(f"{name}[{place}]" for name in ("age", "region") for place in range(4)),
    "i": ("price", "weight[0]", "weight[1]"),
}


def encoded(layout: str, **settings: object) -> Run:
    shards = {"whole": whole, "sharded": sharded}[layout](FRAMES)
    return run("squared", one_per_site(shards), num_epochs=1, **settings)


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    return {name: encoded(name, encoders=ENCODERS) for name in ("whole", "sharded")}


def test_features_are_encoded_as_the_settings_say(runs: dict[str, Run]) -> None:
    encoders = runs["sharded"].strategy.training_problem.encoders
    for alias, names in NAMES.items():
        assert encoders[alias].names == names
        assert encoders[alias].dropped == ()


def test_a_sharded_table_is_encoded_like_an_unsplit_one(runs: dict[str, Run]) -> None:
    for alias in NAMES:
        one, other = (
            rows[np.lexsort(rows.round(4).T)]
            for rows in (found.features[alias] for found in runs.values())
        )
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_no_text_and_no_key_reaches_the_server(runs: dict[str, Run]) -> None:
    default = encoded("sharded")
    for finished in (*runs.values(), default):
        for seen in finished.seen:
            said = json.dumps(seen.header)
            assert not any(f'"{name}"' in said for name in ("US", "UK", "FR"))
            assert not any(array.dtype.kind in "SU" for array in seen.arrays.values())
            assert '"keys": {' not in said
    assert default.strategy.training_problem.encoders["c"].width == 4


def test_an_encoder_that_does_not_fit_stops_the_run() -> None:
    match = r"encoder of c\.region: encoder min-max does not fit a text: use categories"
    with pytest.raises(SiteError, match=match):
        encoded("whole", encoders=(("c", "region", "min-max"),))
