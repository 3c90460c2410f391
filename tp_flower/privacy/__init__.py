"""What protects what leaves a site."""
