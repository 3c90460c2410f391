"""Local models: what one table's rows add to the scores of the joined rows."""
