"""Training on the joined table, as one would without tp_flower."""
