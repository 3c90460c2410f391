"""What stands between a request and a site's tables."""
