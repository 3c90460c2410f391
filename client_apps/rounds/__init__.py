"""A site answers each round exactly once, even if its process crashes."""
