"""Folders that appear whole or not at all.

Where they must outlast a loss of power they are *durable*: on the disk before they get
their names.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tp_flower.files import sync


@contextmanager
def whole_folder(folder: Path, *, is_durable: bool = False) -> Iterator[Path]:
    """Fill a folder beside ``folder``, which it replaces if nothing is raised.

    Nobody but the user can read it.

    Raises:
        OSError: it cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield temporary
        if is_durable:
            for path in (*temporary.iterdir(), temporary):
                sync(path)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        if is_durable:
            sync(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
