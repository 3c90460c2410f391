"""Boosted trees over joins: the site half."""
