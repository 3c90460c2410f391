"""Coresets over joins: a few thousand weighted joined rows in place of all of them."""
