"""The operator of one shard: what it computes, and what leaves it."""
