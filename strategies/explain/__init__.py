"""Explain a run without running it: its work, costs and disclosures."""
