"""The beginning and the end of training at a site, by whatever method."""
