"""The root of the checkout, copies of its app, and case tables: a case a line."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def case_table(test_file: str) -> dict[str, Any]:
    """Read the TOML file beside a test file, of the same name."""
    return tomllib.loads(
        Path(test_file).with_suffix(".toml").read_text(encoding="utf-8")
    )


def output_of(code: str, *arguments: str) -> str:
    """Return what a program prints in a Python of its own."""
    return subprocess.check_output(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, text=True
    )
