"""The server side: training methods as Flower strategies, and the ServerApp."""

from strategies.admm import TablePuppetADMM
from strategies.explain import Explain
from strategies.relational import RelationalStrategy
from strategies.sgd import TablePuppetSGD

STRATEGIES: dict[str, type[RelationalStrategy]] = {
    strategy.name: strategy for strategy in (TablePuppetADMM, TablePuppetSGD)
}

__all__ = [
    "STRATEGIES",
    "Explain",
    "RelationalStrategy",
    "TablePuppetADMM",
    "TablePuppetSGD",
]
