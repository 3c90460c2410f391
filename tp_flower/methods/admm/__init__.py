"""Sharing ADMM over the tables, and consensus over the shards of a table."""
