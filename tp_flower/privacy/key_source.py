"""Where the key of a run's hashes comes from, and whom it is then secret from."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class KeySource(StrEnum):
    """What the sites of a run derive the key of their hashes from; one for all sites.

    Attributes:
        FILE: a secret in a file of every site, the same at all of them.
        PINNED: a secret that one site makes and seals to sites whose long-term public
            keys it was given by its owner.
        AGREED: the same, but sealed to the public keys that the server names.
    """

    FILE = "file"
    PINNED = "pinned"
    AGREED = "agreed"


GUARANTEES: Final[Mapping[KeySource, str]] = MappingProxyType(
    {
        KeySource.FILE: (
            "the key comes from a secret file at each site; no message carries it, so "
            "the server learns it neither by computing nor by tampering"
        ),
        KeySource.PINNED: (
            "the key was sealed from site to site under long-term public keys that the "
            "sites' owners pinned; the server learns it neither by computing nor by "
            "putting its own keys in their place"
        ),
        KeySource.AGREED: (
            "the key was sealed to public keys that the server relayed and nobody "
            "checked: a server that put its own in their place has the key, and can "
            "then test guesses of every hashed value"
        ),
    }
)
"""In plain words, for the ledger. None holds against a site: all sites have the key."""

SIMULATED: Final = "the key of a simulation follows its seed: it is known to everybody"
"""The same of sites without a tables file of their own."""
