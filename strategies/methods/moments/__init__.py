"""Training from second moments, at the server."""
