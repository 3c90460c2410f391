"""Federated learning over relational tables, on Flower."""
