"""Methods that the server solves by itself, on a coreset."""
