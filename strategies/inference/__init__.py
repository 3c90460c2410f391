"""Predict and evaluate with a saved model."""
