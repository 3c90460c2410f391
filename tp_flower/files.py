"""Files that appear whole or not at all.

Where they must outlast a loss of power they are *durable*: on the disk before they get
their names.
"""

import os
from collections.abc import Iterable
from pathlib import Path


def write_file(
    path: Path, pieces: Iterable[bytes | memoryview], *, is_durable: bool
) -> None:
    """Replace a file; nobody else may be writing it, or may read it but the user.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    temporary = path.with_name(f".{path.name}-new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.writelines(pieces)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if is_durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Return when a file, or the names in a folder, are on the disk.

    Raises:
        OSError: they are not.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
