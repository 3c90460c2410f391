"""Explain a run without making it: what it would do, cost and disclose."""
