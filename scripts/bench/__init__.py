"""The harness of the benchmark."""
