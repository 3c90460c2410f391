"""Full-batch gradient descent over factorised joins, as a baseline.

Factorised learning computes the gradient over the joined table from its tables: per row
of a table the sum of the loss's derivatives over its joined rows (Eq. 10). That is SGD
with one batch of all joined rows, whose step size stays as it is: its gradients have no
noise. With momentum it is Polyak's heavy ball; ``momentum = 0`` is plain descent.
"""

from strategies.training.sgd import BatchStrategy


class GradientDescent(BatchStrategy):
    """Train over the result of a query by gradient descent, a step per epoch.

    Args:
        query: the training set.
        settings: of the run; keyword arguments override single ones.
    """

    name = "gd"
