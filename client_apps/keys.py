"""A site's part in the key agreement of a run: its key pair, and the group secret."""

from typing import Any

import numpy as np

from client_apps.site import Site
from client_apps.store import Entry
from tp_flower.errors import SiteError
from tp_flower.privacy.key_agreement import GroupSecret, KeyPair
from tp_flower.protocol import Packet

_KEYS, _PRIVATE = "keys", "private"


def key_pair(site: Site) -> KeyPair:
    """Return the site's key pair of this run; made when it is asked for first."""
    if site.store.has(_KEYS):
        return KeyPair(site.store.load(_KEYS).arrays[_PRIVATE].tobytes())
    pair = KeyPair()
    private = np.frombuffer(pair.private, np.uint8)
    site.store.save(_KEYS, Entry({_PRIVATE: private}, {}))
    return pair


def seal(site: Site, request: Packet) -> Packet:
    """As the leader: make the run's secret and seal it to the sites, itself too."""
    asked = request.header
    is_simulated = site.is_simulated and bool(asked["simulated"])
    secret = (
        GroupSecret.of_simulation(int(asked["seed"]))
        if is_simulated
        else GroupSecret.random()
    )
    pair = key_pair(site)
    sealed = {
        node: pair.seal(secret, _bytes(key)).hex()
        for node, key in asked["public-keys"].items()
    }
    return Packet({"sealed": sealed})


def take_secret(site: Site, request: Packet) -> None:
    """Open and keep the run's secret, which came sealed with a request.

    Raises:
        SiteError: it cannot be opened, or is no secret and the site's data are real.
    """
    sealed, leader = request.header["sealed"], request.header["leader-key"]
    secret = key_pair(site).open(_bytes(sealed), _bytes(leader))
    if secret.is_simulated and not site.is_simulated:
        raise SiteError(
            "the run's secret is that of a simulation, which is known to everybody: "
            "refused, because this site has a tables file of its own"
        )
    site.keep_secret(secret.value)


def _bytes(text: Any) -> bytes:
    try:
        return bytes.fromhex(text)
    except (TypeError, ValueError):
        raise SiteError("a key of the run is not written in hexadecimal") from None
