"""Data of a site: on disk, and between the messages of a run."""
