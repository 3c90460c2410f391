"""How a site gets the key of a run's hashes, which the sites share.

By the site's node config: ``secret-file`` names a file with the secret, which is then
not sealed to anybody; ``allowed-keys`` names a file with the long-term public keys of
the sites that are trusted to seal it; without either, it is sealed to and by whatever
public keys the server names. The server learns which case applies, and cannot choose.
"""

from typing import Final

import numpy as np

from client_apps.data.key_files import (
    read_allowed_keys,
    read_secret,
    secret_digest,
    site_key,
)
from client_apps.data.run_store import Entry
from client_apps.rounds.site import SECRET, Site
from tp_flower.arrays import AnyArray
from tp_flower.errors import MessageError, SettingsError, SiteError
from tp_flower.keyed_hash import RUN_GROUP
from tp_flower.node_config import ALLOWED_KEYS, IN_MEMORY, SECRET_FILE, state_dir
from tp_flower.privacy.key_agreement import (
    GroupSecret,
    KeyPair,
    KeySource,
    PublicKeys,
    SiteKeys,
)
from tp_flower.protocol.codec import required
from tp_flower.protocol.setup_messages import (
    ExtractRequest,
    SealedSecret,
    SealReply,
    SealRequest,
)

_KEYS, _PUBLIC, _SEALED = "keys", "public", "sealed"
_REQUEST: Final = "request"
"""In an entry: the digest of the request that brought it."""
_DIGITS: Final = 16
"""Digits of a public key that identify it in error messages."""


def key_source(site: Site) -> KeySource:
    """Return the origin of the run's key at this site, by its node config."""
    is_file, is_pinned = bool(_path(site, SECRET_FILE)), bool(_path(site, ALLOWED_KEYS))
    if is_file and is_pinned:
        raise SettingsError(
            f"node config has {SECRET_FILE} and {ALLOWED_KEYS}: a secret that is "
            "read from a file is not sealed with keys; leave one of them out"
        )
    if is_file:
        return KeySource.FILE
    return KeySource.PINNED if is_pinned else KeySource.AGREED


def key_fields(site: Site) -> dict[str, str]:
    """Return the fields of ``describe`` about keys, and check the key files."""
    source, public = key_source(site), _public_keys(site)
    fields = {"keys": str(source), "public_key": public.run.hex()}
    if source is KeySource.PINNED:
        _allowed(site)
        fields["site_key"] = public.site.hex()
    if source is KeySource.FILE:
        secret = read_secret(_path(site, SECRET_FILE))
        fields["secret_digest"] = secret_digest(secret, int(site.run, 16))
    return fields


def seal(site: Site, request: SealRequest) -> SealReply:
    """As their leader: make the secrets of groups and seal each to the group's sites.

    A repeated request gets the same sealed secrets, even if the site's key is gone.
    """
    if site.store.has(_SEALED):
        entry = site.store.load(_SEALED)
        if entry.meta[_REQUEST] == site.round.digest:
            return SealReply(entry.meta[_SEALED])
    source, keys = key_source(site), _site_keys(site)
    _check_source(source, request.keys)
    if source is KeySource.FILE and RUN_GROUP in request.groups:
        raise SiteError(f"this site reads its {SECRET_FILE}: it seals no run's secret")
    recipients = _recipients(request, source)
    if source is KeySource.PINNED:
        trusted = _allowed(site) | {keys.public.site}
        for node, recipient in recipients.items():
            _check_pin(recipient.site, trusted, f"of node {node}")
    # a site that pins keys wants a real secret, in a simulation too
    is_simulated = source is KeySource.AGREED and site.is_simulated
    sealed: dict[str, dict[str, str]] = {}
    for group, members in request.groups.items():
        secret = (
            GroupSecret.of_simulation(request.seed)
            if is_simulated and request.simulated
            else GroupSecret.random()
        )
        if lacking := sorted(set(members) - recipients.keys()):
            raise MessageError(f"'public-keys' lacks nodes {lacking} of group {group}")
        sealed[group] = {
            node: keys.seal(secret, recipients[node], int(site.run, 16), group).hex()
            for node in members
        }
    site.store.save(_SEALED, Entry({}, {_REQUEST: site.round.digest, _SEALED: sealed}))
    return SealReply(sealed)


def take_secrets(site: Site, request: ExtractRequest) -> None:
    """Store the keys of the site's groups, from its file or sealed in the request.

    Done once in a run; a repeat of the same request finds the stored keys.
    """
    # no secret is opened twice: a second request for rows would get hashes that can be
    # compared with those of the first
    site.round.forget(_KEYS)
    if site.store.has(SECRET):
        if site.store.load(SECRET).meta[_REQUEST] != site.round.digest:
            raise SiteError("another request has already extracted this run's rows")
        return
    source, keys = key_source(site), _site_keys(site)
    _check_source(source, request.keys)
    arrays: dict[str, AnyArray] = {}
    for group, (secret, members) in _secrets(site, request, source, keys).items():
        if keys.public.run not in members:
            raise SiteError(
                f"the public keys of group {group!r} lack this site's: its key might "
                "not be new in this run; if the site has lost its keys of the run, "
                "start the run again"
            )
        key = secret.of_run(int(site.run, 16), members, group)
        arrays[group] = np.frombuffer(key, np.uint8)
    site.store.save(SECRET, Entry(arrays, {_REQUEST: site.round.digest}))


def _secrets(
    site: Site, request: ExtractRequest, source: KeySource, keys: SiteKeys
) -> dict[str, tuple[GroupSecret, list[bytes]]]:
    """Return the secret of each of the site's groups, and its members' public keys."""
    public = {node: bytes.fromhex(key) for node, key in request.public_keys.items()}
    secrets: dict[str, tuple[GroupSecret, list[bytes]]] = {}
    for group, sealed in request.sealed.items():
        if lacking := sorted(set(sealed.members) - public.keys()):
            raise MessageError(f"'public-keys' lacks nodes {lacking} of group {group}")
        members = [public[node] for node in sealed.members]
        secrets[group] = _open(site, group, sealed, keys), members
    if source is KeySource.FILE:
        of_file = read_secret(_path(site, SECRET_FILE))
        # a group's secret keeps other sites out, the file's the server
        secrets = {
            group: (secret.mixed_with(of_file), members)
            for group, (secret, members) in secrets.items()
        }
        secrets[RUN_GROUP] = of_file, list(public.values())
    if RUN_GROUP not in secrets:
        raise MessageError(f"'sealed' lacks the secret of group {RUN_GROUP!r}")
    return secrets


def key_groups(names: list[str], keys: int) -> list[str]:
    """Return the groups named in a request, one for each of ``keys`` join keys."""
    if len(names) != keys:
        raise MessageError(
            f"'key-groups' must name a group for each of the {keys} join keys"
        )
    return names


def _open(site: Site, group: str, sealed: SealedSecret, keys: SiteKeys) -> GroupSecret:
    """Open the secret of a group that was sealed and sent with a request."""
    leader = PublicKeys(bytes.fromhex(sealed.leader_key))
    if keys.site is not None:
        long_term = required(sealed.leader_site_key, "leader_site_key")
        leader = PublicKeys(leader.run, bytes.fromhex(long_term))
        trusted = _allowed(site) | {keys.public.site}
        whose = f"of the site that made the secret of group {group!r}"
        _check_pin(leader.site, trusted, whose)
    text = bytes.fromhex(sealed.text)
    secret = keys.open(text, leader, int(site.run, 16), group)
    if secret.is_simulated and not site.is_simulated:
        raise SiteError(
            "the run's secret is for simulations, and known to everybody: "
            "refused, because this site has a tables file of its own"
        )
    return secret


def _public_keys(site: Site) -> PublicKeys:
    """Return the site's public keys, which remain when the private key is deleted."""
    if not site.store.has(_PUBLIC):
        return _site_keys(site).public
    run = site.store.load(_PUBLIC).arrays[_PUBLIC].tobytes()
    long_term = _long_term(site)
    return PublicKeys(run, long_term.public if long_term else b"")


def _site_keys(site: Site) -> SiteKeys:
    """Return the site's keys; the first call generates the run's keys."""
    if site.store.has(_KEYS):
        run = KeyPair(site.store.load(_KEYS).arrays[_KEYS].tobytes())
    elif site.store.has(_PUBLIC):
        raise SiteError(
            "the site's key of this run is gone: it works once; start the run again"
        )
    else:
        run = KeyPair()
        for name, key in ((_KEYS, run.private), (_PUBLIC, run.public)):
            site.store.save(name, Entry({name: np.frombuffer(key, np.uint8)}, {}))
    return SiteKeys(run, _long_term(site))


def _long_term(site: Site) -> KeyPair | None:
    """Return the site's own key pair; None unless keys are pinned."""
    if key_source(site) is not KeySource.PINNED:
        return None
    folder = state_dir(site.context.node_config)
    if folder == IN_MEMORY:
        raise SettingsError(
            f"{ALLOWED_KEYS} needs a state-dir on disk: the site's own long-term key "
            f"is kept there, and state-dir is {IN_MEMORY}"
        )
    return site_key(folder)


def _path(site: Site, setting: str) -> str:
    return str(site.context.node_config.get(setting, "") or "")


def _allowed(site: Site) -> set[bytes]:
    return set(read_allowed_keys(_path(site, ALLOWED_KEYS)))


def _check_source(source: KeySource, requested: str) -> None:
    """Refuse a run that takes its key from elsewhere than this site does."""
    if requested != source:
        raise SiteError(
            f"this site takes the key of a run's hashes from {source.value!r}, and the "
            f"server asks for {requested!r}: all sites of a run must have a "
            f"{SECRET_FILE}, or all {ALLOWED_KEYS}, or none may have either"
        )


def _check_pin(key: bytes, trusted: set[bytes], whose: str) -> None:
    if key not in trusted:
        raise SiteError(
            f"the site key {whose}, {key.hex()[:_DIGITS]}..., is not in this site's "
            f"{ALLOWED_KEYS}: either a site is missing there, or the server has put a "
            "key of its own in place of a site's; ask the site's owner for the key, "
            "not the server"
        )


def _recipients(request: SealRequest, source: KeySource) -> dict[str, PublicKeys]:
    """Return the public keys of the nodes to seal to."""
    run = {node: bytes.fromhex(key) for node, key in request.public_keys.items()}
    if source is not KeySource.PINNED:
        return {node: PublicKeys(key) for node, key in run.items()}
    if lacking := run.keys() - request.site_keys.keys():
        raise MessageError(f"'site-keys' lacks nodes {sorted(lacking)}")
    return {
        node: PublicKeys(key, bytes.fromhex(request.site_keys[node]))
        for node, key in run.items()
    }
