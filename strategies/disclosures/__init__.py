"""Who learns what in a run, and what covers it."""
