"""Everything that the server receives in a default run, whichever method trains."""

import pytest

from tests.support.federated import (
    WatchedGrid,
    one_per_site,
    sharded,
    store,
    store_sql,
    train,
    whole,
)
from tests.support.files import case_table
from tp_flower.settings import PrivacySettings

CLEAR = PrivacySettings(scores="clear", unions="clear")
ENVELOPE = {"round", "seconds", "parts", "id"}
RECEIVED = {
    action: set(names) for action, names in case_table(__file__)["received"].items()
}


def received(method, layout, **settings):
    """The fields of all messages to the server that have a value, by message."""
    grid = WatchedGrid(one_per_site(layout(store(120, 20))))
    train(
        grid, store_sql("squared"), method, num_epochs=2, task="regression", **settings
    )
    fields = {}
    for seen in grid.seen:
        if seen.is_reply:
            own = fields.setdefault(seen.action, set())
            own.update(seen.header, *seen.header.get("parts", ()))
            own |= {f"{n.split('/')[0]} {a.dtype}" for (_, n), a in seen.arrays.items()}
    return {action: names - ENVELOPE for action, names in fields.items()}


def beyond(fields):
    """The fields that a default run does not have."""
    return {name for action in fields for name in fields[action] - RECEIVED[action]}


@pytest.mark.cases(
    "admm-linear-sharded",
    "admm-mlp-whole",
    "cg-linear-whole",
    "cg-linear-sharded",
    "sgd-linear-whole",
    "sgd-mlp-sharded",
    "gd-linear-sharded",
    "gd-mlp-whole",
)
@pytest.mark.parametrize("layout", [whole, sharded])
@pytest.mark.parametrize("model", ["linear", "mlp"])
@pytest.mark.parametrize("method", ["admm", "cg", "sgd", "gd"])
def test_the_server_receives_no_statistics_models_or_scores_of_a_table(
    method, model, layout
):
    if method == "cg" and model != "linear":
        pytest.skip("it has linear models only")
    how = {"batch_size": 60} if method == "sgd" else {}
    assert not beyond(received(method, layout, model=model, **how))


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("admm", {"share float64", "scores float32"}),
        ("gd", {"share float64", "batch-scores float32", "tested-scores float32"}),
    ],
)
def test_of_a_run_in_the_clear_it_would_be_noticed(method, fields):
    assert beyond(received(method, sharded, privacy=CLEAR)) >= fields
