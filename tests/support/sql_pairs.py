"""The SQL pairs of the folder ``sql``: queries with their plans or their errors."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "sql"


PAIRS: list[dict[str, Any]] = [
    {**pair, "sql": " ".join(pair["sql"].split())}
    for path in sorted(FOLDER.glob("*.toml"))
    for pair in tomllib.loads(path.read_text(encoding="utf-8"))["pair"]
]


ACCEPTED = [pair for pair in PAIRS if "plan" in pair]


def by_name(pairs: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("pair", pairs, ids=[pair["name"] for pair in pairs])
