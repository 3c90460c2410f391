"""What the ledger in a state folder says."""

import json
from pathlib import Path

from client_apps.data.ledger import open_ledger


def ledger_lines(state: Path, *events: str) -> list[dict]:
    """The lines about some events, or all lines, in their order."""
    lines = map(json.loads, open_ledger(str(state)).export())
    return [line for line in lines if not events or line["event"] in events]
