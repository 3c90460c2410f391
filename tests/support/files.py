"""The root of the checkout, files of JSON and TOML, and what a program prints."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def case_table(test_file: str) -> dict[str, Any]:
    """Read the TOML file beside a test file, of the same name."""
    return tomllib.loads(
        Path(test_file).with_suffix(".toml").read_text(encoding="utf-8")
    )


def read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def toml_lines(values: Mapping[str, object]) -> str:
    """Write values that JSON and TOML write alike, a line each."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def output_of(code: str, *arguments: str) -> str:
    """Return what a program prints in a Python of its own."""
    return subprocess.check_output(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, text=True
    )
