"""A query bound to the tables' columns."""
