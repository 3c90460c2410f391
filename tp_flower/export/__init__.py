"""Exports of models: archives that predict without this package."""
