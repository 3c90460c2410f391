"""The reference problem of a run on the store, built from what its sites were told."""

import numpy as np

from tests.support.federated import ALIASES, COLUMNS, SOURCE, Frames, Run
from tests.support.reference import joins
from tests.support.reference.training import Centralised, centralised
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
    run: Run, frames: Frames, loss: str, source: str = SOURCE, weight: str = "1"
) -> Centralised:
    """The problem on the join that DuckDB materialises, with the run's split.

    Where a LEFT JOIN found no row, the features of its table are zero.

    Args:
        run: that is compared.
        frames: the tables.
        loss: its name.
        source: the query from FROM on.
        weight: what DuckDB weighs each joined training row by.
    """
    tested = run.tested["o"]
    # an order is trained on or tested, never both
    assert not (run.trained["o"] & tested).any()
    held_out = held_out_orders(run, len(tested))
    positions, weights = joins.weighted_positions(
        {name: [frame] for name, frame in frames.items()},
        ALIASES,
        f"{source} WHERE o.position_ NOT IN {(*np.flatnonzero(held_out).tolist(), -1)}",
        weight,
    )
    counted = {row[0] for row, own in zip(positions, weights, strict=True) if own}
    assert counted == set(np.flatnonzero(run.trained["o"]))
    return centralised(
        frames,
        ALIASES,
        COLUMNS,
        positions,
        ("o", store_labels(frames, loss), ~held_out),
        loss,
        run.strategy.settings.l2,
        GroupSecret.of_simulation(run.strategy.settings.seed).value,
        None if weight == "1" else np.array(weights),
    )


def held_out_orders(run: Run, orders: int) -> np.ndarray:
    """The orders held out, also those that no joined row comes from."""
    fitted = []
    for part in run.strategy.training_problem.tables["o"].parts:
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
