"""The folder of a user of tp_flower: runs, manifests of models, the built-in data."""

import os
from pathlib import Path
from typing import Final

HOME_VARIABLE: Final = "TP_FLOWER_HOME"


def home_folder() -> Path:
    """Return the folder that tp_flower writes to: TP_FLOWER_HOME or ~/.tp_flower."""
    return Path(os.environ.get(HOME_VARIABLE) or "~/.tp_flower").expanduser()
