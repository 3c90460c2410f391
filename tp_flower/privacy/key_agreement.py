"""A secret that the sites of a run share and the server does not have, and its masks.

Every site makes an X25519 key pair for the run and sends its public key to the server.
The server relays the public keys to one of the sites, the *leader*, which makes the
secret and seals it to each other site; the server relays the sealed copies. The key of
a seal is HKDF-SHA-256 of what only sender and recipient can compute, over a text that
names the run and the group with its members' public keys:

    agreed:   DH(run key, run key)
    pinned:   the same, and DH(site key, run key), DH(run key, site key),
              DH(site key, site key)

A *site key* is long-term. If the owners of both ends were given the other's key
(*pinned*), only its holder can have sealed, and only its holder can open; a completed
run stays secret even if somebody obtains the site keys later: run keys are deleted.

Guarantee: the server learns nothing about the secret if it relays faithfully; with
pinned keys, whatever it does. If keys are not pinned, a server that puts its own in
place of the sites' learns the secret. None against the sites, which all have it.

Reference:
    The four exchanges are those of Noise's pattern KK and of Signal's X3DH. The masks
    are those of Bonawitz et al. 2017, "Practical secure aggregation", without dropouts.
"""

import hashlib
import hmac
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Self

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tp_flower.arrays import FloatArray
from tp_flower.errors import SiteError
from tp_flower.keyed_hash import KEY_BYTES, RUN_GROUP
from tp_flower.randomness import key_stream

PUBLIC_KEY_BYTES: Final = 32
_SIMULATION: Final = b"tp_flower group secret v1"
_AGREED: Final = b"tp_flower sealed secret v3, agreed"
_PINNED: Final = b"tp_flower sealed secret v3, pinned"
_RUN: Final = b"tp_flower group key v3"
_PAIR: Final = b"tp_flower pair key v1"
_NONCE_BYTES: Final = 12
_FINGERPRINT_DIGITS: Final = 32
_SIMULATED = b"s"
_RANDOM = b"r"

WordArray = npt.NDArray[np.uint64]

FRACTION_BITS: Final = 24
LARGEST_BITS: Final = 56  # of a participant's numbers: 256 stay below 2^64
MOST_PARTS: Final = 1 << (64 - LARGEST_BITS)


class KeySource(StrEnum):
    """Origin of the key of a run's hashes, one for all sites; see ``GUARANTEES``."""

    PINNED = "pinned"
    AGREED = "agreed"


GUARANTEES: Final[Mapping[KeySource, str]] = {
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
"""For the ledger. None of them holds against a site: all sites have the key."""

SIMULATED: Final = "the key of a simulation follows its seed: it is known to everybody"
"""For the ledger of a site without a tables file."""


@dataclass(frozen=True)
class GroupSecret:
    """The secret that the sites of a run share, ``KEY_BYTES`` bytes.

    A simulation derives it from the run's seed, so that runs can be repeated; then it
    is not secret from anybody who knows the seed.
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
        return cls(
            hmac.digest(_SIMULATION, str(seed).encode(), hashlib.sha256),
            is_simulated=True,
        )

    def of_run(
        self,
        run_id: int,
        public_keys: Collection[bytes],
        group: str = RUN_GROUP,
        *,
        proposal: bytes,
    ) -> bytes:
        """Return the key of one group of a run, which says nothing about any other key.

        The public keys of the group's sites in this run are part of it: a site that
        finds its own among them, made for this run, knows that the key is new, even if
        a server gives a run the number of another. So is the fingerprint of the run's
        ``proposal``: sites that were told different ones share no key. The secret of a
        simulation is the run's key itself, so that simulations with one seed repeat
        themselves.
        """
        if self.is_simulated and group == RUN_GROUP:
            return self.value
        if self.is_simulated:
            return hmac.digest(self.value, group.encode(), hashlib.sha256)
        named = (
            _RUN
            + proposal
            + b"".join(sorted(public_keys))
            + f"{run_id} {group}".encode()
        )
        return HKDF(hashes.SHA256(), KEY_BYTES, None, named).derive(self.value)


class KeyPair:
    """An X25519 private key and its public key."""

    def __init__(self, private: bytes | None = None) -> None:
        if private is None:
            self._private = X25519PrivateKey.generate()
        else:
            self._private = X25519PrivateKey.from_private_bytes(private)

    @property
    def public(self) -> bytes:
        """The public key, ``PUBLIC_KEY_BYTES`` long."""
        return self._private.public_key().public_bytes_raw()

    @property
    def private(self) -> bytes:
        """The private key, which only the site may keep."""
        return self._private.private_bytes_raw()

    def exchange(self, other: bytes) -> bytes:
        """Return the bytes that only the holders of both keys can compute."""
        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError:
            raise SiteError("a public key of the run is not an X25519 key") from None


@dataclass(frozen=True)
class PublicKeys:
    """A site's public keys: for this run, and long-term (empty if none is pinned)."""

    run: bytes
    site: bytes = b""

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the pinned key, or else of the run's, cut to 128 bits."""
        return hashlib.sha256(self.site or self.run).hexdigest()[:_FINGERPRINT_DIGITS]


@dataclass(frozen=True)
class SiteKeys:
    """A site's key pairs, for this run and long-term, to seal and open a secret.

    >>> leader, site = SiteKeys(KeyPair()), SiteKeys(KeyPair())
    >>> secret = GroupSecret.random()
    >>> sealed = leader.seal(secret, site.public, run_id=7)
    >>> site.open(sealed, leader.public, run_id=7) == secret
    True
    """

    run: KeyPair
    site: KeyPair | None = None

    @property
    def public(self) -> PublicKeys:
        """The public keys."""
        return PublicKeys(self.run.public, self.site.public if self.site else b"")

    def seal(
        self,
        secret: GroupSecret,
        recipient: PublicKeys,
        run_id: int,
        group: str = RUN_GROUP,
    ) -> bytes:
        """Seal a group's secret so that only the recipient's keys open it."""
        kind = _SIMULATED if secret.is_simulated else _RANDOM
        nonce = secrets.token_bytes(_NONCE_BYTES)
        exchanged = self._exchanges(recipient, is_sender=True)
        cipher = _cipher(exchanged, self.public, recipient, f"{run_id} {group}")
        return nonce + cipher.encrypt(nonce, kind + secret.value, None)

    def open(
        self, sealed: bytes, sender: PublicKeys, run_id: int, group: str = RUN_GROUP
    ) -> GroupSecret:
        """Return the secret of a group that the holder of the sender's keys sealed."""
        exchanged = self._exchanges(sender, is_sender=False)
        cipher = _cipher(exchanged, sender, self.public, f"{run_id} {group}")
        try:
            text = cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
        except (InvalidTag, ValueError):
            raise SiteError("the sealed secret of the run cannot be opened") from None
        kind = text[:1]
        value = text[1:]
        if len(value) != KEY_BYTES or kind not in (_SIMULATED, _RANDOM):
            raise SiteError("the sealed secret of the run is malformed")
        return GroupSecret(value, kind == _SIMULATED)

    def pair_key(self, other: PublicKeys, purpose: bytes, *, is_sender: bool) -> bytes:
        """Return a key that this site and another one alone can compute.

        There is one for each direction and purpose, which is unique to the run.

        >>> one, other = SiteKeys(KeyPair()), SiteKeys(KeyPair())
        >>> key = one.pair_key(other.public, b"run 7", is_sender=True)
        >>> key == other.pair_key(one.public, b"run 7", is_sender=False)
        True
        """
        ends = (self.public, other) if is_sender else (other, self.public)
        # all keys have the same length, so the text has only one reading
        public = b"".join(key for end in ends for key in (end.run, end.site))
        kind = _PINNED if self.site else _AGREED
        info = _PAIR + kind + public + purpose
        exchanged = self._exchanges(other, is_sender=is_sender)
        return HKDF(hashes.SHA256(), KEY_BYTES, None, info).derive(exchanged)

    def _exchanges(self, other: PublicKeys, *, is_sender: bool) -> bytes:
        """Exchange every pair, in the order of the sender's keys: run, then site."""
        private_keys = [self.run]
        public_keys = [other.run]
        if self.site:
            private_keys.append(self.site)
            public_keys.append(other.site)
        if is_sender:
            pairs = [
                (private, public) for private in private_keys for public in public_keys
            ]
        else:
            pairs = [
                (private, public) for public in public_keys for private in private_keys
            ]
        return b"".join(private.exchange(public) for private, public in pairs)


def sealed_name(group: str, members: Iterable[PublicKeys]) -> str:
    """Return the name under which a group's secret is sealed: with its members.

    A site that is told of other members than the maker of the secret cannot open it.
    """
    public = sorted(member.run + member.site for member in members)
    return f"{group} {hashlib.sha256(b''.join(public)).hexdigest()}"


def _cipher(
    exchanged: bytes, sender: PublicKeys, recipient: PublicKeys, purpose: str
) -> ChaCha20Poly1305:
    """Return the cipher from sender to recipient; both ends derive the same one."""
    public = sender.run + sender.site + recipient.run + recipient.site
    # all keys have the same length, so the text has only one reading
    info = (_PINNED if sender.site else _AGREED) + public + purpose.encode()
    return ChaCha20Poly1305(
        HKDF(hashes.SHA256(), KEY_BYTES, None, info).derive(exchanged)
    )


def fixed_point_masks(
    secret: bytes, part: int, parts: int, count: int, context: bytes
) -> WordArray:
    """Return :func:`ring_masks` of numbers of which ``MOST_PARTS`` may be summed.

    >>> pair = [fixed_point_masks(b"s", part, 2, 3, b"run 1") for part in (0, 1)]
    >>> (pair[0] + pair[1]).tolist()
    [0, 0, 0]
    """
    if not 0 <= part < parts <= MOST_PARTS:
        raise ValueError(f"part {part} of {parts}; at most {MOST_PARTS} are summed")
    return ring_masks(secret, part, parts, count, context)


def ring_masks(
    secret: bytes, part: int, parts: int, count: int, context: bytes
) -> WordArray:
    """Return the masks that a participant adds to its ``count`` numbers, modulo 2^64.

    It is participant 0 <= ``part`` < ``parts`` in the sum; ``context`` is unique to the
    message under the secret. The participants are a ring, in which every one and the
    next have a stream of words: one adds it, the other subtracts it. The masks of all
    are uniform among those that add up to 0, as those with a stream for every pair: who
    has the secret has all streams either way.
    """

    def stream(first: int) -> WordArray:
        name = f"tp_flower ring mask:{first}:{parts}:".encode() + context
        key = hmac.digest(secret, name, hashlib.sha256)
        return np.frombuffer(key_stream(key).update(bytes(8 * count)), "<u8")

    return stream(part) - stream((part - 1) % parts)


def to_fixed(scores: FloatArray, joined_rows: int) -> WordArray:
    """Return round(g * N * 2^24) of scores (k,): their mean over a join is near 1 / N.

    The uniform share makes a sum at least 1 / N; its relative error is then at most
    2^-24 per table. Scores are from 0 to 2^56 / (N 2^24).

    >>> to_fixed(np.array([0.25]), 4).tolist() == [1 << 24]
    True
    """
    scaled = np.rint(scores * (float(joined_rows) * (1 << FRACTION_BITS)))
    # a comparison with NaN is false
    if not ((scaled >= 0) & (scaled < float(1 << LARGEST_BITS))).all():
        raise ValueError(
            f"the scores of {joined_rows} joined rows are too large to be summed; the "
            "rows' weights are too different"
        )
    return scaled.astype(np.uint64)


def from_fixed(total: WordArray, joined_rows: int) -> FloatArray:
    """Return the scores (k,) whose fixed-point numbers sum to ``total``."""
    return total / (float(joined_rows) * (1 << FRACTION_BITS))
