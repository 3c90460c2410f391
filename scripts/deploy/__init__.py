"""Deployments: the scripts of organisations, and one on loopback for measuring."""
