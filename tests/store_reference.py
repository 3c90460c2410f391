"""The reference problem of a run on the store, built from what its sites were told."""

import numpy as np

from tests.federated import ALIASES, COLUMNS, SOURCE, Frames, Run
from tests.reference import joins
from tests.reference.training import Centralised, centralised
from tp_flower.privacy.key_agreement import GroupSecret


def store_labels(frames: Frames, loss: str) -> np.ndarray:
    """The label of every order."""
    qty = frames["orders"]["qty"].to_numpy()
    if loss == "squared":
        return qty
    if loss == "logistic":
        return (qty > 3).astype(float)
    return (qty > 2).astype(float) + (qty > 4)


def reference_of(
    run: Run, frames: Frames, loss: str, source: str = SOURCE
) -> Centralised:
    """The problem on the join that DuckDB materialises, with the run's split.

    Where a LEFT JOIN found no row, the features of its table are zero.
    """
    every = joins.joined_positions(
        {name: [frame] for name, frame in frames.items()}, ALIASES, source
    )
    tested = run.tested["o"]
    # an order is trained on or tested, never both
    assert not (run.trained["o"] & tested).any()
    positions = [row for row in every if not tested[row[0]]]
    assert {row[0] for row in positions} == set(np.flatnonzero(run.trained["o"]))
    held_out = held_out_orders(run, len(tested))
    return centralised(
        frames,
        ALIASES,
        COLUMNS,
        positions,
        ("o", store_labels(frames, loss), ~held_out),
        loss,
        run.strategy.settings.l2,
        GroupSecret.of_simulation(run.strategy.settings.seed).value,
    )


def held_out_orders(run: Run, orders: int) -> np.ndarray:
    """The orders held out, also those that no joined row comes from."""
    fitted = []
    for part in run.strategy.federation.tables["o"].parts:
        for seen in run.seen:
            packed = seen.arrays.get((part.number, "rows"))
            if seen.action == "query.statistics" and packed is not None:
                fitted.append((part, packed))
    sizes = {
        facts["id"]: facts["rows"]
        for seen in run.seen
        if seen.action == "query.extract" and seen.is_reply
        for facts in seen.header["parts"]
    }
    masks = [
        np.unpackbits(packed, count=sizes[part.number]).astype(bool)
        for part, packed in fitted
    ]
    mask = np.concatenate(masks)
    assert len(mask) == orders
    return ~mask
