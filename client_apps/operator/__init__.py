"""The operator of one shard: its computations and its releases."""
