"""The messages to a site before and after training: set-up, encoders, predictions."""
