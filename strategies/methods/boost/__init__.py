"""Boosted trees over joins: the server half."""
