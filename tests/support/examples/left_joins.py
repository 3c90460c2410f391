"""A query of two LEFT JOINs."""

SOURCE = """FROM orders o LEFT JOIN customers c ON o.customer = c.id AND o.day < 20
LEFT JOIN items i ON o.item = i.item"""
