"""The settings of a run: what was changed, what was chosen, all."""

from collections.abc import Mapping
from typing import Any

from tp_flower.experiment import Settings
from tp_flower.report_page.blocks import Block, Section, Table
from tp_flower.report_page.reading import Report, mapping

WORDS = frozenset({0, 1})


def settings(report: Report) -> Section:
    """Return the settings that differ from their defaults, and the rest."""
    found = mapping(report.get("settings"))
    defaults = Settings().to_dict()
    changed = {
        key: value
        for key, value in found.items()
        if key not in defaults or defaults[key] != value
    }
    # the query has a place of its own
    changed.pop("sql", None)
    blocks: list[Block] = []
    for title, values, is_folded in (
        ("Set for this run", changed, False),
        ("Chosen by the program", mapping(report.get("chosen")), False),
        ("All settings", found, True),
    ):
        if rows := _rows(values):
            blocks.append(
                Table(title, ("setting", "value"), rows, WORDS, "", is_folded)
            )
    return Section("settings", "Settings", blocks)


def _rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(str(key), say_value(value)) for key, value in values.items()]


def say_value(value: object) -> str:
    """Return a setting's value for people.

    >>> say_value(0.25), say_value(True), say_value({"f": "gram", "p": "local"})
    ('0.25', 'true', 'f: gram, p: local')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {say_value(own)}" for key, own in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(say_value, value))
    return str(value)
