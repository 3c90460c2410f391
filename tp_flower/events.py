"""Lines of the log: one per event, of ``key=value`` pairs, whatever the values hold.

    event=answered run=1f0c9a77 site=3 round=12 action=train.admm seconds=0.061

A value that is more than letters, digits and a few signs stands in quotes, written as
JSON writes texts: names of sites and tables are others' to choose, and must not be able
to begin a line, close a quote or colour a terminal. A run's name is the right to go on
with the run, so that no more than its first digits are shown.
"""

import re
from collections.abc import Iterable
from json.encoder import encode_basestring_ascii
from typing import Final

Fact = str | int | float | Iterable[str] | None

SHOWN_DIGITS: Final = 8
"""Of a run's name."""

MOST_CHARACTERS: Final = 500
"""Of a value; the rest is cut, and three dots stand for it."""

_PLAIN: Final = re.compile(r"[A-Za-z0-9_.:@/+-]+")
_DELETE: Final = "\x7f"


def line(event: str, /, **facts: Fact) -> str:
    r"""Return the line of an event.

    Args:
        event: what has happened, in one word.
        facts: by name, in the order of the line; what is None is left out. Of ``run``
            the first digits are shown. Lists of texts are joined by commas. Numbers
            have 3 digits behind the point.

    >>> print(line("answered", run="1f0c9a77d2e8", round=12, seconds=0.0612))
    event=answered run=1f0c9a77 round=12 seconds=0.061
    >>> print(line("late", site='the "north"\n', tables=["a", "b"], at=None))
    event=late site="the \"north\"\n" tables="a,b"
    """
    if "run" in facts and facts["run"] is not None:
        facts["run"] = str(facts["run"])[:SHOWN_DIGITS]
    pairs = {"event": event, **facts}
    return " ".join(
        f"{name.replace('_', '-')}={_value(fact)}"
        for name, fact in pairs.items()
        if fact is not None
    )


def _value(fact: Fact) -> str:
    if isinstance(fact, bool):
        return "true" if fact else "false"
    if isinstance(fact, float):
        return f"{fact:.3f}"
    if not isinstance(fact, str | int):
        fact = ",".join(fact or ())
    text = str(fact)
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:MOST_CHARACTERS]}..."
    if _PLAIN.fullmatch(text):
        return text
    return encode_basestring_ascii(text).replace(_DELETE, "\\u007f")
