"""Derived tables: SELECTs of a site's owner over the site's other tables."""
