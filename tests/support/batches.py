"""The batches that a run was trained on."""

from tests.support.federated import Run


def batches_of(finished: Run) -> list[list[list[int]]]:
    """Per epoch the joined rows of every batch, in the order they were trained on."""
    plan = finished.strategy._batches.plan
    epochs: dict[int, list[list[int]]] = {}
    taken: dict[int, int] = {}
    for seen in finished.seen:
        if seen.action != "train.sgd" or seen.is_reply or seen.round in taken:
            continue
        taken[seen.round] = batch = seen.header["batch"]
        epoch = next(r.epoch for r in finished.history if r.round == seen.round)
        rows = plan.order[plan.slice(batch)].tolist()
        epochs.setdefault(epoch, []).append(rows)
    return list(epochs.values())
