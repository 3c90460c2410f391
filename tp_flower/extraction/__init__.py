"""What a fragment of the query yields on one shard, and how a site keeps it."""
