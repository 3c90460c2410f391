"""Standard errors of a linear model of several classes.

Class a of K has the score h_a = theta_a' x, and the chance e^h_a / sum_b e^h_b. Scores
that have the same added to them all are the same chances: what a likelihood knows are
differences, and those from the first class are what is reported, as by statsmodels'
MNLogit and R's nnet::multinom,

    beta_a = theta_a - theta_1,    a = 2 .. K

The information of a row, (diag(p) - p p') (x) x x', is the sum over a < b of
(e_a - e_b) (e_a - e_b)' (x) p_a p_b x x', which over the joined rows are weighted
second moments, S_ab. So with an orthonormal basis Q (K, K - 1) of the vectors that add
up to 0, and theta = Q gamma, that of gamma is

    I = sum over a < b of (Q' (e_a - e_b)) (Q' (e_a - e_b))' (x) S_ab

The penalty of the methods, N l2 / 2 |theta|^2 = N l2 / 2 |gamma|^2 at an optimum, where
the theta_a of a feature add up to 0, leaves the covariance phi A I A of gamma,
A = (I + N l2)^-1, conditional on l2 (:mod:`tp_flower.methods.moments.inference`).

Notation:
    d  features        x  those of a row, and a 1        (x)  Kronecker's product
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from tp_flower.arrays import BoolArray, FloatArray, IndexArray
from tp_flower.methods.moments.inference import Inference
from tp_flower.methods.moments.solve import JoinedMoments, Spectrum


def infer_classes(
    pairs: Sequence[JoinedMoments], classes: int, l2: float, dispersion: float
) -> Inference:
    """Return how well the differences of classes from the first are known.

    Args:
        pairs: of each two classes, in the order of combinations, the moments S_ab of
            joined rows that weigh p_a p_b.
        classes: K.
        l2: the penalty, times the joined rows.
        dispersion: phi, by which weights of rows are of their mean.
    """
    moments = np.stack([pair.of_parameters for pair in pairs])
    total = moments.sum(axis=0)
    width = len(total)
    # about their means, columns differ less in size
    centred = np.eye(width)
    centred[:-1, -1] = -total[:-1, -1] / total[-1, -1]
    moments = centred @ moments @ centred.T
    basis = _sums_to_zero(classes)
    blocks = []
    for (a, b), moment in zip(combinations(range(classes), 2), moments, strict=True):
        difference = basis[a] - basis[b]
        blocks.append(np.kron(np.outer(difference, difference), moment))
    information = np.sum(blocks, axis=0)
    order = _features_first(classes - 1, width)
    information = information[np.ix_(order, order)]
    is_feature = np.arange(len(order)) < (classes - 1) * (width - 1)
    penalised = Spectrum.of(information + l2 * np.diag(is_feature))
    inverse = penalised.solve(0.0, np.eye(len(order)))
    turn = np.kron(basis[1:] - basis[:1], centred.T)[np.ix_(order, order)]
    free = penalised.vectors[:, penalised.values == 0.0]
    return Inference(
        covariance=dispersion * turn @ inverse @ information @ inverse @ turn.T,
        free=turn @ free,
        design=_beside(information, ~is_feature),
        freedom=np.inf,
        dispersion=dispersion,
        outputs=classes - 1,
    )


def _sums_to_zero(classes: int) -> FloatArray:
    """Return Q, an orthonormal basis (K, K - 1) of the vectors that add up to 0.

    >>> basis = _sums_to_zero(3)
    >>> np.allclose(basis.T @ basis, np.eye(2)), np.allclose(basis.sum(axis=0), 0.0)
    (True, True)
    """
    constant = np.ones((classes, 1))
    basis, _ = np.linalg.qr(np.hstack([constant, np.eye(classes)[:, 1:]]))
    sums_to_zero: FloatArray = basis[:, 1:]
    return sums_to_zero


def _features_first(outputs: int, width: int) -> IndexArray:
    """Return the positions of outputs' features, and then those of intercepts.

    >>> _features_first(2, 3).tolist()
    [0, 1, 3, 4, 2, 5]
    """
    positions = np.arange(outputs * width).reshape(outputs, width)
    return np.concatenate([positions[:, :-1].ravel(), positions[:, -1]])


def _beside(information: FloatArray, others: BoolArray) -> FloatArray:
    """Return the information about some parameters where others are unknown, too."""
    rest = information[np.ix_(~others, others)]
    of_others = information[np.ix_(others, others)]
    of_parameters: FloatArray = information[np.ix_(~others, ~others)]
    return of_parameters - rest @ np.linalg.solve(of_others, rest.T)
