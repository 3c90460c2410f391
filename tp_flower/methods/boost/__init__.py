"""Boosted trees over joins."""
