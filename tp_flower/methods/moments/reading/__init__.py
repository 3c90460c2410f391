"""What a reader of second moments needs: the server, or the label's site."""
