"""Coresets at a site: drawing one, and training on it."""
