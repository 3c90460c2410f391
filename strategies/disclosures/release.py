"""A release: who learns what from a message, and what covers it."""

from dataclasses import dataclass
from typing import Final

NOTHING: Final = "nothing"
"""What covers a release where nothing does."""
SERVER: Final = "server"
SITES: Final = "sites"


@dataclass(frozen=True)
class Release:
    """What somebody will learn from a message.

    Attributes:
        message: its type.
        to: who receives it.
        carries: what it says.
        protection: the mechanism that covers it; "nothing" where nothing does.
    """

    message: str
    to: str
    carries: str
    protection: str
