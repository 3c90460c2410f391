"""The root of the checkout, and case tables: a case a line, in TOML."""

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def case_table(test_file: str) -> dict[str, Any]:
    """Read the TOML file beside a test file, of the same name."""
    path = Path(test_file).with_suffix(".toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))
