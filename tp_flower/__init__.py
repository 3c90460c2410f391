"""Federated learning over relational tables, on Flower."""

import os

# OpenMP reads it when torch or LightGBM are loaded: threads that wait sleep. By default they spin,
# and where the sites of a simulation share a machine, trees take twenty times as long
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
