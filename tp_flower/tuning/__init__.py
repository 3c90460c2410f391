"""Searches over settings: candidates from grids or at random, and their results."""
