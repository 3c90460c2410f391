"""Explain a run without running it: what it would do, cost and disclose."""
