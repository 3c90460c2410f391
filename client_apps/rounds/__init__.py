"""A round at a site happens once, whatever becomes of the process."""
