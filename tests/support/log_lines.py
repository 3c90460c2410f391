"""Reading lines of the log as a program would."""

import json
import re

PAIR = re.compile(r'([a-z-]+)=("(?:[^"\\]|\\.)*"|[^" ]+)(?: |$)')


def read(text: str) -> dict[str, str]:
    """Return the facts of a line of ``key=value`` pairs."""
    assert PAIR.sub("", text) == ""
    return {
        name: json.loads(value) if value.startswith('"') else value
        for name, value in PAIR.findall(text)
    }


def events(records) -> list[dict[str, str]]:
    """Return the facts of all lines of events among log records, with their levels."""
    return [
        {"level": record.levelname, **read(record.getMessage())}
        for record in records
        if record.getMessage().startswith("event=")
    ]
