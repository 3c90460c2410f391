"""The run's secret: sealed from site to site, opened by nobody else, new each run."""

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tp_flower.errors import SiteError
from tp_flower.privacy.key_agreement import GroupSecret, KeyPair, PublicKeys, SiteKeys

RUN = 77
PROPOSAL = bytes(range(32))
SECRET = GroupSecret(bytes(range(32)))


def site_keys(pinned):
    return SiteKeys(KeyPair(), KeyPair() if pinned else None)


def sealed_for(site, leader):
    return leader.seal(SECRET, site.public, RUN)


@pytest.fixture(params=[False, True], ids=["agreed", "pinned"])
def pinned(request):
    return request.param


def refuses(keys, sealed, leader, run=RUN):
    with pytest.raises(SiteError, match="cannot be opened"):
        keys.open(sealed, leader.public, run)


def test_only_the_recipient_opens_the_secret_and_in_its_run(pinned):
    leader, site, other = (site_keys(pinned) for _ in range(3))
    secret = GroupSecret.random()
    assert repr(secret.value) not in repr(secret)
    assert secret.value.hex() not in repr(secret)
    sealed = leader.seal(secret, site.public, RUN)
    # a key that a site reads from its disk again is the same key
    again = replace(site, run=KeyPair(site.run.private))
    assert again.open(sealed, leader.public, RUN) == secret
    refuses(other, sealed, leader)
    refuses(site, sealed, other)
    refuses(site, sealed, leader, RUN + 1)
    to_itself = leader.seal(secret, leader.public, RUN)
    assert leader.open(to_itself, leader.public, RUN) == secret


@pytest.mark.parametrize("changed", ["run", "site"])
@pytest.mark.parametrize("end", ["sender", "recipient"])
def test_pinned_seal_needs_all_four_keys(changed, end):
    # whoever lacks one private key of either end can neither seal nor open
    leader = site_keys(True)
    site = site_keys(True)
    sender = replace(leader, **{changed: KeyPair()}) if end == "sender" else leader
    reader = replace(site, **{changed: KeyPair()}) if end == "recipient" else site
    refuses(reader, sealed_for(site, sender), leader)


def test_pinned_and_unpinned_do_not_open_each_other():
    leader = site_keys(True)
    site = site_keys(True)
    unpinned = SiteKeys(leader.run).seal(SECRET, PublicKeys(site.run.public), RUN)
    refuses(site, unpinned, leader)
    with pytest.raises(SiteError, match="not an X25519 key"):
        leader.seal(SECRET, PublicKeys(site.run.public), RUN)


def test_seal_is_hkdf_of_the_four_exchanges():
    # written out once more from the docstring, with the library alone
    leader = site_keys(True)
    site = site_keys(True)
    sealed = sealed_for(site, leader)

    def exchange(private, public):
        key = X25519PrivateKey.from_private_bytes(private.private)
        return key.exchange(X25519PublicKey.from_public_bytes(public.public))

    shared = (
        exchange(site.run, leader.run)
        + exchange(site.site, leader.run)
        + exchange(site.run, leader.site)
        + exchange(site.site, leader.site)
    )
    ends = leader.run.public + leader.site.public + site.run.public + site.site.public
    info = b"tp_flower sealed secret v3, pinned" + ends + b"77 run"
    key = HKDF(hashes.SHA256(), 32, None, info).derive(shared)
    assert (
        ChaCha20Poly1305(key).decrypt(sealed[:12], sealed[12:], None)
        == b"r" + SECRET.value
    )


@pytest.mark.parametrize("place", [0, 11, 12, 20, -1])
def test_changed_secret_is_refused(place, pinned):
    leader = site_keys(pinned)
    site = site_keys(pinned)
    sealed = bytearray(sealed_for(site, leader))
    sealed[place] ^= 1
    for text in (bytes(sealed), b"", b"short", bytes(12)):
        refuses(site, text, leader)
    for value in (b"short", bytes(33)):
        sealed = leader.seal(GroupSecret(value), site.public, RUN)
        with pytest.raises(SiteError, match="is malformed"):
            site.open(sealed, leader.public, RUN)


@pytest.mark.parametrize("key", [b"", b"short", bytes(32)])
@pytest.mark.parametrize("name", ["run", "site"])
def test_what_is_no_public_key_is_refused(key, name):
    keys = site_keys(pinned=True)
    with pytest.raises(SiteError, match="not an X25519 key"):
        keys.seal(SECRET, replace(keys.public, **{name: key}), RUN)


def test_simulated_secret_follows_the_seed_and_says_so(pinned):
    leader = site_keys(pinned)
    site = site_keys(pinned)
    secret = GroupSecret.of_simulation(3)
    assert secret == GroupSecret.of_simulation(3)
    assert secret != GroupSecret.of_simulation(4)
    assert site.open(
        leader.seal(secret, site.public, RUN), leader.public, RUN
    ).is_simulated
    assert not GroupSecret.random().is_simulated
    first = secret.of_run(1, [bytes(32)], proposal=PROPOSAL)
    assert first == secret.of_run(2, [], proposal=bytes(32)) == secret.value


def test_key_of_a_run_is_its_own():
    keys = [bytes([n]) * 32 for n in range(3)]

    def key_of(run=RUN, public=keys, group="run", proposal=PROPOSAL, secret=SECRET):
        return secret.of_run(run, public, group, proposal=proposal)

    key = key_of()
    assert key == key_of(public=reversed(keys))
    others = {
        SECRET.value,
        key_of(RUN + 1),
        # a new key of a site makes a new key of the run, whatever number it bears
        key_of(public=[*keys[:2], bytes(32)]),
        key_of(public=keys[:2]),
        key_of(secret=GroupSecret(bytes(32))),
        key_of(group="join-0"),
        key_of(group="join-1"),
        # sites that were told of different runs share no key
        key_of(proposal=bytes(32)),
    }
    assert len(others | {key}) == 9
    info = b"tp_flower group key v3" + PROPOSAL + b"".join(keys) + b"77 run"
    assert key == HKDF(hashes.SHA256(), 32, None, info).derive(SECRET.value)
