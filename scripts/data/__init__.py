"""Data to train on: made, fetched from packages, or prepared from downloads."""
