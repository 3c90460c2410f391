"""Lines of the log: one per event, of ``key=value`` pairs with any values.

    event=answered run=1f0c9a77 site=3 round=12 action=train.admm seconds=0.061

A value that is more than letters, digits and a few signs stands in quotes, written as
JSON writes texts: names of sites and tables are others' to choose, and must not be able
to begin a line, close a quote or colour a terminal. A run's name is the right to go on
with the run, so that no more than its first digits are shown.
"""

import re
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import Final

Value = str | int | float | Sequence[str] | None

SHOWN_DIGITS: Final = 8
"""Of a run's name."""

MOST_CHARACTERS: Final = 500
"""Of a value; the rest is cut, and three dots stand for it."""

_PLAIN: Final = re.compile(r"[A-Za-z0-9_.:@/+-]+")
_DELETE: Final = "\x7f"


class LogLine:
    """A line of the log, written out by whoever prints it: most are not printed."""

    def __init__(self, event: str, values: dict[str, Value]) -> None:
        self._values = {"event": event, **values}

    def __str__(self) -> str:
        return " ".join(
            f"{name.replace('_', '-')}={_text(value)}"
            for name, value in self._values.items()
            if value is not None
        )


def line(event: str, /, **values: Value) -> LogLine:
    r"""Return the line of an event.

    Values are in the order of the line; None is left out. Of ``run`` the first digits
    are shown. Lists of texts are joined by commas. Numbers have 3 digits behind the
    point.

    >>> print(line("answered", run="1f0c9a77d2e8", round=12, seconds=0.0612))
    event=answered run=1f0c9a77 round=12 seconds=0.061
    >>> print(line("late", site='the "north"\n', tables=["a", "b"], at=None))
    event=late site="the \"north\"\n" tables="a,b"
    """
    if values.get("run") is not None:
        values["run"] = str(values["run"])[:SHOWN_DIGITS]
    return LogLine(event, values)


def _text(value: Value) -> str:
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
