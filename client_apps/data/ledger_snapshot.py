"""What a ledger's lines add up to, kept so that not every process reads all of them.

A site may answer each message by a new process. The file beside the ledger holds the
folded state up to some line, with that line's place and checksum and a checksum of its
own. It saves time only: without it, or if it is damaged, the ledger is read from its
beginning. A ledger that has not got the line any more is damaged.
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from client_apps.data.ledger_journal import Position, sealed, unsealed
from client_apps.data.ledger_state import LedgerState

EVERY: Final = 256
"""Lines after which a new snapshot is made."""

_VERSION: Final = 1


def load(path: Path) -> tuple[LedgerState, Position]:
    """Return the state of a snapshot and how far it goes; an empty one if unusable."""
    try:
        content = unsealed(path.read_bytes())
        if content["version"] == _VERSION:
            checksum = content["last"].encode()
            position = Position(content["offset"], content["seq"], checksum)
            return LedgerState.from_json(content["state"]), position
    except (OSError, KeyError, TypeError, ValueError):
        # the ledger itself says all
        pass
    return LedgerState(), Position()


def save(path: Path, state: LedgerState, position: Position) -> None:
    """Keep a state, within the ledger's turn; it need not succeed."""
    content = {
        "version": _VERSION,
        "offset": position.offset,
        "seq": position.seq,
        "last": position.checksum.decode(),
        "state": state.to_json(),
    }
    temporary = path.with_suffix(".new")
    with suppress(OSError):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(sealed(json.dumps(content, separators=(",", ":"))))
        temporary.replace(path)
