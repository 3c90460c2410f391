"""The suites of the benchmark, a module each."""
