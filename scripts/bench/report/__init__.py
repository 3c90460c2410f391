"""What the benchmark found, as a page and as the README has it."""
