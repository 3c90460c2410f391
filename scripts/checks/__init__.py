"""Checks of a change: planted faults, the same numbers, files, figures in pairs."""
