"""Policy guard, keys, noisy labels and ledger entries of a site."""
