"""Lines of the log: one per event, of ``key=value`` pairs with any values.

    event=answered run=1f0c9a77 site=3 round=12 action=train.admm seconds=0.061

A value that is more than letters, digits and a few signs is quoted like a JSON string:
others choose the names of sites and tables, which must not be able to begin a line,
close a quote or colour a terminal. A run's name grants the right to continue the run,
so only its first digits are shown.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from json.encoder import encode_basestring_ascii
from logging import WARNING, Handler, Logger, LogRecord, getLogger
from typing import Final

Value = str | int | float | Sequence[str] | None

SHOWN_DIGITS: Final = 8  # length of a run's name in the log
MOST_CHARACTERS: Final = 500  # length of a value; the rest is replaced by three dots
_FLOWER: Final = getLogger("flwr")
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.:@/+-]+")
_DELETE: Final = "\x7f"
_FOR_OWNER: Final = "for_owner"


def log_event(level: int, event: str, /, **values: Value) -> None:
    """Log the line of an event, unless nothing prints that level: most are not."""
    if is_printed(level):
        _FLOWER.log(level, line(event, **values), stacklevel=2)


def warn_owner(text: str) -> None:
    """Warn of a site's rows in its log, which its owner alone reads."""
    _FLOWER.warning(text, stacklevel=2, extra={_FOR_OWNER: True})


@contextmanager
def owner_warnings(take: Callable[[str], None]) -> Iterator[None]:
    """Let the sites that are in this process, of a simulation, give their warnings.

    Others log them where they are.
    """
    handler = _OwnerHandler(take)
    _FLOWER.addHandler(handler)
    try:
        yield
    finally:
        _FLOWER.removeHandler(handler)


class _OwnerHandler(Handler):
    """Passes warnings for owners on."""

    def __init__(self, take: Callable[[str], None]) -> None:
        super().__init__(WARNING)
        self._take = take

    def emit(self, record: LogRecord) -> None:
        """Pass a record's text on, if it is for a site's owner."""
        if getattr(record, _FOR_OWNER, False):
            self._take(record.getMessage())


def is_printed(level: int) -> bool:
    """Return whether a handler takes records of a level."""
    logger: Logger | None = _FLOWER
    while logger is not None:
        if any(handler.level <= level for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def line(event: str, /, **values: Value) -> str:
    r"""Return the line of an event.

    Values keep their order; None is left out. Only the first digits of ``run`` are
    shown. Lists of texts are joined by commas. Numbers have 3 decimals.

    >>> print(line("answered", run="1f0c9a77d2e8", round=12, seconds=0.0612))
    event=answered run=1f0c9a77 round=12 seconds=0.061
    >>> print(line("late", site='the "north"\n', tables=["a", "b"], at=None))
    event=late site="the \"north\"\n" tables="a,b"
    """
    if values.get("run") is not None:
        values["run"] = str(values["run"])[:SHOWN_DIGITS]
    return " ".join(
        f"{name.replace('_', '-')}={_text(value)}"
        for name, value in {"event": event, **values}.items()
        if value is not None
    )


def _text(value: Value) -> str:
    """Return a value as a log line has it: shortened, and quoted if it is not plain."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value) if isinstance(value, str | int) else ",".join(value or ())
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:MOST_CHARACTERS]}..."
    if _PLAIN.fullmatch(text):
        return text
    return encode_basestring_ascii(text).replace(_DELETE, "\\u007f")
