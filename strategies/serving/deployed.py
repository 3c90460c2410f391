"""A scorer in a deployment: a run that listens on the SuperLink's machine.

Where it listens, and for whom, is in a file of that machine's operator, to which
``superlink.sh --scorer`` points. Whoever starts the run says what is served, and can
neither read the token nor choose an address.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import msgspec
from flwr.serverapp import Grid

from strategies.serving.http_server import LISTEN, Address
from strategies.serving.scorer import Scorer, serve
from tp_flower.errors import SettingsError
from tp_flower.protocol.fields import Document
from tp_flower.reports.records import write_json
from tp_flower.settings import Settings
from tp_flower.settings.run import SERVE

SCORER: Final = "TP_FLOWER_SCORER"
"""Environment variable: the operator's file."""


class ScorerFile(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, rename="kebab"
):
    """The operator's file; paths are relative to it.

    Attributes:
        token_file: has the token of those who may ask.
        listen: host and port.
        certificate: PEM file for TLS, without which only this machine is listened to.
        refresh: seconds after which rows are read anew; 0 for never.
        row_keys: state folder of the label table's site, if it is on this machine:
            requests then name rows by their row keys in place of the hashes of these.
    """

    token_file: str
    listen: str = LISTEN
    certificate: str = ""
    refresh: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    row_keys: str = ""

    def address(self, folder: Path) -> Address:
        """Return where to listen, and for whom."""
        certificate = folder / self.certificate if self.certificate else None
        return Address.read(self.listen, folder / self.token_file, certificate)


def read_scorer_file(path: Path) -> tuple[Address, ScorerFile]:
    """Return what the operator's file says.

    Raises:
        SettingsError: it cannot be read, or an entry is refused.
    """
    try:
        file = msgspec.toml.decode(path.read_bytes(), type=ScorerFile)
        address = file.address(path.parent)
        # read now, so that what is wrong with it is told of this file
        _ = address.context
        return address, file
    except (OSError, ValueError) as error:
        raise SettingsError(f"the scorer's file {path}: {error}") from None
    except SettingsError as error:
        # the entries are called as the options of the command
        reason = str(error).replace("--", "")
        raise SettingsError(f"the scorer's file {path}: {reason}") from None


def serve_run(
    settings: Settings, grid: Grid, folder: Path, announce: Callable[[str], None]
) -> Document:
    """Serve a model by the sites of a deployment, until the run is stopped.

    Returns:
        The content of `report.json`, which is written: of the last session.
    """
    named = os.environ.get(SCORER, "")
    if not named:
        raise SettingsError(
            f"mode = {SERVE!r} is for a SuperLink whose operator lets runs listen "
            "(superlink.sh --scorer FILE); by sites in its own process "
            "`tp-flower serve` does it"
        )
    address, file = read_scorer_file(Path(named))
    states = [Path(named).parent / file.row_keys] if file.row_keys else []
    scorer = Scorer(settings, file.refresh, states)
    serve(scorer, grid, address, announce)
    report = scorer.report()
    write_json(report, folder)
    return report
