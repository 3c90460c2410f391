"""The figures of a `report.json` by name, and how two reports differ.

Equal are metrics, residuals, sizes, fan-out, contributions and what was chosen, to
`TOLERANCE`; payload bytes may fall. What depends on host, clock or version is left out.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TOLERANCE = 1e-9
"""Relative."""
NEGLIGIBLE = 1e-12
"""Absolute: a residual of rounding errors alone has no digits to compare."""

EXCLUDED = frozenset(
    {
        # clock
        *("started", "seconds", "created", "time"),
        *("server-seconds", "client-seconds", "wait-seconds", "site-seconds"),
        # names that are made up for a run, and places on the host
        *("output-dir", "model", "file", "files", "source"),
        # versions: headers, what a run was told, and sentences about messages
        *("schema", "overhead-bytes", "settings", "messages", "ledger"),
        # position in the history: rounds are named by epoch and phase
        "round",
    }
)
BYTES = frozenset({"bytes-up", "bytes-down", "bytes_up", "bytes_down"})
CHOSEN = "chosen"
NAMES = ("epoch", "phase", "site", "table", "feature", "output", "on")
"""Fields by which a record of a list is named, as the order may differ."""
SIGNIFICANT_DIGITS = 13

Value = float | int | str
Figures = dict[str, Value]


@dataclass
class Difference:
    """How a new report differs from an old one.

    Attributes:
        failures: figures that differ, are missing, or bytes that have grown.
        notes: what differs and may.
        compared: number of figures that both have.
        furthest: the largest relative difference of a number that must be equal.
        old_bytes: payload of the old run, both ways; ``new_bytes`` of the new one.
    """

    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    compared: int = 0
    furthest: float = 0.0
    old_bytes: int = 0
    new_bytes: int = 0


def flatten(report: Mapping[str, Any]) -> Figures:
    """Return the figures of a report by their path, without those of `EXCLUDED`.

    >>> history = [{"round": 3, "epoch": 1, "phase": "admm", "train": {"loss": 0.5}}]
    >>> flatten({"seconds": 2.0, "history": history})
    {'history/epoch 1, phase admm/train/loss': 0.5}
    """
    return dict(_figures("", report))


def _figures(path: str, value: Any) -> Iterator[tuple[str, Value]]:
    prefix = f"{path}/" if path else ""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key not in EXCLUDED:
                yield from _figures(f"{prefix}{key}", item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        if value and all(isinstance(item, str) for item in value):
            yield path, ", ".join(sorted(value))
            return
        for name, item in _named(value):
            yield from _figures(f"{prefix}{name}", item)
    elif value is not None:
        is_finite = isinstance(value, float) and math.isfinite(value)
        # without the digits that are never compared
        yield path, float(f"{value:.{SIGNIFICANT_DIGITS}g}") if is_finite else value


def _named(items: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the items of a list, records without the fields that name them."""
    seen: dict[str, int] = {}
    for number, item in enumerate(items):
        if not isinstance(item, Mapping):
            yield str(number), item
            continue
        keys = [key for key in NAMES if isinstance(item.get(key), str | int)]
        name = ", ".join(f"{key} {item[key]}" for key in keys) or str(number)
        seen[name] = seen.get(name, 0) + 1
        rest = {key: value for key, value in item.items() if key not in keys}
        yield name if seen[name] == 1 else f"{name} ({seen[name]})", rest


def compare(old: Mapping[str, Value], new: Mapping[str, Value]) -> Difference:
    """Return how the figures of a new report differ from those of an old one."""
    result = Difference()
    for path in dict.fromkeys([*old, *new]):
        # words may be replaced by others, but for the run's status; so may what
        # concerns a setting that is gone
        is_word = isinstance(old.get(path), str) and path != "status"
        is_note = is_word or path.partition("/")[0] == CHOSEN
        texts = result.notes if is_note else result.failures
        if path not in new:
            texts.append(f"{path}: {old[path]!r} before, missing now")
        elif path not in old:
            result.notes.append(f"{path}: {new[path]!r} now, missing before")
        else:
            result.compared += 1
            if text := _difference(path, old[path], new[path], result):
                texts.append(f"{path}: {text}")
    return result


def _difference(path: str, old: Any, new: Any, result: Difference) -> str:
    """Return how a figure differs, in words; empty if it does not, beyond tolerance."""
    if not BYTES.isdisjoint(path.split("/")):
        if path.startswith("bytes_"):
            result.old_bytes += old
            result.new_bytes += new
        return f"{old} bytes before, {new} now" if new > old else ""
    words = f"{old!r} before, {new!r} now"
    if isinstance(old, str | bool) or isinstance(new, str | bool):
        return "" if old == new else words
    difference = relative_difference(float(old), float(new))
    result.furthest = max(result.furthest, difference)
    return "" if difference <= TOLERANCE else f"{words}, {difference:.1e} apart"


def relative_difference(old: float, new: float) -> float:
    """Return by how much of the larger one two numbers differ; inf if one is NaN.

    >>> relative_difference(2.0, 1.0), relative_difference(1e-14, -1e-14)
    (0.5, 0.0)
    """
    if math.isnan(old) or math.isnan(new):
        return 0.0 if math.isnan(old) and math.isnan(new) else math.inf
    difference = abs(old - new)
    if difference <= NEGLIGIBLE:
        return 0.0
    return difference / max(abs(old), abs(new))
