"""VFL-ADMM and VFL-SGD: the methods on the vertical partitions of the joined table.

They are baselines (paper, section 6): what learning costs where duplicates are not
summed. Set-up repeats the rows of every table as the join repeats them
(:mod:`strategies.setup.joined_rows`); what the methods do with these rows is what they
do with those of the tables. With linear models, or any model in SGD, the parameters are
those of TablePuppet after every epoch, up to the rounding of messages.
"""

from strategies.training.admm import AdmmStrategy
from strategies.training.sgd import BatchStrategy


class VflADMM(AdmmStrategy):
    """Train by ADMM with a target and a score for every joined row and table.

    Args:
        query: the training set.
        settings: of the run; keyword arguments override single ones.
    """

    name = "vfl-admm"


class VflSGD(BatchStrategy):
    """Train by mini-batch SGD with a message and a score for every joined row.

    Args:
        query: the training set.
        settings: of the run; keyword arguments override single ones.
    """

    name = "vfl-sgd"


class GradientDescent(BatchStrategy):
    """Train over the result of a query by gradient descent, a step per epoch.

    Args:
        query: the training set.
        settings: of the run; keyword arguments override single ones.
    """

    name = "gd"
