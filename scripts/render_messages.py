"""Write the pages that follow from the messages' declarations.

    python scripts/render_messages.py

Changes docs/reference/messages.md, and the tables of PRIVACY.md and ARCHITECTURE.md
between their markers.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_args, get_origin

import msgspec

from client_apps.app import ANSWERS
from tp_flower.protocol.fields import Body, Message, layout_of
from tp_flower.protocol.messages import EXCHANGES

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "reference" / "messages.md"
TABLES: Final = (ROOT / "PRIVACY.md", ROOT / "ARCHITECTURE.md")
START: Final = "<!-- messages: made by scripts/render_messages.py -->"
END: Final = "<!-- end of messages -->"
_LIMITS: Final = {
    "minimum": "from",
    "exclusiveMinimum": "above",
    "maximum": "to",
    "maxLength": "of length at most",
    "pattern": "of the form",
}
_PLACE: Final = re.compile(r"\{(\w+)\}")
_HEAD: Final = """# Messages

Every request that the server may send and every reply that a site may give, as
`tp_flower/protocol` declares them; `scripts/render_messages.py` writes this page. What
is not declared can be neither sent nor read. A name in the shape of an array is a size
that both ends know; `n/8` is a bit for each of n.
"""


def page() -> str:
    """Return the reference page."""
    sections = [_HEAD]
    for action, exchange in EXCHANGES.items():
        sections.append(f"## `{action}`\n")
        sections += [_section(message) for message in exchange]
    return "\n".join(sections)


def privacy_table() -> str:
    """Return the table of PRIVACY.md: the disclosures of each message."""
    rows = [
        (
            *(f"`{action}`", disclosure.reader or message.reader),
            *(_plain(disclosure.carries), disclosure.covered_by),
            *(", ".join(disclosure.kinds), disclosure.policy),
        )
        for action, exchange in EXCHANGES.items()
        for message in exchange
        for disclosure in message.discloses
    ]
    return _table(
        "| message | to | tells | covered by | in the ledger | policy |", rows
    )


def message_table() -> str:
    """Return the table of ARCHITECTURE.md: each message, and where it is answered."""
    rows = []
    for action, exchange in EXCHANGES.items():
        module = ANSWERS[action].partition(":")[0].replace(".", "/")
        rows.append((f"`{action}`", *map(_summary, exchange), f"`{module}.py`"))
    return _table(
        "| message | request | reply | at the site, in `client_apps/` |", rows
    )


def _table(head: str, rows: Iterable[Iterable[object]]) -> str:
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(lines)


def with_table(path: Path) -> str:
    """Return the text of a page with its table rendered anew."""
    before, _, rest = path.read_text(encoding="utf-8").partition(START)
    table = privacy_table() if path.name == "PRIVACY.md" else message_table()
    return f"{before}{START}\n{table}\n{END}{rest.partition(END)[2]}"


def _section(message: type[Message]) -> str:
    part = layout_of(message).part
    lines = [f"### {message.__name__}\n", _summary(message), "", *_fields(message, "")]
    lines += _fields(part, "of each part: ") if part else ()
    for disclosure in message.discloses:
        reader = disclosure.reader or message.reader
        lines.append(f"- tells the {reader}: {_plain(disclosure.carries)}")
    return "\n".join([*lines, ""])


def _fields(body: type[Body], prefix: str) -> Iterator[str]:
    layout = layout_of(body)
    for field in msgspec.structs.fields(body):
        name, hint = field.encode_name, field.type
        if name not in layout.values:
            continue
        choices = (c for c in (hint, *get_args(hint)) if isinstance(c, type))
        if structure := next((c for c in choices if issubclass(c, Body)), None):
            each = "each " if get_origin(hint) is list else ""
            yield from _fields(structure, f"{prefix}{each}`{name}`: ")
        else:
            # the values that it may have, from its JSON schema
            (schema,), parts = msgspec.json.schema_components([hint])
            allowed = _in_words({**schema, **next(iter(parts.values()), {})})
            yield f"- {prefix}`{name}`: {allowed}"
    for name, (_, spec) in {**layout.arrays, **layout.families}.items():
        shape = " x ".join(map(str, spec.shape)) or "a number"
        of_key = " by key" if name in layout.families else ""
        yield f"- {prefix}`{name}`{of_key}: {spec.dtype}, {shape}"


def _in_words(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        choices = (choice for choice in schema["anyOf"] if choice.get("type") != "null")
        return " or ".join(map(_in_words, choices))
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    inner = schema.get("items") or schema.get("additionalProperties")
    if inner:
        return f"{schema['type']}, each {_in_words(inner)}"
    limits = (f"{_LIMITS[key]} {schema[key]}" for key in _LIMITS if key in schema)
    return ", ".join(filter(None, [schema["type"], " ".join(limits)]))


def _summary(message: type[Message]) -> str:
    return (message.__doc__ or "").partition("\n")[0]


def _plain(carries: str) -> str:
    """Return the text of a disclosure, with facts of a run by name."""
    return _PLACE.sub(lambda match: f"*{match[1].replace('_', ' ')}*", carries)


def main() -> None:
    """Write all pages."""
    PAGE.write_text(page(), encoding="utf-8")
    for path in TABLES:
        path.write_text(with_table(path), encoding="utf-8")


if __name__ == "__main__":
    main()
