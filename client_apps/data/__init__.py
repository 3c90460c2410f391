"""Data of a site on its disk, and between the messages of a run."""
