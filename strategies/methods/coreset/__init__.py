"""Draw joined rows by importance, and train on them alone."""
