"""Files of a site's owner: allowed keys and app bundles, long-term key.

Errors name the setting and say what is wrong with the file; because they may travel to
the server, they contain neither the path nor any content of the file.
"""

import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_bytes
from typing import Final

from tp_flower.errors import SettingsError, SiteError
from tp_flower.files import sync
from tp_flower.keyed_hash import KEY_BYTES
from tp_flower.node_config import ALLOWED_KEYS
from tp_flower.privacy.key_agreement import PUBLIC_KEY_BYTES, KeyPair

SITE_KEY: Final = "site-key"
ROW_ORDER_KEY: Final = "row-order-key"
ALLOWED_APPS: Final = "allowed-apps"

_MOST_BYTES: Final = 1 << 20

_KEY: Final = re.compile(rf"[0-9a-fA-F]{{{2 * PUBLIC_KEY_BYTES}}}")
_SHA256: Final = re.compile(r"[0-9a-fA-F]{64}")
_OTHERS_READ: Final = 0o077
_OTHERS_WRITE: Final = 0o022


def read_allowed_keys(path: str | Path) -> Mapping[bytes, str]:
    """Return the public keys that a site trusts, with the names its owner gave them.

    One site per line: its name and its public key, 64 hexadecimal digits. A ``#``
    starts a comment. A file that others may change is refused.
    """
    allowed: dict[bytes, str] = {}
    for number, words in _lines(path, ALLOWED_KEYS):
        if len(words) < 2 or not _KEY.fullmatch(words[-1]):
            raise SettingsError(
                f"{ALLOWED_KEYS}, line {number}: it must be the name of a site and its "
                "public key, 64 hexadecimal digits"
            )
        key = bytes.fromhex(words[-1])
        name = " ".join(words[:-1])
        if key in allowed or name in allowed.values():
            twice = "key" if key in allowed else "name"
            raise SettingsError(
                f"{ALLOWED_KEYS}, line {number}: the {twice} is listed twice; every "
                "site has a name and a key of its own (SuperNodes on one machine need "
                "a state-dir each)"
            )
        allowed[key] = name
    if not allowed:
        raise SettingsError(f"{ALLOWED_KEYS} lists no key")
    return allowed


def read_allowed_apps(path: str | Path) -> frozenset[str]:
    """Return the SHA-256 of the app bundles that may run, in small letters.

    One per line; a ``#`` starts a comment. A file that others may change is refused.
    """
    allowed = set()
    for number, words in _lines(path, ALLOWED_APPS):
        if len(words) > 1 or not _SHA256.fullmatch(words[0]):
            raise SettingsError(
                f"{ALLOWED_APPS}, line {number}: it must be the SHA-256 of an app "
                "bundle, 64 hexadecimal digits"
            )
        allowed.add(words[0].lower())
    if not allowed:
        raise SettingsError(f"{ALLOWED_APPS} lists no app bundle")
    return frozenset(allowed)


def site_key(folder: str | Path) -> KeyPair:
    """Return a site's long-term key pair from its state folder, created on first use.

    Anyone who can read ``site-key`` there can impersonate the site.
    """
    hint = "put it back from a copy, or remove it and give the other sites the new key"
    return KeyPair(_state_key(folder, SITE_KEY, lambda: KeyPair().private, hint))


def row_order_key(folder: str | Path) -> bytes:
    """Return the key that orders a site's unordered rows; stored like ``site_key``."""
    hint = "remove it; unordered rows then come in another order"
    return _state_key(folder, ROW_ORDER_KEY, lambda: token_bytes(KEY_BYTES), hint)


def _state_key(
    folder: str | Path, name: str, make: Callable[[], bytes], hint: str
) -> bytes:
    """Return a key from the state folder, made on first use."""
    path = Path(folder) / name
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # whole and for its owner alone, unless another process was first
            with tempfile.NamedTemporaryFile(
                dir=path.parent, prefix=f".{name}-"
            ) as file:
                file.write(make().hex().encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
                with suppress(FileExistsError):
                    os.link(file.name, path)
            sync(path.parent)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise SiteError(
                f"cannot write {name} into the state folder: {reason} "
                "(node config state-dir names another folder)"
            ) from error
    text = _read(path, name, _OTHERS_READ, "read or changed").strip()
    if not _KEY.fullmatch(text.decode("latin-1")):
        raise SettingsError(f"{name} in the state folder is damaged: {hint}")
    return bytes.fromhex(text.decode())


def _lines(path: str | Path, setting: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of a list that others may not change: number and words."""
    content = _read(path, setting, _OTHERS_WRITE, "changed")
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        raise SettingsError(f"{setting} is not UTF-8 text") from None
    for number, line in enumerate(lines, start=1):
        if words := line.partition("#")[0].split():
            yield number, words


def _read(path: str | Path, setting: str, forbidden: int, may: str) -> bytes:
    """Return the content of a file that others have no permission to open."""
    try:
        # a pipe must not make the site wait for ever
        descriptor = os.open(Path(path).expanduser(), os.O_RDONLY | os.O_NONBLOCK)
        try:
            mode = os.fstat(descriptor).st_mode
            is_file = stat.S_ISREG(mode)
            content = b""
            if is_file:
                content = os.read(descriptor, _MOST_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SettingsError(f"{setting} cannot be read: {reason}") from None
    if not is_file:
        raise SettingsError(f"{setting} is not a file")
    if mode & forbidden:
        raise SettingsError(
            f"{setting} may be {may} by others than its owner (mode "
            f"{stat.S_IMODE(mode):04o}): chmod 600 it"
        )
    if len(content) > _MOST_BYTES:
        raise SettingsError(f"{setting} has more than {_MOST_BYTES} bytes")
    return content
