"""Survival: proportional hazards of times to an event, over rows that are joined."""

from tp_flower.objectives.survival.baseline import Baseline
from tp_flower.objectives.survival.concordance import Survival, concordance
from tp_flower.objectives.survival.cox import HAZARD_RATIO, Cox, SurvivalResponse
from tp_flower.objectives.survival.risk_sets import RiskSets

__all__ = [
    "HAZARD_RATIO",
    "Baseline",
    "Cox",
    "RiskSets",
    "Survival",
    "SurvivalResponse",
    "concordance",
]
