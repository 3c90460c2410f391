"""Noisy labels that a site has drawn: kept, so that they are drawn once.

Noise that is drawn again is averaged out. So a draw is kept for as long as the state
folder is, over all runs, and found again by what it depends on: the source, what
decides which rows there are and what their label is, the plan of the noise, and the
true labels themselves. Where any of these differs the labels are drawn anew, which is
paid for anew: the ledger knows a draw by its random ``ident``.

*Order.* A draw is on the disk before it is paid for, and paid for before it leaves. A
process that is killed in between leaves a draw that the next one finds and pays for;
none is made twice, and none leaves unpaid.

Layout
    <state-dir>/privacy/labels/<name>.npz       ``values``, ``ident``
"""

import fcntl
import secrets
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from client_apps.data.run_store import cannot_write
from tp_flower.errors import SiteError
from tp_flower.files import sync, whole_file
from tp_flower.node_config import IN_MEMORY

FOLDER: Final = Path("privacy") / "labels"

_LOCK: Final = ".lock"
_IDENT_BYTES: Final = 16


@dataclass(frozen=True)
class Drawn:
    """A draw.

    Attributes:
        values: (n,), noisy classes or numbers.
        ident: random; no other draw has it.
    """

    values: npt.NDArray[Any]
    ident: str


class LabelStore:
    """The draws of one site.

    Args:
        root: the state folder; ``":memory:"`` keeps them in this process.
    """

    _in_process: Final[dict[str, Drawn]] = {}

    def __init__(self, root: str) -> None:
        self._folder = None if root == IN_MEMORY else Path(root) / FOLDER

    def obtain(self, name: str, draw: Callable[[], npt.NDArray[Any]]) -> Drawn:
        """Return a draw, which is made if there is none; then it is on the disk.

        Args:
            name: stands for all that the draw depends on.
            draw: makes it, (n,).

        Raises:
            SiteError: it cannot be written, or what is kept is damaged.
        """
        if self._folder is None:
            if name not in self._in_process:
                self._in_process[name] = _new(draw)
            return self._in_process[name]
        try:
            with _locked(self._folder):
                path = self._folder / f"{name}.npz"
                if not path.exists():
                    _write(path, _new(draw))
                return _read(path)
        except OSError as error:
            raise cannot_write(self._folder, error) from error


def _new(draw: Callable[[], npt.NDArray[Any]]) -> Drawn:
    return Drawn(draw(), secrets.token_hex(_IDENT_BYTES))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let no other process draw: two that draw at once would both be right."""
    for each in (folder.parent, folder):
        each.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / _LOCK).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, drawn: Drawn) -> None:
    """Write a file that is there whole, and on the disk, or not at all."""
    ident = np.frombuffer(bytes.fromhex(drawn.ident), np.uint8)
    with whole_file(path, is_durable=True) as file:
        np.savez(file, values=drawn.values, ident=ident)
    for folder in (path.parent.parent, path.parent.parent.parent):
        sync(folder)


def _read(path: Path) -> Drawn:
    try:
        # the archive has checksums, which are compared here
        with np.load(path, allow_pickle=False) as file:
            return Drawn(file["values"], file["ident"].tobytes().hex())
    except (zipfile.BadZipFile, ValueError, KeyError, EOFError) as error:
        raise SiteError(
            f"the kept labels {path.name} are damaged: restore them, or remove the "
            f"file {path} and the labels are drawn, and paid for, again"
        ) from error
