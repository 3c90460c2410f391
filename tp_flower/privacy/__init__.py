"""Mechanisms, accounting and key agreement that protect the data leaving a site."""
