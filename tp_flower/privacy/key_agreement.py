"""How the sites of a run come to share a secret that the server does not have.

Every site makes an X25519 key pair for the run and sends its public key to the server.
The server relays them to one of the sites, the *leader*, which makes the secret and
seals it to each other site; the server relays the sealed copies. A server that follows
the protocol learns nothing of the secret. One that puts its own keys in place of the
sites' would: public keys are not pinned.

Guarantee: against a server that relays faithfully, whatever it computes; none against
an active one, and none against the sites, which all hold the secret.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import Final, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tp_flower.errors import SiteError
from tp_flower.privacy.keyed_hash import KEY_BYTES

PUBLIC_KEY_BYTES: Final = 32
_CONTEXT: Final = b"tp_flower group secret v1"
_NONCE_BYTES: Final = 12
_SIMULATED, _RANDOM = b"s", b"r"


@dataclass(frozen=True)
class GroupSecret:
    """What the sites of a run share.

    Attributes:
        value: ``KEY_BYTES`` bytes.
        is_simulated: derived from the run's seed, so that a simulation repeats itself;
            no secret from anybody who knows the seed.
    """

    value: bytes = field(repr=False)
    is_simulated: bool = False

    @classmethod
    def random(cls) -> Self:
        """Return a new secret."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def of_simulation(cls, seed: int) -> Self:
        """Return the secret of all simulated runs with this seed."""
        value = hmac.digest(_CONTEXT, str(seed).encode(), hashlib.sha256)
        return cls(value, is_simulated=True)


class KeyPair:
    """A site's X25519 keys for one run.

    >>> leader, site = KeyPair(), KeyPair()
    >>> secret = GroupSecret.random()
    >>> site.open(leader.seal(secret, site.public), leader.public) == secret
    True
    """

    def __init__(self, private: bytes | None = None) -> None:
        self._private = (
            X25519PrivateKey.generate()
            if private is None
            else X25519PrivateKey.from_private_bytes(private)
        )

    @property
    def public(self) -> bytes:
        """The public key, ``PUBLIC_KEY_BYTES`` long."""
        return self._private.public_key().public_bytes_raw()

    @property
    def private(self) -> bytes:
        """The private key, to be kept by the site alone."""
        return self._private.private_bytes_raw()

    def seal(self, secret: GroupSecret, recipient: bytes) -> bytes:
        """Return the secret for the holder of the public key ``recipient`` alone.

        Raises:
            SiteError: the public key is none.
        """
        kind = _SIMULATED if secret.is_simulated else _RANDOM
        nonce = secrets.token_bytes(_NONCE_BYTES)
        cipher = self._cipher(recipient, self.public, recipient)
        return nonce + cipher.encrypt(nonce, kind + secret.value, None)

    def open(self, sealed: bytes, sender: bytes) -> GroupSecret:
        """Return the secret that the holder of ``sender`` sealed to this key.

        Raises:
            SiteError: it was sealed by or to another key, or changed on the way.
        """
        cipher = self._cipher(sender, sender, self.public)
        try:
            text = cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
        except (InvalidTag, ValueError):
            raise SiteError("the sealed secret of the run cannot be opened") from None
        kind, value = text[:1], text[1:]
        if len(value) != KEY_BYTES or kind not in (_SIMULATED, _RANDOM):
            raise SiteError("the sealed secret of the run has another form")
        return GroupSecret(value, kind == _SIMULATED)

    def _cipher(
        self, other: bytes, sender: bytes, recipient: bytes
    ) -> ChaCha20Poly1305:
        """The cipher between this key and another; both ends derive the same one."""
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError:
            raise SiteError("a public key of the run is not a key of X25519") from None
        info = _CONTEXT + sender + recipient
        derived = HKDF(hashes.SHA256(), KEY_BYTES, None, info).derive(shared)
        return ChaCha20Poly1305(derived)
