"""Masked scores train the model that scores in the clear do, at the same bytes."""

import numpy as np
import pytest

from tests.support.examples.store_runs import LEFT, trained
from tests.support.federated import SOURCE, Run
from tests.support.files import case_table
from tp_flower.errors import QueryError
from tp_flower.settings import PrivacySettings

CASES = case_table(__file__)
MASKED = PrivacySettings(scores="masked")
CLEAR = PrivacySettings(scores="clear")
TWICE = f"{SOURCE} JOIN customers d ON o.item = d.id"
CYCLE = f"{SOURCE} AND c.id = i.item"
SOURCES = {"inner": SOURCE, "left": LEFT, "twice": TWICE, "cycle": CYCLE}
SCORES = ("scores", "batch-scores", "tested-scores")


def history(finished: Run) -> np.ndarray:
    metrics = [own for e in finished.strategy.history for own in (e.train, e.test)]
    return np.array([value for own in metrics for value in own.values()])


def scores_sent(finished: Run) -> list[np.ndarray]:
    return [
        array
        for seen in finished.seen
        for (_, name), array in seen.arrays.items()
        if seen.is_reply and name in SCORES
    ]


def traffic(finished: Run) -> list[tuple[str, int, int]]:
    """What every round sends up and down, without what LEFT JOINs need."""
    return [
        (r.phase, sum(r.bytes_up.values()), sum(r.bytes_down.values()))
        for r in finished.report.history
        if r.phase != "prepare"
    ]


@pytest.mark.cases(
    "squared-sharded-how1-twice",
    "logistic-sharded-how2-left",
    "logistic-whole-how4-twice",
    "softmax-sharded-how6-inner",
    "squared-sharded-how7-cycle",
)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("loss", "layout", "how"), CASES["runs"])
def test_masked_scores_train_the_same_model(source, loss, layout, how):
    # a network enlarges the rounding of masked scores with every epoch
    epochs = 2 if "models" in how else 4
    how = {"source": SOURCES[source], "num_epochs": epochs, **how}
    masked, clear = (
        trained(loss, layout, privacy=privacy, **how) for privacy in (MASKED, CLEAR)
    )
    np.testing.assert_allclose(history(masked), history(clear), rtol=1e-4, atol=1e-6)
    for finished, dtype in ((masked, "uint32"), (clear, "float32")):
        assert {array.dtype.name for array in scores_sent(finished)} == {dtype}
    assert traffic(masked) == traffic(clear)


def test_a_row_with_a_partner_in_some_joined_rows_only_cannot_be_masked():
    source = """FROM orders o JOIN items i ON o.item = i.item
    LEFT JOIN customers c ON o.customer = c.id AND i.item = c.id"""
    match = "partners for .* rows of .* in some of their joined rows only: such scores "
    with pytest.raises(QueryError, match=match):
        trained("squared", source=source, num_epochs=1)
