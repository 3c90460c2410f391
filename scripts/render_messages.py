"""Write the pages that follow from the messages' declarations.

    python scripts/render_messages.py

Changes docs/reference/messages.md, and the tables of PRIVACY.md and ARCHITECTURE.md
between their markers.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_args, get_origin

import msgspec

from client_apps.app import ANSWERS
from tp_flower.protocol.fields import Body, Discloses, Message, layout_of
from tp_flower.protocol.messages import EXCHANGES
from tp_flower.protocol.packet import Action

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
        f"| `{action}` | {disclosure.reader or message.reader} "
        f"| {_plain(disclosure.carries)} | {disclosure.covered_by} "
        f"| {', '.join(disclosure.kinds)} | {disclosure.policy} |"
        for action, message, disclosure in _disclosures()
    ]
    head = "| message | to | tells | covered by | in the ledger | policy |"
    return "\n".join([head, "|---|---|---|---|---|---|", *rows])


def message_table() -> str:
    """Return the table of ARCHITECTURE.md: each message, and where it is answered."""
    rows = []
    for action, exchange in EXCHANGES.items():
        request, reply = map(_summary, exchange)
        module = ANSWERS[action].partition(":")[0].replace(".", "/")
        rows.append(f"| `{action}` | {request} | {reply} | `{module}.py` |")
    head = "| message | request | reply | at the site, in `client_apps/` |"
    return "\n".join([head, "|---|---|---|---|", *rows])


def with_table(path: Path) -> str:
    """Return the text of a page with its table rendered anew."""
    before, _, rest = path.read_text(encoding="utf-8").partition(START)
    table = privacy_table() if path.name == "PRIVACY.md" else message_table()
    return f"{before}{START}\n{table}\n{END}{rest.partition(END)[2]}"


def _disclosures() -> Iterator[tuple[Action, type[Message], Discloses]]:
    for action, exchange in EXCHANGES.items():
        for message in exchange:
            for disclosure in message.discloses:
                yield action, message, disclosure


def _section(message: type[Message]) -> str:
    layout = layout_of(message)
    lines = [f"### {message.__name__}\n", _summary(message), ""]
    lines += _fields(message, "")
    if layout.part is not None:
        lines += _fields(layout.part, "of each part: ")
    for disclosure in message.discloses:
        reader = disclosure.reader or message.reader
        lines.append(f"- tells the {reader}: {_plain(disclosure.carries)}")
    return "\n".join([*lines, ""])


def _fields(body: type[Body], prefix: str) -> list[str]:
    layout = layout_of(body)
    lines = []
    for field in msgspec.structs.fields(body):
        name, choices = field.encode_name, (field.type, *get_args(field.type))
        structure = next((c for c in choices if _is_structure(c)), None)
        if name in layout.values and structure:
            each = "each " if get_origin(field.type) is list else ""
            lines += _fields(structure, f"{prefix}{each}`{name}`: ")
        elif name in layout.values:
            lines.append(f"- {prefix}`{name}`: {_allowed(field.type)}")
    for name, (_, spec) in {**layout.arrays, **layout.families}.items():
        shape = " x ".join(map(str, spec.shape)) or "a number"
        of_key = " by key" if name in layout.families else ""
        lines.append(f"- {prefix}`{name}`{of_key}: {spec.dtype}, {shape}")
    return lines


def _is_structure(choice: Any) -> bool:
    return isinstance(choice, type) and issubclass(choice, Body)


def _allowed(hint: Any) -> str:
    """Return which values a field may have, from its JSON schema."""
    (schema,), definitions = msgspec.json.schema_components([hint])
    return _in_words({**schema, **next(iter(definitions.values()), {})})


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
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    for path in TABLES:
        path.write_text(with_table(path), encoding="utf-8")


if __name__ == "__main__":
    main()
