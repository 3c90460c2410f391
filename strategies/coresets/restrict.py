"""The joined rows of a coreset in place of all training rows.

What is trained on is the sample with its weights; the rows that are tested stay. Rows
of the tables that are behind none of either take no part any more.
"""

from dataclasses import replace

import numpy as np

from strategies.setup.joined_rows import Alignment
from strategies.setup.row_layout import compact_tables, weighted_tables
from tp_flower.coresets.sampling import Sample
from tp_flower.joins.row_weights import RowWeights
from tp_flower.learning.clustering_loss import KMEANS


def sampled(aligned: Alignment, sample: Sample) -> Alignment:
    """Return the alignment with a sample of its training rows.

    A sample of all of them, with the weights that they have, is the same alignment.

    Args:
        aligned: the joined rows.
        sample: of those to train on, by their numbers among these; they stay in this
            order, and the held-out rows in theirs. A clustering holds no row out: it is
            tested on all of them.
    """
    is_clustering = aligned.loss.name == KMEANS
    train = np.flatnonzero(~aligned.is_test)[sample.joined]
    tested = np.flatnonzero(aligned.is_test | is_clustering)
    chosen = np.concatenate([train, tested])
    mapping = aligned.mapping.select(chosen)
    is_test = np.arange(len(chosen)) >= len(train)
    extracted = aligned.extracted
    drawn, test, compact = compact_tables(
        mapping, is_test, extracted.parts, extracted.rows
    )
    weights = sample.weights
    # equal weights are none: such a run is the same to the bit
    own = None if np.all(weights[:1] == weights) else RowWeights.of(weights, drawn)
    if own is not None:
        compact = weighted_tables(compact, own.masses)
    return replace(
        aligned,
        mapping=mapping,
        is_test=is_test,
        train=drawn,
        test=test,
        compact=compact,
        values=aligned.values[chosen],
        weighting=replace(
            aligned.weighting,
            train=own,
            test=aligned.weighting.train_rows
            if is_clustering
            else aligned.weighting.test,
        ),
    )
