"""Case tables: texts that go in and texts that come out, a case a line, in TOML."""

import tomllib
from pathlib import Path
from typing import Any


def case_table(test_file: str) -> dict[str, Any]:
    """Read the TOML file beside a test file, of the same name."""
    path = Path(test_file).with_suffix(".toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))
