"""How a site gets the key of a run's hashes, which the sites share.

By the site's node config: ``allowed-keys`` names a file with the long-term public keys
of the sites that are trusted with it; ``keys = "unchecked"`` lets it be sealed to and
by whatever public keys the server names. A real site that has neither shares no secret
with another. The server learns which case applies, and cannot choose.

The public keys that a secret is sealed to are in the site's log and ledger.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from logging import DEBUG, INFO
from typing import Final

import msgspec
import numpy as np

from client_apps.data.key_files import read_allowed_keys, site_key
from client_apps.data.run_store import Entry
from client_apps.rounds.site import REQUEST, SECRET, Site
from tp_flower.arrays import AnyArray
from tp_flower.errors import (
    KeyRefusalError,
    MessageError,
    SettingsError,
    SiteError,
)
from tp_flower.events import log_event
from tp_flower.keyed_hash import RUN_GROUP
from tp_flower.node_config import ALLOWED_KEYS, IN_MEMORY, KEYS, UNCHECKED, state_dir
from tp_flower.privacy.key_agreement import (
    GroupSecret,
    KeyPair,
    KeySource,
    PublicKeys,
    SiteKeys,
    sealed_name,
)
from tp_flower.protocol.setup_messages import (
    ProposedRun,
    SealReply,
    SealRequest,
)

_KEYS = "keys"
_PUBLIC = "public"
_SEALED = "sealed"
_DIGITS: Final = 16  # digits of a public key that identify it in error messages
_LOGGED: Final = 8  # digits of a fingerprint in the log
_SET_UP: Final = "terms"  # digest of all that a request for rows has of the run
PAIR_TO: Final = "cutoffs-to-{}"
PAIR_FROM: Final = "cutoffs-from-{}"
"""Names of the keys that this site shares with another node alone, by direction."""

_NO_PINS: Final = (
    "this site has no means to tell the other sites' public keys from keys that the "
    "server has put in their place, and shares no secret with them. Its owner writes "
    'one of these into the node config: allowed-keys = "FILE" (their public keys; '
    "`tp-flower site-key` prints a site's), or "
    'keys = "unchecked" (the server is trusted with the keys)'
)

Members = Mapping[str, PublicKeys]  # the public keys of a group's sites, by node


def key_source(site: Site) -> KeySource:
    """Return the origin of the run's key at this site, by its node config."""
    if _path(site, KEYS) not in ("", UNCHECKED):
        raise SettingsError(f'node config {KEYS} can be "{UNCHECKED}" only')
    if _path(site, ALLOWED_KEYS):
        return KeySource.PINNED
    return KeySource.AGREED


def key_fields(site: Site) -> dict[str, str]:
    """Return the fields of ``describe`` about keys, and check the key files."""
    source = key_source(site)
    public = _public_keys(site)
    fields = {"keys": str(source), "public_key": public.run.hex()}
    if source is KeySource.PINNED:
        _allowed_keys(site)
        fields["site_key"] = public.site.hex()
    return fields


def seal(site: Site, request: SealRequest) -> SealReply:
    """As their leader: make the secrets of groups and seal each to the group's sites.

    A repeated request gets the same sealed secrets, even if the site's key is gone.
    """
    if site.store.has(_SEALED):
        entry = site.store.load(_SEALED)
        if entry.meta[REQUEST] == site.round.digest:
            return SealReply(entry.meta[_SEALED])
    source = key_source(site)
    keys = _site_keys(site)
    _check_source(source, request.keys)
    groups = _members(request, request.groups)
    _check_members(site, groups, source, keys.public)
    # a site that pins keys wants a real secret, in a simulation too
    is_simulated = source is KeySource.AGREED and site.is_simulated
    sealed: dict[str, dict[str, str]] = {}
    for group, members in groups.items():
        if is_simulated and request.simulated:
            secret = GroupSecret.of_simulation(request.seed)
        else:
            secret = GroupSecret.random()
        name = sealed_name(group, members.values())
        sealed[group] = {
            node: keys.seal(secret, member, int(site.run, 16), name).hex()
            for node, member in members.items()
        }
    _record(site, source, groups)
    site.store.save(_SEALED, Entry({}, {REQUEST: site.round.digest, _SEALED: sealed}))
    return SealReply(sealed)


def take_secrets(site: Site, request: ProposedRun) -> None:
    """Store the keys of the site's groups, which are sealed in the request.

    Done once in a run; a repeat of the same request finds the stored keys, as does the
    request for rows after the one for their cutoffs.
    """
    set_up = _set_up(request)
    if site.store.has(SECRET):
        if site.store.load(SECRET).meta[_SET_UP] != set_up:
            raise SiteError(
                "another request has already brought the secrets of this run, with "
                "another proposal or other members"
            )
        return
    source = key_source(site)
    keys = _site_keys(site)
    _check_source(source, request.keys)
    nodes = {group: sealed.members for group, sealed in request.sealed.items()}
    if RUN_GROUP not in nodes:
        raise MessageError(f"'sealed' lacks the secret of group {RUN_GROUP!r}")
    groups = _members(request, nodes)
    _check_members(site, groups, source, keys.public)
    arrays: dict[str, AnyArray] = {}
    fingerprint = request.proposal.fingerprint
    for group, members in groups.items():
        sealed = request.sealed[group]
        name = sealed_name(group, members.values())
        # the first of the group made its secret
        text = bytes.fromhex(sealed.text)
        maker = members[sealed.members[0]]
        secret = keys.open(text, maker, int(site.run, 16), name)
        if secret.is_simulated and not site.is_simulated:
            raise KeyRefusalError(
                "the run's secret is for simulations, and known to everybody: "
                "refused, because this site has a tables file of its own"
            )
        public = [member.run for member in members.values()]
        key = secret.of_run(int(site.run, 16), public, group, proposal=fingerprint)
        arrays[group] = np.frombuffer(key, np.uint8)
    for name, key in _pair_keys(site.run, keys, request, groups[RUN_GROUP]):
        arrays[name] = np.frombuffer(key, np.uint8)
    _record(site, source, groups)
    site.store.save(SECRET, Entry(arrays, {_SET_UP: set_up}))
    # no secret is opened twice: a second request for rows would get hashes that can be
    # compared with those of the first
    site.store.drop(_KEYS)


def _set_up(request: ProposedRun) -> str:
    """Return the digest of a request, but for what other sites have sealed for it."""
    parts = {
        number: msgspec.structs.replace(
            body, cutoffs={}, sealed_keys={}, sealed_partials={}
        )
        for number, body in request.parts.items()
    }
    content = msgspec.to_builtins(
        msgspec.structs.replace(request, parts=parts), str_keys=True
    )
    text = msgspec.json.encode(content, order="deterministic")
    return hashlib.sha256(text).hexdigest()


def _pair_keys(
    run: str, keys: SiteKeys, request: ProposedRun, members: Members
) -> Iterator[tuple[str, bytes]]:
    """Yield the keys of what this site seals for others, or others seal for it.

    That are cutoffs, and the keys and partial answers of a table's shards.
    """
    # the keys of a run are taken before its proposal is used for anything else
    from tp_flower.terms.run_terms import RunTerms

    terms = RunTerms(request.proposal)
    parts = terms.proposal.parts
    ends = {
        (parts[pairs.part].node, node)
        for pairs, nodes in terms.recipients.items()
        for node in nodes
    }
    for overlap in terms.overlaps:
        earlier, later = (parts[number].node for number in overlap)
        ends |= {(earlier, later), (later, earlier)}
    purpose = terms.proposal.fingerprint + f"{run} cutoffs".encode()
    this_node = next(n for n, m in members.items() if m.run == keys.public.run)
    for sender, recipient in sorted(ends):
        for name, end, other in (
            (PAIR_TO, sender, recipient),
            (PAIR_FROM, recipient, sender),
        ):
            if end != this_node:
                continue
            if other not in members:
                raise MessageError(f"'sealed' lacks node {other} of a proposed table")
            is_sender = name == PAIR_TO
            key = keys.pair_key(members[other], purpose, is_sender=is_sender)
            yield name.format(other), key


def run_key(site: Site) -> str:
    """Return the site's public key of the run."""
    return _public_keys(site).run.hex()


def own_node(site: Site) -> str:
    """Return the number of this site's node in the run, by its public keys."""
    key = run_key(site)
    return next(node for node, public in site.public_keys.items() if public == key)


def site_public_key(site: Site) -> str:
    """Return the site's long-term public key; "" unless keys are pinned."""
    return _public_keys(site).site.hex()


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


def _allowed_keys(site: Site) -> set[bytes]:
    return set(read_allowed_keys(_path(site, ALLOWED_KEYS)))


def _check_source(source: KeySource, requested: str) -> None:
    """Refuse a run whose key comes from elsewhere than the key of this site."""
    if requested != source:
        raise KeyRefusalError(
            f"this site takes the key of a run's hashes from {source.value!r}, and the "
            f"server asks for {requested!r}: all sites of a run must have "
            f"{ALLOWED_KEYS}, or none"
        )


def _check_pin(key: bytes, trusted: set[bytes], owner: str) -> None:
    """Refuse a site's key that the owner of this site does not trust."""
    if key not in trusted:
        raise KeyRefusalError(
            f"the site key {owner}, {key.hex()[:_DIGITS]}..., is not in this site's "
            f"{ALLOWED_KEYS}: either a site is missing there, or the server has put a "
            "key of its own in place of a site's; ask the site's owner for the key, "
            "not the server"
        )


def _members(
    request: SealRequest | ProposedRun, groups: Mapping[str, Sequence[str]]
) -> dict[str, Members]:
    """Return the public keys of the nodes of each group."""
    nodes = set().union(*groups.values())
    run = request.public_keys
    site = request.site_keys
    for name, keys in (("public", run), ("site", site)):
        if lacking := sorted(nodes - keys.keys()):
            raise MessageError(f"'{name}-keys' lacks nodes {lacking}")
    public = {n: PublicKeys(*map(bytes.fromhex, (run[n], site[n]))) for n in nodes}
    return {group: {n: public[n] for n in listed} for group, listed in groups.items()}


def _check_members(
    site: Site, groups: Mapping[str, Members], source: KeySource, public: PublicKeys
) -> None:
    """Refuse groups that lack this site, or have an untrusted or a repeated member."""
    is_pinned = source is KeySource.PINNED
    trusted = _allowed_keys(site) | {public.site} if is_pinned else set()
    is_unchecked = site.is_simulated or _path(site, KEYS) == UNCHECKED
    for group, members in groups.items():
        if public.run not in {member.run for member in members.values()}:
            raise KeyRefusalError(
                f"the public keys of group {group!r} lack this site's: its key might "
                "not be new in this run; if the site has lost its keys of the run, "
                "start the run again"
            )
        if source is KeySource.AGREED and len(members) > 1 and not is_unchecked:
            raise KeyRefusalError(_NO_PINS)
        nodes: dict[bytes, str] = {}
        for node, member in members.items():
            if is_pinned:
                maker = f"of the site that made the secret of group {group!r}"
                _check_pin(member.site, trusted, f"of node {node}" if nodes else maker)
            for key in filter(None, (member.run, member.site)):
                if key in nodes:
                    raise KeyRefusalError(
                        f"nodes {nodes[key]} and {node} of group {group!r} have one "
                        f"public key, {key.hex()[:_DIGITS]}...: the server names a "
                        "site twice, or in place of another"
                    )
                nodes[key] = node


def _record(site: Site, source: KeySource, groups: Mapping[str, Members]) -> None:
    """Record in log and ledger which sites have the secrets of the groups."""
    sealed = {
        group: [member.fingerprint for member in members.values()]
        for group, members in groups.items()
    }
    site.ledger.record_keys(site.run, sealed)
    recipients = [
        ":".join([group, str(len(members)), *(name[:_LOGGED] for name in members)])
        for group, members in sealed.items()
    ]
    level = DEBUG if site.is_simulated else INFO
    log_event(level, "keys", run=site.run, source=str(source), recipients=recipients)
