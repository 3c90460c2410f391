"""The SQL pairs of the folder ``sql``: queries with their plans or their errors."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "sql"
FILES = [
    tomllib.loads(path.read_text(encoding="utf-8"))
    for path in sorted(FOLDER.glob("*.toml"))
]
PAIRS: list[dict[str, Any]] = [
    {**pair, "sql": " ".join(pair["sql"].split())}
    for file in FILES
    for pair in file.get("pair", [])
] + [
    {"name": sql, "sql": sql, "error": error}
    for file in FILES
    for sql, error in file.get("refused", [])
]
ACCEPTED = [pair for pair in PAIRS if "plan" in pair]


def by_name(pairs: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("pair", pairs, ids=[pair["name"] for pair in pairs])
