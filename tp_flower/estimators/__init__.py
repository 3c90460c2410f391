"""Estimators of scikit-learn whose training set is a join that is never built."""

from tp_flower.estimators.classifier import TablePuppetClassifier
from tp_flower.estimators.regressor import TablePuppetRegressor
from tp_flower.estimators.survival import SurvivalRegressor

__all__ = ["SurvivalRegressor", "TablePuppetClassifier", "TablePuppetRegressor"]
