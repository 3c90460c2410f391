"""A model for every site of one table."""
