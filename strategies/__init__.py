"""The server side: training methods as Flower strategies, and the ServerApp."""

from strategies.admm import TablePuppetADMM
from strategies.coreset_kmeans import CoresetKMeans
from strategies.coreset_ridge import CoresetRidge
from strategies.evaluate import Evaluate
from strategies.explain import Explain
from strategies.gd import GradientDescent
from strategies.personalised import Personalised
from strategies.predict import Predict
from strategies.relational import RelationalStrategy
from strategies.sgd import TablePuppetSGD
from strategies.vfl import VflADMM, VflSGD

_METHODS: tuple[type[RelationalStrategy], ...] = (
    TablePuppetADMM,
    TablePuppetSGD,
    VflADMM,
    VflSGD,
    GradientDescent,
    CoresetRidge,
    CoresetKMeans,
    Personalised,
)
STRATEGIES: dict[str, type[RelationalStrategy]] = {
    strategy.name: strategy for strategy in _METHODS
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
    "TablePuppetSGD",
    "VflADMM",
    "VflSGD",
]
