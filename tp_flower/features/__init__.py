"""From feature columns to a float32 matrix: encoders and their mergeable statistics."""
