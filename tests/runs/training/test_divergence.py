"""Training that goes nowhere stops, and says which epochs were good."""

import pandas as pd
import pytest

from client_apps.app import app
from strategies import TablePuppetSGD
from strategies.run.grid import InProcessGrid
from strategies.training.base import check_epoch
from tp_flower.errors import DivergedError, ReplyError
from tp_flower.query import Query

ORDERS = pd.DataFrame({"k": range(40), "y": [float(n % 7) for n in range(40)]})
ITEMS = pd.DataFrame({"k": range(40), "w": [float(n % 5) for n in range(40)]})


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 201.0])
def test_a_loss_beyond_that_of_a_constant_is_refused(loss):
    with pytest.raises(DivergedError, match=r"epoch 3: .*num-epochs = 2 ends before"):
        check_epoch(3, loss, 2.0)


def test_a_loss_near_that_of_a_constant_is_not():
    check_epoch(1, 200.0, 2.0)
    check_epoch(1, -5.0, 0.1)
    check_epoch(1, 99.0, -0.5)


def test_sgd_with_too_large_steps_stops_within_its_first_epochs():
    strategy = TablePuppetSGD(
        Query.from_sql("SELECT o.y AS label, i.w FROM o JOIN i ON o.k = i.k"),
        num_epochs=50,
        learning_rate=30.0,
        batch_size=8,
        test_fraction=0.2,
    )
    with pytest.raises((DivergedError, ReplyError), match="Lower learning-rate"):
        strategy.start(InProcessGrid(app, [{"o": ORDERS}, {"i": ITEMS}]))
    assert strategy.epoch < 50
