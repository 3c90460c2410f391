"""The settings of a run."""

from collections.abc import Mapping

from strategies.report_page.blocks import TWO_TEXTS, Blocks, Table
from strategies.report_page.reading import Record
from tp_flower.settings import Settings


def settings(report: Record) -> Blocks:
    """Yield the settings that differ from their defaults, the chosen ones, all."""
    values, defaults = report.at("settings").content, Settings().to_dict()
    changed = {
        key: value
        for key, value in values.items()
        # the query has a place of its own
        if key != "sql" and (key not in defaults or defaults[key] != value)
    }
    yield _values("Set for this run", changed)
    yield _values("Chosen by the program", report.at("chosen").content)
    yield _values("All settings", values, is_folded=True)


def _values(
    title: str, values: Mapping[str, object], is_folded: bool = False
) -> Table | None:
    rows = [(str(key), format_setting(value)) for key, value in values.items()]
    table = Table(title, ("setting", "value"), rows, TWO_TEXTS, "", is_folded)
    return table if rows else None


def format_setting(value: object) -> str:
    """Return a setting's value for people.

    >>> format_setting(0.25), format_setting({"f": "gram", "p": True})
    ('0.25', 'f: gram, p: true')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(
            f"{key}: {format_setting(item)}" for key, item in value.items()
        )
    if isinstance(value, list | tuple):
        return ", ".join(map(format_setting, value))
    return str(value)
