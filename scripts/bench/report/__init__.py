"""Results of the benchmark: as a page of their own, and as a page of the docs."""
