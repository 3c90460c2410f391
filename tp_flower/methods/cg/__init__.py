"""Preconditioned conjugate gradients for linear models over joins."""
