"""VFL-ADMM, VFL-SGD and GD: the baselines of the paper (section 6).

VFL learns on the vertical partitions of the joined table: it shows what it costs not to
sum duplicates. Its tables train on their rows repeated as in the join. With linear
models, or with any model in SGD, the parameters equal TablePuppet's after every epoch,
up to the rounding of messages.
"""

from strategies.setup.joined_rows import JoinedRows
from strategies.training.admm import AdmmStrategy
from strategies.training.base import JoinStrategy
from strategies.training.sgd import BatchStrategy


class VerticalStrategy(JoinStrategy):
    """Base of the methods with a message and a score for every joined row and table."""

    by_joined_rows = True

    def training_rows(self, joined: JoinedRows) -> JoinedRows:
        """Return the same joined rows over rows of the tables that are repeated."""
        return joined.laid_out(joined.weighting.train_rows, is_repeated=True)


class VflADMM(VerticalStrategy, AdmmStrategy):
    """Train by ADMM with a target and a score for every joined row and table."""

    name = "vfl-admm"


class VflSGD(VerticalStrategy, BatchStrategy):
    """Train by mini-batch SGD with a message and a score for every joined row."""

    name = "vfl-sgd"


class GradientDescent(BatchStrategy):
    """Train over the result of a query by gradient descent, a step per epoch."""

    name = "gd"

    def batch_size(self, joined_rows: int) -> int:
        """Return N."""
        return joined_rows
