"""Stochastic gradient descent over joined rows."""
