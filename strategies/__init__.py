"""The server side: training methods as Flower strategies, and the ServerApp.

The strategies that train, those of
:mod:`strategies.registry`, are imported from here too, when they are asked for.
"""

from strategies.explain.explanation import Explain
from strategies.inference.predict import Evaluate, Predict
from strategies.registry import STRATEGIES, find_class
from strategies.training.strategy import TrainingStrategy

__all__ = ["STRATEGIES", "Evaluate", "Explain", "Predict", "TrainingStrategy"]


def __getattr__(name: str) -> type[TrainingStrategy]:
    strategy = find_class(name)
    if strategy is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return strategy
