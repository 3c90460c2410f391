import pytest

from tp_flower.errors import SiteError
from tp_flower.privacy.key_agreement import GroupSecret, KeyPair


def test_only_the_recipient_opens_the_secret() -> None:
    leader, site, other = KeyPair(), KeyPair(), KeyPair()
    secret = GroupSecret.random()
    sealed = leader.seal(secret, site.public)
    assert site.open(sealed, leader.public) == secret
    with pytest.raises(SiteError, match="cannot be opened"):
        other.open(sealed, leader.public)
    with pytest.raises(SiteError, match="cannot be opened"):
        site.open(sealed, other.public)


def test_private_key_survives_being_kept() -> None:
    leader, site = KeyPair(), KeyPair()
    sealed = leader.seal(GroupSecret.random(), site.public)
    again = KeyPair(site.private)
    assert again.public == site.public
    assert again.open(sealed, leader.public) == site.open(sealed, leader.public)


@pytest.mark.parametrize("place", [0, 11, 12, 20, -1])
def test_changed_secret_is_refused(place: int) -> None:
    leader, site = KeyPair(), KeyPair()
    sealed = bytearray(leader.seal(GroupSecret.random(), site.public))
    sealed[place] ^= 1
    with pytest.raises(SiteError, match="cannot be opened"):
        site.open(bytes(sealed), leader.public)


@pytest.mark.parametrize("sealed", [b"", b"short", bytes(12)])
def test_what_is_no_sealed_secret_is_refused(sealed: bytes) -> None:
    with pytest.raises(SiteError, match="cannot be opened"):
        KeyPair().open(sealed, KeyPair().public)


@pytest.mark.parametrize("key", [b"", b"short", bytes(32)])
def test_what_is_no_public_key_is_refused(key: bytes) -> None:
    with pytest.raises(SiteError, match="not a key of X25519"):
        KeyPair().seal(GroupSecret.random(), key)


def test_simulated_secret_follows_the_seed_and_says_so() -> None:
    leader, site = KeyPair(), KeyPair()
    secret = GroupSecret.of_simulation(7)
    assert secret == GroupSecret.of_simulation(7) != GroupSecret.of_simulation(8)
    opened = site.open(leader.seal(secret, site.public), leader.public)
    assert opened.is_simulated
    assert not GroupSecret.random().is_simulated


def test_secret_is_not_shown() -> None:
    assert "value" not in repr(GroupSecret.random())
