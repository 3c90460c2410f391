"""Models of the sites' own: the messages of a site that has one."""
