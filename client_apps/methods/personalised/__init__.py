"""A site's own model: its set-up and its rounds."""
