"""Descriptive statistics of joined rows, from their second moments, at the server."""
