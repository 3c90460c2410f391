"""The server side: training methods as Flower strategies, and the ServerApp."""

from typing import Any

from strategies.explain.explanation import Explain
from strategies.inference.predict import Evaluate, Predict
from strategies.methods.admm import TablePuppetADMM
from strategies.methods.boost import TablePuppetBoost
from strategies.methods.cg import TablePuppetCG
from strategies.methods.coreset.strategy import CoresetKMeans, CoresetRidge
from strategies.methods.personalised.strategy import Personalised
from strategies.methods.sgd.strategy import GradientDescent, TablePuppetSGD
from strategies.training.base import JoinStrategy
from strategies.training.relational import RelationalStrategy

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
