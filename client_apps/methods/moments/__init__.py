"""Second moments of the joined rows: the site half."""
