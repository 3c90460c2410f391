"""Reading lines of the log as a program would."""

import json
import logging
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


def logged_run(strategy, grid, caplog) -> list[dict[str, str]]:
    """Run a strategy, and return the events of its log, in which no secret stands."""
    with caplog.at_level(logging.DEBUG, logger="flwr"):
        try:
            strategy.start(grid)
        finally:
            # whoever has the run's name can go on with the run
            assert all(
                strategy.session.run not in r.getMessage() for r in caplog.records
            )
            assert all("\n" not in r.getMessage() for r in caplog.records)
    return events(caplog.records)
