"""A site's part in how the sites of a run come to share a key for their hashes.

By the site's node config: ``secret-file`` names a file with the secret, which is then
sealed to nobody; ``allowed-keys`` names a file with the long-term public keys of the
sites that are trusted to seal it; without either, it is sealed to and by whatever
public keys the server names. The server is told which it is, and cannot choose.
"""

import re
from typing import Final

import numpy as np

from client_apps.orders import Order, header_of
from client_apps.site import Site, state_dir
from client_apps.store import IN_MEMORY, Entry
from tp_flower.errors import SettingsError, SiteError
from tp_flower.privacy.key_agreement import GroupSecret, KeyPair, PublicKeys, SiteKeys
from tp_flower.privacy.key_files import (
    ALLOWED_KEYS,
    SECRET_FILE,
    read_allowed_keys,
    read_secret,
    secret_digest,
    site_key,
)
from tp_flower.privacy.key_source import KeySource
from tp_flower.protocol import Packet

_KEYS, _PRIVATE = "keys", "private"
_GROUP: Final = re.compile(r"[a-z0-9-]{1,64}")
_MOST_SEED: Final = (1 << 63) - 1
_SHOWN: Final = 16
"""Digits of a public key by which a message names it."""


def key_source(site: Site) -> KeySource:
    """Return where this site takes the run's key from, by its node config.

    Raises:
        SettingsError: the node config names two of them.
    """
    is_file, is_pinned = bool(_path(site, SECRET_FILE)), bool(_path(site, ALLOWED_KEYS))
    if is_file and is_pinned:
        raise SettingsError(
            f"node config has {SECRET_FILE} and {ALLOWED_KEYS}: with a secret in a "
            "file no key is sealed by anybody; leave one of them out"
        )
    if is_file:
        return KeySource.FILE
    return KeySource.PINNED if is_pinned else KeySource.AGREED


def key_facts(site: Site) -> dict[str, str]:
    """Return what the server is told of the site's keys, and check the key files.

    Raises:
        SettingsError: a key file cannot be used.
    """
    source, keys = key_source(site), _site_keys(site)
    facts = {"keys": str(source), "public-key": keys.public.run.hex()}
    if source is KeySource.PINNED:
        _allowed(site)
        facts["site-key"] = keys.public.site.hex()
    if source is KeySource.FILE:
        secret = read_secret(_path(site, SECRET_FILE))
        facts["secret-digest"] = secret_digest(secret, site.context.run_id)
    return facts


def seal(site: Site, request: Packet) -> Packet:
    """As the leader: make the run's secret and seal it to the sites, itself too.

    Raises:
        SiteError: a site's key is not one that this site was told to trust, or the
            secret is in a file.
    """
    asked = header_of(request)
    source, keys = key_source(site), _site_keys(site)
    _check_source(source, asked)
    if source is KeySource.FILE:
        raise SiteError(f"this site's secret is in its {SECRET_FILE}: it seals none")
    recipients = _recipients(asked, source)
    if source is KeySource.PINNED:
        trusted = _allowed(site) | {keys.public.site}
        for node, recipient in recipients.items():
            _check_pin(recipient.site, trusted, f"of node {node}")
    # whoever pins keys wants a secret, of a simulation too
    is_simulated = source is KeySource.AGREED and site.is_simulated
    secret = (
        GroupSecret.of_simulation(asked.count("seed", most=_MOST_SEED))
        if is_simulated and asked.flag("simulated")
        else GroupSecret.random()
    )
    run_id = site.context.run_id
    sealed = {
        node: keys.seal(secret, recipient, run_id).hex()
        for node, recipient in recipients.items()
    }
    return Packet({"sealed": sealed})


def take_secret(site: Site, request: Packet) -> None:
    """Keep the key of the run's hashes, from the site's file or what a request brings.

    Once per pair of keys that the site made for the run.

    Raises:
        SiteError: the secret cannot be opened, is no secret and the site's data are
            real, or was sealed by a site that this one does not trust; the server wants
            the key from elsewhere, or the run is not the one that this site is in.
    """
    told = header_of(request)
    source, keys = key_source(site), _site_keys(site)
    _check_source(source, told)
    if source is KeySource.FILE:
        secret = read_secret(_path(site, SECRET_FILE))
    else:
        secret = _open(site, told, keys)
    public = [_bytes(key) for key in told.texts("public-keys")]
    if keys.public.run not in public:
        raise SiteError(
            "the public keys of the run lack this site's: the key of the hashes would "
            "not be one that is new in this run"
        )
    site.keep_secret(secret.of_run(site.context.run_id, public))
    # thrown away: nobody opens the secret a second time, and a second request for rows
    # gets hashes under another key or none, so that the two cannot be compared
    site.store.drop(_KEYS)


def key_groups(order: Order, keys: int) -> list[str]:
    """Return what an order names the groups of a fragment's join keys.

    Args:
        order: of a part.
        keys: how many join keys the fragment has.

    Raises:
        SiteError: it does not name a group for every key.
    """
    named = order.texts("key-groups")
    if len(named) != keys or not all(map(_GROUP.fullmatch, named)):
        raise SiteError(
            f"malformed request: 'key-groups' must name a group for each of the {keys} "
            "join keys, in at most 64 letters a-z, digits and hyphens"
        )
    return named


def _open(site: Site, told: Order, keys: SiteKeys) -> GroupSecret:
    """Open the secret that came sealed with a request."""
    leader = PublicKeys(_bytes(told.text("leader-key")))
    if keys.site is not None:
        leader = PublicKeys(leader.run, _bytes(told.text("leader-site-key")))
        trusted = _allowed(site) | {keys.public.site}
        _check_pin(leader.site, trusted, "of the site that made the run's secret")
    sealed = _bytes(told.text("sealed"))
    secret = keys.open(sealed, leader, site.context.run_id)
    if secret.is_simulated and not site.is_simulated:
        raise SiteError(
            "the run's secret is that of a simulation, which is known to everybody: "
            "refused, because this site has a tables file of its own"
        )
    return secret


def _site_keys(site: Site) -> SiteKeys:
    """Return the site's keys; those of the run are made when they are asked for first.

    Raises:
        SettingsError: keys are to be pinned and the site cannot keep one of its own.
    """
    if site.store.has(_KEYS):
        run = KeyPair(site.store.load(_KEYS).arrays[_PRIVATE].tobytes())
    else:
        run = KeyPair()
        private = np.frombuffer(run.private, np.uint8)
        site.store.save(_KEYS, Entry({_PRIVATE: private}, {}))
    if key_source(site) is not KeySource.PINNED:
        return SiteKeys(run)
    folder = state_dir(site.context.node_config)
    if folder == IN_MEMORY:
        raise SettingsError(
            f"{ALLOWED_KEYS} needs a state-dir on disk: the site's own long-term key "
            f"is kept there, and state-dir is {IN_MEMORY}"
        )
    return SiteKeys(run, site_key(folder))


def _path(site: Site, setting: str) -> str:
    return str(site.context.node_config.get(setting, "") or "")


def _allowed(site: Site) -> set[bytes]:
    return set(read_allowed_keys(_path(site, ALLOWED_KEYS)))


def _check_source(source: KeySource, header: Order) -> None:
    """Refuse a run that takes its key from elsewhere than this site does."""
    asked = header.text("keys")
    if asked != source:
        raise SiteError(
            f"this site takes the key of a run's hashes from {source.value!r}, and the "
            f"server asks for {asked!r}: all sites of a run must have a {SECRET_FILE}, "
            f"or all {ALLOWED_KEYS}, or none of them either"
        )


def _check_pin(key: bytes, trusted: set[bytes], whose: str) -> None:
    if key not in trusted:
        raise SiteError(
            f"the site key {whose}, {key.hex()[:_SHOWN]}..., is not in this site's "
            f"{ALLOWED_KEYS}: either a site is missing there, or the server has put a "
            "key of its own in place of a site's; ask the site's owner for the key, "
            "not the server"
        )


def _recipients(asked: Order, source: KeySource) -> dict[str, PublicKeys]:
    """Return the public keys of the nodes to seal to."""
    run = asked.order("public-keys")
    if source is not KeySource.PINNED:
        return {node: PublicKeys(_bytes(run.text(node))) for node in run.names()}
    own = asked.order("site-keys")
    return {
        node: PublicKeys(_bytes(run.text(node)), _bytes(own.text(node)))
        for node in run.names()
    }


def _bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise SiteError("a key of the run is not written in hexadecimal") from None
