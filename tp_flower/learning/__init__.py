"""Losses, local models, solvers and the ADMM steps: functions on arrays."""
