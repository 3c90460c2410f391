import hashlib
import hmac

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_flower.keyed_hash import KeyedHasher

SECRET = bytes(range(32))


@settings(deadline=None)  # the first call starts an engine
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=8))
def test_hash_equals_hmac_sha256(texts: list[str]) -> None:
    hashes = KeyedHasher(SECRET).hash_texts(pa.array(texts, pa.string()))
    expected = [
        np.frombuffer(hmac.digest(SECRET, text.encode(), hashlib.sha256), ">u8")
        for text in texts
    ]
    assert hashes.dtype == np.uint64
    assert np.array_equal(hashes, np.array(expected).reshape(-1, 4))


def test_order_is_kept_over_many_texts() -> None:
    texts = [str(i) for i in range(300_000)]
    hashes = KeyedHasher(SECRET).hash_texts(pa.array(texts))
    for place in (0, 150_000, 299_999):
        digest = hmac.digest(SECRET, texts[place].encode(), hashlib.sha256)
        assert hashes[place].astype(">u8").tobytes() == digest


def test_purposes_and_secrets_give_unrelated_hashes() -> None:
    text = pa.array(["a"])
    hasher = KeyedHasher(SECRET)
    actual = {
        hasher.hash_texts(text).tobytes(),
        hasher.purpose("x").hash_texts(text).tobytes(),
        hasher.purpose("y").hash_texts(text).tobytes(),
        KeyedHasher(bytes(32)).hash_texts(text).tobytes(),
    }
    assert len(actual) == 4
    assert hasher.purpose("x") == hasher.purpose("x")


def test_secret_is_not_shown_and_has_one_length() -> None:
    assert "0" not in repr(KeyedHasher(SECRET))
    with pytest.raises(ValueError, match="has 3 bytes, not 32"):
        KeyedHasher(b"abc")
