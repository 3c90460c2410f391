"""The table mapping: which rows of the tables are behind each joined row."""
