"""The server side: training methods as Flower strategies, and the ServerApp."""

from typing import Any

from strategies.coreset_solvers import CoresetKMeans, CoresetRidge
from strategies.explain.explanation import Explain
from strategies.inference.predict import Evaluate, Predict
from strategies.personalised.strategy import Personalised
from strategies.training.admm import TablePuppetADMM
from strategies.training.base import JoinStrategy
from strategies.training.boosting import TablePuppetBoost
from strategies.training.conjugate_gradients import TablePuppetCG
from strategies.training.relational import RelationalStrategy
from strategies.training.sgd import GradientDescent, TablePuppetSGD

STRATEGIES: dict[str, type[RelationalStrategy[Any]]] = {
    **JoinStrategy.methods,
    Personalised.name: Personalised,
}

__all__ = [
    "STRATEGIES",
    "CoresetKMeans",
    "CoresetRidge",
    "Evaluate",
    "Explain",
    "GradientDescent",
    "Personalised",
    "Predict",
    "RelationalStrategy",
    "TablePuppetADMM",
    "TablePuppetBoost",
    "TablePuppetCG",
    "TablePuppetSGD",
]
