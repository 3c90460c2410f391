"""The handlers of the messages to a site, by family."""
