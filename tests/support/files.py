"""The root of the checkout, files of JSON and TOML, and what a program prints."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def text_of(path: Path) -> str:
    """Return the text of a file."""
    return path.read_text(encoding="utf-8")


class CaseTable(dict[str, Any]):
    """The cases of a test file, in lists by name."""

    def each(self, name: str, *arguments: str) -> pytest.MarkDecorator:
        """Run a test with each case of a list, which holds values of its arguments."""
        names = arguments if len(arguments) > 1 else arguments[0]
        return pytest.mark.parametrize(names, self[name])


def case_table(test_file: str) -> CaseTable:
    """Read the TOML file beside a test file, of the same name."""
    return CaseTable(tomllib.loads(text_of(Path(test_file).with_suffix(".toml"))))


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
