"""The server half of each method: a file or a room of the method's name."""
