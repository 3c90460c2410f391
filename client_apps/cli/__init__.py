"""Commands of a site's owner."""
