"""How tables that are data frames of this process are named; it imports nothing."""

from typing import Final

MEMORY_PREFIX: Final = "memory:"
