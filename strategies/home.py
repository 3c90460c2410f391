"""The folder of the operator: runs, and the manifests of their models."""

import os
from pathlib import Path


def home_folder() -> Path:
    """Return ``TP_FLOWER_HOME``, by default ``~/.tp_flower``."""
    given = os.environ.get("TP_FLOWER_HOME")
    return Path(given).expanduser() if given else Path.home() / ".tp_flower"
