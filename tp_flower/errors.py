"""The errors a caller of tp_flower can act on.

A site tells the server the kind of an error, which decides what comes next: the same
request again, the rounds that the site has missed, or the end of the run.
"""

import difflib
import errno
from collections.abc import Collection, Iterable
from enum import StrEnum
from importlib import import_module
from types import ModuleType
from typing import Final

NEXT_QUERY: Final = "the next one may at "
"""In the refusal of a query beyond a table's quota, before the time (ISO 8601)."""


class TPFlowerError(Exception):
    """Base of every error that tp_flower raises on purpose."""


class SettingsError(TPFlowerError):
    """A setting of the experiment is unknown, ill-typed or out of range."""


class QueryError(TPFlowerError):
    """The SQL query cannot be parsed, bound or pushed down."""


class SchemaError(TPFlowerError):
    """The tables that the sites host do not fit the query or each other."""


class SourceError(TPFlowerError):
    """A shard's source cannot be read or holds values that cannot be used."""


class UnreachableError(SourceError):
    """A shard's database does not answer now, and may do so later."""


class MappingError(TPFlowerError):
    """The join of the keys cannot be built or has no rows."""


class WorkerError(TPFlowerError):
    """A worker of the server has died, and so have those that replaced it."""


class ReplyError(TPFlowerError):
    """A site's reply is missing, malformed or of the wrong shape."""


class MessageError(TPFlowerError):
    """A message does not fit its declaration; ``part`` is its participant's number."""

    def __init__(self, text: str, part: int | None = None) -> None:
        super().__init__(text)
        self.part = part


class RangeError(MessageError):
    """An array of a message has numbers that are not finite or out of range."""


class MissingSiteError(ReplyError):
    """A site has not answered in time."""


class SiteError(TPFlowerError):
    """A site reported that it could not carry out a request."""


class UnavailableError(SiteError):
    """A site cannot carry out a request now: its app crashed, or its disk is full."""


class LedgerError(SiteError):
    """A site's privacy ledger is damaged or cannot be written; nothing is released."""


class BudgetError(SiteError):
    """A release would spend more than a site's privacy budget."""


class MaskError(SiteError):
    """Masks that have hidden some numbers would be reused for others.

    This would reveal the difference of the numbers.
    """


class PolicyError(SiteError):
    """The policy of a site's table does not allow a request."""


class KeyRefusalError(SiteError):
    """A site does not agree on keys with the sites that a request names."""


class ProposalError(SiteError):
    """A request contradicts the proposal of its run.

    Or the proposal contradicts itself, or the site.
    """


class ModelError(TPFlowerError):
    """A saved model is unknown, damaged, of another version, or badly named."""


class BehindError(SiteError):
    """A site lacks the state for a request; ``at`` is the last round it answered."""

    def __init__(self, text: str, at: int | None) -> None:
        super().__init__(text)
        self.at = at


class LostStateError(SiteError):
    """A site's state of a run is missing or damaged."""


class OfRowsError(SiteError):
    """A site refuses numbers for what they are together with its rows.

    It does so once in a run: a server that may try again finds the rows' numbers by
    bisection.
    """


class StoppedError(SiteError):
    """A site answers nothing more in a run, after an :class:`OfRowsError`."""


class DivergedError(OfRowsError):
    """A site's part of the model is no longer finite.

    ``nodes`` are those that have not carried out the round.
    """

    def __init__(self, text: str, nodes: Collection[int] = ()) -> None:
        super().__init__(text)
        self.nodes = frozenset(nodes)


class ScoreRangeError(ModelError, OfRowsError):
    """A score of a saved model is out of the range that can be sent."""


def closest(name: str, choices: Collection[str]) -> str:
    """Return a hint naming the choices that look like ``name``, or an empty text.

    >>> closest("tailnumm", ["tailnum", "origin"])
    " (did you mean 'tailnum'?)"
    """
    spellings = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(name.lower(), spellings, n=3)
    if not matches:
        return ""
    return f" (did you mean {' or '.join(repr(spellings[m]) for m in matches)}?)"


def join_problems(problems: Iterable[str]) -> str:
    """Return distinct problems as one text, of many the first.

    >>> join_problems(["no label", "no key", "no label"])
    'no label; no key'
    """
    distinct = list(dict.fromkeys(problems))
    listed = distinct[:_MOST_PROBLEMS]
    if others := len(distinct) - len(listed):
        listed.append(f"and {others} more")
    return "; ".join(listed)


def install_hint(extra: str) -> str:
    """Return what to do about a missing package of an extra of this project."""
    return f'is not installed: pip install -c constraints.txt -e ".[{extra}]"'


def load_extra(package: str, purpose: str, extra: str) -> ModuleType:
    """Import and return a package of an extra of this project.

    Raises:
        ModelError: it is not installed.
    """
    try:
        return import_module(package)
    except ImportError:
        raise ModelError(f"for {purpose} {package} {install_hint(extra)}") from None


def failure_text(error: BaseException) -> str:
    """Return the last lines of a failed command: its reason, then what to do about it.

    >>> print(failure_text(KeyboardInterrupt()))
    FAILED: interrupted
    """
    if isinstance(error, KeyboardInterrupt):
        other = "interrupted"
    else:
        other = type(error).__name__
    return "\n".join(
        [f"FAILED: {str(error) or other}", *getattr(error, "__notes__", ())]
    )


class ErrorKind(StrEnum):
    """The remedy for a site's error.

    REFUSED: none, it would recur. TRANSIENT: send the same request again later.
    BEHIND: send the rounds that the site lacks. DIVERGED: train with smaller steps.
    STOPPED: begin another run.
    """

    REFUSED = "refused"
    TRANSIENT = "transient"
    BEHIND = "behind"
    DIVERGED = "diverged"
    STOPPED = "stopped"


_MOST_PROBLEMS: Final = 5
_LASTING: Final = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL, errno.ELOOP),
}
"""System errors that last until somebody fixes them."""

_FULL: Final = ("No space left on device", "Disk quota exceeded", "Input/output error")
"""DuckDB's error texts about disks, which carry no error numbers."""


def kind_of(error: BaseException) -> ErrorKind:
    """Return the kind of a site's error.

    >>> kind_of(OSError(errno.ENOSPC, "No space left on device")).value
    'transient'
    >>> kind_of(FileNotFoundError(errno.ENOENT, "No such file or directory")).value
    'refused'
    """
    if isinstance(error, BehindError):
        return ErrorKind.BEHIND
    if isinstance(error, DivergedError):
        return ErrorKind.DIVERGED
    if isinstance(error, OfRowsError | StoppedError):
        return ErrorKind.STOPPED
    cause: BaseException | None = error
    while cause is not None:
        if _is_passing(cause):
            return ErrorKind.TRANSIENT
        cause = cause.__cause__
    return ErrorKind.REFUSED


def is_full(error: OSError) -> bool:
    """Whether a disk has no room left for its user."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _is_passing(error: BaseException) -> bool:
    """Return whether the same work may succeed later."""
    if isinstance(error, OSError):
        return error.errno not in _LASTING
    if isinstance(error, UnreachableError):
        return True
    is_engine = type(error).__module__.partition(".")[0] in ("duckdb", "_duckdb")
    return is_engine and any(words in str(error) for words in _FULL)
