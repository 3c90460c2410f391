"""An append-only file of checksummed JSON lines that survives crashes.

A line is one JSON object::

    {"seq":7,"time":"2026-11-20T14:03:11Z",<content>,"checksum":"<32 hex digits>"}

``seq`` counts from 1. The checksum is BLAKE2b (16 bytes) of the previous line's
checksum (before the first: 32 zeros) followed by the line's own text up to
``,"checksum"``, so that no line can be changed, taken out of the middle or moved
without breaking the chain. It is no signature: who can write the file can forge it.

*Durability.* ``append`` returns when the lines are on the disk (fsync; with the first
line, the folders too). A crash before that may leave a line without its end. It was
never reported as written, and whoever opens the file next cuts it off. A whole line may
be there, too, whose append was never reported; it counts once the disk has it. Anything
else that does not fit is damage, and every call raises: no change of a single byte
loses a line.

*Concurrency.* Processes and threads take turns by a lock on the file. Each keeps what
it has read, and reads what is new.
"""

import fcntl
import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from tp_flower.errors import LedgerError

Content = dict[str, Any]

_CHECKSUM_BYTES: Final = 16
NO_CHECKSUM: Final = b"0" * (2 * _CHECKSUM_BYTES)
_SEAL: Final = b',"checksum":"%s"}'


@dataclass(frozen=True)
class Position:
    """How far a journal has been read.

    Attributes:
        offset: bytes.
        seq: number of the last line, 0 for none.
        checksum: of the last line, hex digits.
    """

    offset: int = 0
    seq: int = 0
    checksum: bytes = NO_CHECKSUM


class Journal(ABC):
    """Lines that are only ever added.

    Args:
        apply: is called once with each line, in order.
        position: where to go on reading; ``apply`` knows what comes before.

    Attributes:
        position: up to which ``apply`` has been called.
    """

    def __init__(
        self, apply: Callable[[Content], None], position: Position | None = None
    ) -> None:
        self.position = position or Position()
        self._apply = apply

    @abstractmethod
    def turn(self) -> AbstractContextManager[None]:
        """Keep all others out, having applied what they wrote.

        Raises:
            LedgerError: the lines cannot be read, or are damaged.
        """

    @abstractmethod
    def append(self, contents: Sequence[Content]) -> None:
        """Write lines, within a turn, and apply them; return when they are safe.

        Raises:
            LedgerError: they cannot be written; none is applied.
        """

    @abstractmethod
    def contents(self, text: str) -> list[Content]:
        """Return the lines that have a text in them, within a turn."""


class ProcessJournal(Journal):
    """Lines that are gone with the process."""

    def __init__(self, apply: Callable[[Content], None]) -> None:
        super().__init__(apply)
        self._lines: list[Content] = []
        self._lock = threading.RLock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Keep other threads out."""
        with self._lock:
            yield

    def append(self, contents: Sequence[Content]) -> None:
        """Keep and apply the lines."""
        for content in contents:
            self.position = Position(seq=len(self._lines) + 1)
            self._lines.append(json.loads(_to_json(content, self.position.seq)))
            self._apply(self._lines[-1])

    def contents(self, text: str) -> list[Content]:
        """Return the lines that have a text in them."""
        return [line for line in self._lines if text in json.dumps(line)]


class FileJournal(Journal):
    """Lines in a file; its folder (0700) and itself (0600) are made when first used.

    Args:
        path: of the file.
        apply: see ``Journal``.
        position: see ``Journal``.
    """

    def __init__(
        self,
        path: Path,
        apply: Callable[[Content], None],
        position: Position | None = None,
    ) -> None:
        super().__init__(apply, position)
        self.path = path
        self._lock = threading.Lock()
        self._file: int | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Keep all others out, having applied what they wrote.

        Raises:
            LedgerError: the file cannot be opened, is damaged, or has become shorter.
        """
        with self._lock:
            self._file = self._open()
            try:
                # invariant: nobody reads or writes without the lock
                self._take_lock()
                self._read_on()
                yield
            finally:
                os.close(self._file)
                self._file = None

    def append(self, contents: Sequence[Content]) -> None:
        """Write lines, and apply them; return when they are on the disk.

        Raises:
            LedgerError: they cannot be written; none is applied.
        """
        lines = _chained(contents, self.position)
        try:
            self._write(b"".join(line + b"\n" for line in lines))
        except OSError as error:
            # what stays if this fails too is a line too many, or a torn one
            with suppress(OSError):
                os.ftruncate(self._opened, self.position.offset)
            raise self._unusable("cannot be written", error) from error
        for line in lines:
            self._apply_line(line)

    def contents(self, text: str) -> list[Content]:
        """Return the lines that have a text in them."""
        lines = os.pread(self._opened, self.position.offset, 0).splitlines()
        return [json.loads(line) for line in lines if text.encode() in line]

    @property
    def _opened(self) -> int:
        if self._file is None:
            raise RuntimeError("a journal is used out of turn")
        return self._file

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
        try:
            if not self.position.seq:
                self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                flags |= os.O_CREAT
            return os.open(self.path, flags, 0o600)
        except FileNotFoundError:
            raise self._damaged(
                "it was there and cannot be opened any more (an owner who means to "
                "begin a new account removes the snapshot beside it too, and starts "
                "the SuperNode again)"
            ) from None
        except OSError as error:
            raise self._unusable("cannot be opened", error) from error

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._opened, fcntl.LOCK_EX)
        except OSError as error:
            raise self._unusable("cannot be locked", error) from error

    def _read_on(self) -> None:
        """Apply the lines that are new, and cut off one without its end."""
        offset = self.position.offset
        try:
            size = os.fstat(self._opened).st_size
            if size < offset or not self._ends_at_position():
                raise self._damaged("lines that were there are gone")
            *lines, torn = os.pread(self._opened, size - offset, offset).split(b"\n")
            if lines:
                # their writer may have been killed before they were safe
                self._sync()
            for line in lines:
                self._apply_line(line)
            if torn:
                self._repair(torn)
        except OSError as error:
            raise self._unusable("cannot be read", error) from error

    def _repair(self, torn: bytes) -> None:
        """End a whole line that has no end, and cut off a part of one."""
        if _is_sealed(torn, self.position.checksum):
            self._write(b"\n")
            self._apply_line(torn)
        elif _is_sealed(torn[:-1], self.position.checksum):
            raise self._damaged("the end of its last line is another character")
        else:
            os.ftruncate(self._opened, self.position.offset)

    def _ends_at_position(self) -> bool:
        """Return whether the last line that was read is where it was."""
        if not self.position.seq:
            return True
        end = _SEAL % self.position.checksum + b"\n"
        return end == os.pread(self._opened, len(end), self.position.offset - len(end))

    def _apply_line(self, line: bytes) -> None:
        number = self.position.seq + 1
        try:
            content = unsealed(line, self.position.checksum)
        except ValueError:
            raise self._damaged(f"the checksum of line {number} does not fit") from None
        self._apply(content)
        offset = self.position.offset + len(line) + 1
        self.position = Position(offset, number, _checksum(line))

    def _write(self, lines: bytes) -> None:
        rest = memoryview(lines)
        while rest:
            rest = rest[os.write(self._opened, rest) :]
        self._sync()

    def _sync(self) -> None:
        os.fsync(self._opened)
        if not self.position.seq:
            for folder in (self.path.parent, self.path.parent.parent):
                _sync_folder(folder)

    def _damaged(self, what: str) -> LedgerError:
        return LedgerError(
            f"the privacy ledger {self.path} is damaged: {what}; "
            "nothing is released until the site's owner has restored it"
        )

    def _unusable(self, what: str, error: OSError) -> LedgerError:
        reason = error.strerror or type(error).__name__
        return LedgerError(
            f"the privacy ledger {self.path} {what}: {reason}; "
            "nothing is released (node config state-dir names another folder)"
        )


def _to_json(content: Content, seq: int) -> str:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    line = {"seq": seq, "time": now, **content}
    text = json.dumps(line, separators=(",", ":"), allow_nan=False)
    if json.loads(text) != line:
        # what nobody could read back would be damage from then on
        raise TypeError(f"not plain JSON types: {content}")
    return text


def _chained(contents: Sequence[Content], position: Position) -> list[bytes]:
    """Return the lines, without their ends, that are to come after a position."""
    lines = []
    checksum = position.checksum
    for seq, content in enumerate(contents, position.seq + 1):
        lines.append(sealed(_to_json(content, seq), checksum))
        checksum = _checksum(lines[-1])
    return lines


def sealed(text: str, previous: bytes = NO_CHECKSUM) -> bytes:
    """Return a JSON object with the checksum of itself and what came before."""
    body = text.removesuffix("}").encode()
    return body + _SEAL % _digest(body, previous)


def unsealed(line: bytes, previous: bytes = NO_CHECKSUM) -> Content:
    """Return what was sealed.

    Raises:
        ValueError: the checksum does not fit.
    """
    if not _is_sealed(line, previous):
        raise ValueError("the checksum does not fit")
    content: Content = json.loads(line[: -len(_SEAL % NO_CHECKSUM)] + b"}")
    return content


def _is_sealed(line: bytes, previous: bytes) -> bool:
    body = line[: -len(_SEAL % NO_CHECKSUM)]
    return line == body + _SEAL % _digest(body, previous)


def _digest(body: bytes, previous: bytes) -> bytes:
    digest = blake2b(previous + body, digest_size=_CHECKSUM_BYTES)
    return digest.hexdigest().encode()


def _checksum(line: bytes) -> bytes:
    return line[-len(NO_CHECKSUM) - 2 : -2]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
