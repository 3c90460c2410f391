"""Run a fragment of the query on one shard; keep the rows in Arrow files."""
