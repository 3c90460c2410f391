"""How much memory the server's arrays take in training.

What is kept from epoch to epoch and what an epoch works with, as the strategies hold
it; Python, Flower and messages in flight come on top.
"""

from collections.abc import Sequence

from tp_flower.explain.cost import TableSize

FLOAT = 8
CHANGE = 4
ROW_NUMBER = 4
POSITION = 8


def admm_bytes(
    tables: Sequence[TableSize], train: int, test: int, anderson_memory: int
) -> int:
    """Return the bytes of ADMM's arrays.

    Per joined row and output: z, duals and scores before and after an epoch and the
    message (7 numbers); per row and output: local scores before and after, and the
    target (3). Anderson mixing remembers how (duals, h_i) and their weighted steps
    changed, and the last step, in float32; and the weight of each row.

    Args:
        tables: of the training problem.
        train: N.
        test: held-out joined rows.
        anderson_memory: epochs that are looked back on; 0 without mixing.
    """
    outputs = tables[0].outputs
    own = sum(table.total for table in tables)
    epoch = (7 * train + 2 * test + 3 * own) * outputs * FLOAT
    changes = (2 * anderson_memory + 1) * (train + own) * outputs
    mixed = changes * CHANGE + own * FLOAT
    return _mapping_bytes(tables, train, test) + epoch + bool(anderson_memory) * mixed


def sgd_bytes(tables: Sequence[TableSize], train: int, test: int) -> int:
    """Return the bytes of SGD's arrays.

    The batch plan has a position per joined row, and one more per table; the rows of
    every batch are listed. Scores and labels are kept in the order of the batches.
    """
    outputs = tables[0].outputs
    own = sum(table.total for table in tables)
    listed = sum(table.batch_rows for table in tables)
    plan = (train * (1 + len(tables)) + round(listed)) * POSITION
    seen = (train + 2 * test + own) * outputs * FLOAT + train * FLOAT
    return _mapping_bytes(tables, train, test) + plan + seen


def _mapping_bytes(tables: Sequence[TableSize], train: int, test: int) -> int:
    """``row_of`` of every table, multiplicities and the labels."""
    own = sum(table.total for table in tables)
    return (train + test) * (len(tables) * ROW_NUMBER + FLOAT) + own * POSITION
