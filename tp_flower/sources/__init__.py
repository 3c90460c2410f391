"""Where a shard's rows come from: files, data frames and databases."""
