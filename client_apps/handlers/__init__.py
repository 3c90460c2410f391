"""The handlers of the messages to a site, one module per family of messages."""
