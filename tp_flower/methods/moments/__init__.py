"""Aggregates only: linear models from the second moments of the joined rows."""
