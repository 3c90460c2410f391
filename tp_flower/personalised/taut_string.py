"""The communication-efficient update of Eq. 7, which is piecewise constant.

    v = argmin_y <g, y> + gamma ||Lambda (y - x)||_1 + ||y - x||^2 / (2 eta)

Lambda takes differences of neighbours and, in its last row, the last element itself: a
neighbour behind the end that is fixed at zero. With u = (x - v) / eta, the update that
a site sends in place of its gradient g, this does not depend on the step size eta:

    u = argmin 1/2 ||u - g||^2 + gamma (sum_i |u_i - u_{i+1}| + |u_d|)

It is solved exactly in O(d) by Johnson's dynamic programme (2013, "A dynamic
programming algorithm for the fused lasso and L0-segmentation"): the derivative of what
the first i elements cost at best, as a function of u_i, is piecewise linear; where it
passes -gamma and gamma are the least and the most that u_i becomes, whatever comes
behind. Going back from the zero behind the end, u_i = clip(u_{i+1}, least_i, most_i).
"""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def piecewise_update(gradient: FloatArray, penalty: float) -> FloatArray:
    """Return the update u (d,) of Eq. 7: constant on runs, exactly.

    Args:
        gradient: g, (d,), finite.
        penalty: gamma >= 0; 0 returns the gradient, a large one zeros.

    >>> piecewise_update(np.array([4.0, 5.0, 1.0, 0.5]), 0.5)
    array([4.25, 4.25, 1.  , 0.5 ])
    """
    if not penalty:
        return gradient.copy()
    least, most = _bounds(gradient.tolist(), penalty)
    values = [0.0] * len(least)
    value = 0.0
    for place in range(len(least) - 1, -1, -1):
        value = min(max(value, least[place]), most[place])
        values[place] = value
    return np.array(values)


def penalty_of_round(penalty: float, rounds_before: int, rounds: int) -> float:
    """Return gamma of a round: gamma (1 - t / T)^3, t = 0, 1, ..., T - 1.

    An element of the update is off the gradient's by at most 2 gamma, so that the last
    updates are as good as gradients, and the optimum stays where it is. With a fixed
    gamma every point whose gradients' partial sums are within gamma would be one.

    >>> penalty_of_round(0.5, 0, 10), penalty_of_round(0.5, 5, 10)
    (0.5, 0.0625)
    """
    return float(penalty * (1.0 - rounds_before / rounds) ** 3)


def _bounds(gradient: list[float], penalty: float) -> tuple[list[float], list[float]]:
    """Return where the derivatives pass -gamma and gamma, element by element.

    A derivative, clipped to [-gamma, gamma], is kept by its knots in ascending order:
    their places, and how slope and offset of the line change there. Every element takes
    some away at both ends and adds one at each, hence O(d) in all. Lists of numbers are
    several times as fast here as numpy's elements.
    """
    size = len(gradient)
    least, most = [0.0] * size, [0.0] * size
    knots, slopes, offsets = ([0.0] * (2 * size + 2) for _ in range(3))
    first, last = size + 1, size
    for place, own in enumerate(gradient):
        # beyond all knots the derivative of what comes before is -gamma or gamma
        outside = penalty if place else 0.0
        slope, offset = 1.0, -own - outside
        while first <= last and slope * knots[first] + offset <= -penalty:
            slope += slopes[first]
            offset += offsets[first]
            first += 1
        left = slope, offset
        least[place] = (-penalty - offset) / slope
        slope, offset = 1.0, -own + outside
        while last >= first and slope * knots[last] + offset >= penalty:
            slope -= slopes[last]
            offset -= offsets[last]
            last -= 1
        most[place] = (penalty - offset) / slope
        first -= 1
        last += 1
        knots[first], slopes[first] = least[place], left[0]
        offsets[first] = left[1] + penalty
        knots[last], slopes[last] = most[place], -slope
        offsets[last] = penalty - offset
    return least, most
