"""Examples that can be run, each with a page in docs."""
