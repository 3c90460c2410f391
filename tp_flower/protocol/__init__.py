"""The contract between the server and the sites: messages, their codec, packets."""
