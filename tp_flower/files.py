"""Files that appear whole or not at all; durable ones survive a loss of power."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO, Final

PRIVATE: Final = 0o600


@contextmanager
def whole_file(
    path: Path, *, is_durable: bool, mode: int = PRIVATE
) -> Iterator[BinaryIO]:
    """Yield a file to write to, which then replaces the file at a path.

    Its folder must exist, and nobody else may be writing. A durable file is on disk
    before it gets its name. After an OSError the previous file is still there.
    """
    # always the same name: a file left by a killed process is overwritten
    temporary = path.with_name(f".{path.name}-new")
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    try:
        with os.fdopen(os.open(temporary, flags, PRIVATE), "w+b") as file:
            yield file
            os.fchmod(file.fileno(), mode)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if is_durable:
        sync(path.parent)


def write_file(
    path: Path,
    pieces: Iterable[bytes | memoryview],
    *,
    is_durable: bool,
    mode: int = PRIVATE,
) -> None:
    """Replace a file, given in pieces, as :func:`whole_file` does."""
    with whole_file(path, is_durable=is_durable, mode=mode) as file:
        file.writelines(pieces)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


HOME_VARIABLE: Final = "TP_FLOWER_HOME"


_HOME: Final[ContextVar[Path | None]] = ContextVar("home", default=None)
"""The home of the runs in this context; None for the user's."""


def user_home() -> Path:
    """Return the user's home for this project: TP_FLOWER_HOME or ~/.tp_flower."""
    return Path(os.environ.get(HOME_VARIABLE) or "~/.tp_flower").expanduser()


def home_folder() -> Path:
    """Return the folder of runs, models, and the state of simulated sites."""
    return _HOME.get() or user_home()


@contextmanager
def home_at(folder: Path) -> Iterator[None]:
    """Let the runs of this context have another home than the user's.

    >>> with home_at(Path("/data/trial")):
    ...     home_folder().name
    'trial'
    """
    token = _HOME.set(folder)
    try:
        yield
    finally:
        _HOME.reset(token)
