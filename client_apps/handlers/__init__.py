"""What a site does with each kind of message."""
