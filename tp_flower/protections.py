"""Names of what protects a release: mechanisms, adversaries, accountants."""

from typing import Final

RDP: Final = "rdp"
PRV: Final = "prv"
ACCOUNTANTS: Final = (RDP, PRV)

CLEAR: Final = "clear"
LAPLACE, RANDOMISED_RESPONSE = "laplace", "randomised-response"
DP_SGD, NOISY_STATISTICS = "dp-sgd", "statistics"
"""Names of mechanisms, for labels and for models."""
SERVER, OUTSIDER = "server", "outsider"
"""Adversaries: who sees every message, and who sees the final model."""
