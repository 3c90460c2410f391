"""A run's rounds: from a strategy's request to checked replies."""
