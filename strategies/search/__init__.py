"""A search over settings: candidates trained on folds, in one run."""
