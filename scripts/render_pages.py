"""Write the pages that follow from the declarations of settings and messages.

    python scripts/render_pages.py

Settings are declared in `tp_flower/settings`: the block `[tool.flwr.app.config]` of
pyproject.toml and docs/reference/settings.md are made from there. Messages are declared
in `tp_flower/protocol`: docs/reference/messages.md is made from there, and the table of
ARCHITECTURE.md between its markers. The outlines in CONTRIBUTING.md are those of the
toys among the tests. The last two tables of docs/reference/analyses.md are made from
the fields of a policy and the disclosures of messages. A test compares all of them with
what this script would write.
"""

import ast
import dataclasses
import inspect
import json
import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_args, get_origin

import msgspec

from client_apps.app import places
from tp_flower.methods.method import METHODS
from tp_flower.privacy.epsilons import KINDS
from tp_flower.protocol.cutoff_messages import (
    CutoffPairs,
    ShardKeys,
    ShardPartialAnswers,
)
from tp_flower.protocol.fields import PARTS, Body, Message, PartBody, layout_of
from tp_flower.protocol.messages import (
    ACTIONS,
    Action,
    Failure,
    ReplyEnvelope,
    RequestEnvelope,
)
from tp_flower.protocol.setup_messages import ShardStatistics
from tp_flower.settings import PrivacySettings, groups
from tp_flower.settings.declare import Setting, declared
from tp_flower.settings.rules import rules_of
from tp_flower.sources.policy import (
    BUDGETED,
    LEVELS,
    STRICT,
    UNBUDGETED,
    Policy,
    Releases,
)

ROOT: Final = Path(__file__).resolve().parents[1]

TABLE: Final = "[tool.flwr.app.config]"
PRIVACY_TABLE: Final = "[tool.flwr.app.config.privacy]"
TABLE_END: Final = "\n# --- tools"
"""The line of pyproject.toml that follows the settings."""

WIDTH: Final = 127
"""Of a comment in pyproject.toml."""

SETTINGS_HEAD: Final = """\
# Settings

Every key of the run config with its default, the values it may have, and the
strategies that read it; written by `scripts/render_pages.py`. Set them with

    # a file, and settings that win
    tp-flower train my-run.toml --set strategy=sgd --set seed=7
    # no spaces around =
    flwr run . --stream -c 'strategy="sgd" seed=7'
    flwr run . --stream -c /abs/my-run.toml                       # one file, same keys

`0`, `""` or `"auto"` stands for "chosen by the program" where the text says so; the
report says what was chosen. An encoder may also be set by a key of its own,
`encode.<table>.<column> = "cyclic(12)"`.
"""
START: Final = "<!-- messages: made by scripts/render_pages.py -->"
END: Final = "<!-- end of messages -->"
KEYWORDS_START: Final = "<!-- keywords: made by scripts/render_pages.py -->"
KEYWORDS_END: Final = "<!-- end of keywords -->"
KEYWORDS: Final = (
    *("strategy", "model", "loss", "task", "l2", "num-epochs", "seed", "encoders"),
    *("test-fraction", "test-split", "sample", "model-name", "standard-errors"),
    *("row-key", "importances", "metrics-by", "privacy.labels", "privacy.scores"),
)
"""The settings that the page of the Python API lists, as keyword arguments."""
ANALYSES: Final = "docs/reference/analyses.md"
LINES_START: Final = "<!-- lines of policies: made by scripts/render_pages.py -->"
LINES_END: Final = "<!-- end of lines of policies -->"
KINDS_START: Final = "<!-- kinds: made by scripts/render_pages.py -->"
KINDS_END: Final = "<!-- end of kinds -->"
OUTLINE_START: Final = "<!-- outline of {path}: made by scripts/render_pages.py -->"
OUTLINE_END: Final = "<!-- end of outline -->"
OUTLINES: Final = {
    "tests/runs/objectives/test_poisson.py": (
        "Poisson",
        "PoissonResponse",
        "monkeypatch.setitem(FAMILIES",
    ),
    "tests/runs/heads/test_product_head.py": ("Product", "monkeypatch.setitem(HEADS"),
    "tests/runs/methods/test_toy_method.py": (
        "TRAIN_TOY",
        "DECLARATION",
        "method.register",
        "SiteHalf()",
        "take_step",
        "site_registry.register",
        "ServerHalf()",
        "Toy()",
        "strategies.registry.register",
    ),
}
"""The names, and beginnings of statements, that an outline has of a file.

Of a class with () it has only the methods.
"""
MOST_WIDE: Final = 120
SHORT: Final = 84  # of a function, to be in a line
_LIMITS: Final = {
    "minimum": "from",
    "exclusiveMinimum": "above",
    "maximum": "to",
    "maxLength": "of length at most",
    "pattern": "of the form",
}
_PLACE: Final = re.compile(r"\{(\w+)\}")
MESSAGES_HEAD: Final = """# Messages

Every request that the server may send and every reply that a site may give, as
`tp_flower/protocol` declares them; `scripts/render_pages.py` writes this page. What
is not declared can be neither sent nor read. A name in the shape of an array is a size
that both ends know; `n/8` is a bit for each of n. At the end is
[who could gain by a lie](#who-could-gain-by-a-lie) in each field.
"""
LEAVES_HEAD: Final = """## What leaves

What reaches the server, from the declarations that both sides check; italics differ
from run to run. [Mechanisms](mechanisms.md#what-covers-what) says what covers what, a
[policy](policies.md) what may leave, and [PRIVACY.md](../../PRIVACY.md) what follows
from it.
"""
AUDIT: Final = ROOT / "tp_flower/protocol/audit.toml"
AUDIT_HEAD: Final = """## Who could gain by a lie

What a server that departs from the protocol could gain by a wrong value in each field
of its requests, if nothing were checked; or a site in a field of its replies, at the
server, at the table's other shards for what is sealed, and in the model. Then what the
receiver checks, besides the field's type and range; *as proposed*: the site compares it
with what follows from the run's proposal. The last column is what a liar gains in spite
of that: it is in PRIVACY.md, and nothing here prevents it. `tests/adversary/fields`
lies in every field of every request.
"""
AUDIT_COLUMNS: Final = (
    "| field | a lie would gain | the receiver checks | what remains |"
)
AUDIT_KEYS: Final = ("lie", "check", "inherent")
ENVELOPES: Final = (RequestEnvelope, ReplyEnvelope, Failure)
SEALED: Final = {
    Action.STATISTICS: (ShardStatistics,),
    Action.CUTOFFS: (CutoffPairs, ShardKeys),
    Action.PARTIALS: (ShardPartialAnswers,),
}
"""What sites tell each other in a message, sealed."""


def _actions() -> list[Action]:
    """Return the actions in the order of the audit's entries."""
    order = list(tomllib.loads(AUDIT.read_text(encoding="utf-8")))

    def position(action: Action) -> int:
        kinds = (k for m in action.messages for k in (m, layout_of(m).part) if k)
        names = [kind.__name__ for kind in kinds]
        positions = [order.index(name) for name in names if name in order]
        if not positions:
            raise LookupError(
                f"audit.toml has no entry of {action}: write [{names[0]}] with its "
                'fields (CONTRIBUTING.md, "Add a message")'
            )
        return min(positions)

    return sorted(ACTIONS.values(), key=position)


def render_pages() -> dict[str, str]:
    """Return the text of every page by its path, as it should be."""
    texts = {
        path: (ROOT / path).read_text(encoding="utf-8")
        for path in (
            *("pyproject.toml", "ARCHITECTURE.md", "CONTRIBUTING.md"),
            *("docs/reference/api.md", ANALYSES),
        )
    }
    return {
        "pyproject.toml": replace_config(texts["pyproject.toml"]),
        "docs/reference/settings.md": render_settings(),
        "docs/reference/messages.md": render_messages(),
        "ARCHITECTURE.md": _replace(
            texts["ARCHITECTURE.md"], START, END, message_table()
        ),
        "CONTRIBUTING.md": _replace_outlines(texts["CONTRIBUTING.md"]),
        "docs/reference/api.md": _replace(
            texts["docs/reference/api.md"],
            KEYWORDS_START,
            KEYWORDS_END,
            keyword_table(),
        ),
        ANALYSES: _replace(
            _replace(texts[ANALYSES], LINES_START, LINES_END, line_table()),
            KINDS_START,
            KINDS_END,
            kind_table(),
        ),
    }


def replace_config(pyproject: str) -> str:
    """Return the text of pyproject.toml with its settings replaced by the declared."""
    head, _, rest = pyproject.partition(f"{TABLE}\n")
    parts = [TABLE]
    for group in groups():
        parts += [f"{_comment(_title(group))}\n", *_config_lines(group), ""]
    private = _comment(_title(PrivacySettings))
    parts += [private, PRIVACY_TABLE, *_config_lines(PrivacySettings), ""]
    return head + "\n".join(parts) + TABLE_END + rest.partition(TABLE_END)[2]


def render_settings() -> str:
    """Return the reference page of the settings."""
    sections = map(_settings_section, [*groups(), PrivacySettings])
    return "\n".join([SETTINGS_HEAD, *sections])


def readers_of(setting: Setting) -> str:
    """Return who reads a setting, in words."""
    readers, parts = setting.readers, []
    if readers.of_methods:
        reading = [n for n, m in METHODS.items() if setting.field in rules_of(m).reads]
        others = [name for name in METHODS if name not in reading]
        is_by_most = len(others) < len(reading)
        parts.append(
            ", ".join(reading) if not is_by_most else f"all but {', '.join(others)}"
        )
    if readers.modes:
        parts.append("mode " + ", ".join(readers.modes))
    if readers.switches:
        keys = (f"`{PrivacySettings.prefix}{name}`" for name in readers.switches)
        parts.append(f"where {' or '.join(keys)} is set")
    return "; ".join(parts) or "all"


def _title(group: type) -> str:
    return (inspect.getdoc(group) or "").splitlines()[0]


def _comment(text: str) -> str:
    lines = textwrap.wrap(
        text, WIDTH - 2, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(f"# {line}" for line in lines)


def _config_lines(group: type) -> Iterator[str]:
    for setting in declared(group):
        key = setting.key.removeprefix(PrivacySettings.prefix)
        yield f"{_comment(setting.doc)}\n{key} = {_default(setting)}"


def _default(setting: Setting) -> str:
    """Return the default as TOML; JSON writes the same values alike."""
    return json.dumps(setting.render(setting.default), ensure_ascii=False)


def keyword_table() -> str:
    """Return the settings that most calls from Python use, as keyword arguments."""
    groups_of_settings = (*groups(), PrivacySettings)
    settings = {
        each.key: each for group in groups_of_settings for each in declared(group)
    }
    rows = []
    for key in KEYWORDS:
        name, default, allowed, _, doc = _setting_cells(settings[key])
        keyword = name.replace("-", "_").replace(".", "_")
        rows.append([keyword, default, allowed, doc])
    return _table("| keyword | default | allowed | |", rows)


def _settings_section(group: type) -> str:
    rows = [_setting_cells(setting) for setting in declared(group)]
    table = _table("| setting | default | allowed | read by | |", rows)
    return f"## {_title(group).rstrip('.')}\n\n{table}\n"


def _setting_cells(setting: Setting) -> list[str]:
    """Return a setting's name, default, allowed values, readers and text, for a row."""
    allowed = "true, false" if setting.type is bool else setting.allowed
    cells = (
        f"`{setting.key}`",
        f"`{_default(setting)}`",
        "any" if allowed is None else str(allowed),
        readers_of(setting),
        setting.doc,
    )
    # a cell shows what stands in backticks unchanged
    return [
        re.sub(r"`[^`]*`|([<*|])", lambda m: f"\\{m[1]}" if m[1] else m[0], cell)
        for cell in cells
    ]


def render_messages() -> str:
    """Return the reference page of the messages."""
    sections = [MESSAGES_HEAD, LEAVES_HEAD, f"{disclosure_table()}\n"]
    for action in _actions():
        sections.append(f"## `{action}`\n")
        sections += [_section(message) for message in action.messages]
    return "\n".join([*sections, AUDIT_HEAD, *_audit_tables()])


def audited() -> dict[str, list[type[Body]]]:
    """Return the audited structures, by the message that each is first in."""
    structures: dict[str, list[type[Body]]] = {"every message": []}
    listed: set[type[Body]] = set()

    def add(where: str, kind: type[Body]) -> None:
        if kind not in listed:
            listed.add(kind)
            structures.setdefault(where, []).append(kind)
            for field in msgspec.structs.fields(kind):
                for inner in _structures_in(field.type):
                    add(where, inner)

    for envelope in ENVELOPES:
        add("every message", envelope)
    for action in _actions():
        for message in (*action.messages, *SEALED.get(action, ())):
            add(f"`{action}`", message)
    return structures


def audited_fields(kind: type[Body]) -> list[str]:
    """Return the fields of a structure that say something themselves."""
    return [f.encode_name for f in msgspec.structs.fields(kind) if _is_own(f)]


def _is_own(field: msgspec.structs.FieldInfo) -> bool:
    # the parts of a message are structures of their own
    return field.name != PARTS or not any(
        issubclass(kind, PartBody) for kind in _structures_in(field.type)
    )


def _structures_in(hint: Any) -> Iterator[type[Body]]:
    if isinstance(hint, type) and issubclass(hint, Body):
        yield hint
    for argument in get_args(hint):
        yield from _structures_in(argument)


def _audit_tables() -> Iterator[str]:
    entries = tomllib.loads(AUDIT.read_text(encoding="utf-8"))
    for where, kinds in audited().items():
        rows = [
            (f"`{kind.__name__}` `{name}`", *(entry.get(key, "") for key in AUDIT_KEYS))
            for kind in kinds
            for name, entry in entries.get(kind.__name__, {}).items()
        ]
        if rows:
            yield f"### Lies in {where}\n\n{_table(AUDIT_COLUMNS, rows)}\n"


def disclosure_table() -> str:
    """Return the table of what each message discloses to the server."""
    rows = [
        (
            *(f"`{action}`", _plain(disclosure.carries), disclosure.covered_by),
            *(", ".join(disclosure.kinds), disclosure.policy),
        )
        for action in _actions()
        for message in action.messages
        for disclosure in message.discloses
        if (disclosure.reader or message.reader) == "server"
    ]
    return _table("| message | tells | covered by | in the ledger | policy |", rows)


def policy_lines() -> dict[str, tuple[str, str, str]]:
    """Return a policy's lines: what they may say, and their defaults.

    The first default is that of a written policy, the second of one with an epsilon.
    """
    lines = {}
    for field in dataclasses.fields(Policy):
        name = field.name.replace("_", "-")
        if name != "releases":
            default = json.dumps(STRICT.get(name, field.default))
            lines[name] = ("", default, default)
    for field in dataclasses.fields(Releases):
        levels = ", ".join(LEVELS.get(field.name, ()))
        plain, budgeted = (
            str(getattr(releases, field.name)) or "clear if labels are, else never"
            for releases in (UNBUDGETED, BUDGETED)
        )
        lines[f"releases.{field.name}"] = (levels or "a number", plain, budgeted)
    return lines


def line_table() -> str:
    """Return the table of a policy's lines and their defaults."""
    rows = ((f"`{name}`", *cells) for name, cells in policy_lines().items())
    return _table("| line | levels | absent | absent, with an `epsilon` |", rows)


def kind_table() -> str:
    """Return the table of the ledger's kinds: their subject, messages and lines."""
    messages: dict[str, list[str]] = {}
    rules: dict[str, list[str]] = {}
    lines = policy_lines()
    for action in _actions():
        for message in (*action.messages, *SEALED.get(action, ())):
            for disclosure in getattr(message, "discloses", ()):
                for kind in disclosure.kinds:
                    messages.setdefault(kind, []).append(f"`{action}`")
                    if rule := disclosure.policy:
                        line = f"releases.{rule}"
                        line = line if line in lines else rule
                        rules.setdefault(kind, []).append(f"`{line}`")
    rows = (
        (
            f"`{kind}`",
            subject,
            *(_distinct(by.get(kind, ())) for by in (messages, rules)),
        )
        for subject, kinds in KINDS.items()
        for kind in kinds
    )
    return _table("| kind | tells of | messages | lines |", rows)


def _distinct(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def message_table() -> str:
    """Return the table of ARCHITECTURE.md: each message, and where it is answered."""
    rows = []
    answered = places()
    for action in _actions():
        module = answered[action].partition(":")[0]
        module = module.removeprefix("client_apps.").replace(".", "/")
        rows.append((f"`{action}`", *map(_summary, action.messages), f"`{module}.py`"))
    return _table(
        "| message | request | reply | at the site, in `client_apps/` |", rows
    )


def _table(head: str, rows: Iterable[Iterable[object]]) -> str:
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(lines)


def _replace(text: str, start: str, end: str, block: str) -> str:
    """Return the text of a page with what is between two markers replaced."""
    before, _, rest = text.partition(start)
    return f"{before}{start}\n{block}\n{end}{rest.partition(end)[2]}"


def _replace_outlines(text: str) -> str:
    """Return the text of CONTRIBUTING.md with its outlines replaced."""
    for path, names in OUTLINES.items():
        start = OUTLINE_START.format(path=path)
        lines = [f"+{line}" for line in outline(ROOT / path, names)]
        block = "\n".join(["```text", *lines, "```"])
        text = _replace(text, start, OUTLINE_END, block)
    return text


def outline(path: Path, names: Iterable[str]) -> list[str]:
    """Return definitions and statements of a file, a line each, without long bodies."""
    source = path.read_text(encoding="utf-8")
    statements: dict[str, ast.stmt] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            statements[node.name] = node
        elif isinstance(node, ast.Expr | ast.Assign):
            statements[_one_line(source, node)] = node
    lines: list[str] = []
    for name in names:
        stem = name.removesuffix("()")
        matches = (key for key in statements if key.startswith(stem))
        key = stem if stem in statements else next(matches)
        kinds = (ast.FunctionDef,) if stem != name else (ast.FunctionDef, ast.Assign)
        lines += _outline_lines(source, statements[key], kinds)
    return lines


def _outline_lines(
    source: str, node: ast.stmt, kinds: tuple[type[ast.stmt], ...] = ()
) -> Iterator[str]:
    """Yield the lines of a statement; a class has its members of some kinds."""
    if isinstance(node, ast.ClassDef):
        members = [member for member in node.body if isinstance(member, kinds)]
        rest = "" if members else " ..."
        yield f"class {node.name}({', '.join(map(ast.unparse, node.bases))}):{rest}"
        for member in members:
            yield from (f"    {line}" for line in _outline_lines(source, member))
    elif isinstance(node, ast.FunctionDef):
        head = f"def {node.name}({ast.unparse(node.args)}):"
        body = _one_line(source, node.body[0])
        is_short = len(node.body) == 1 and len(head) + len(body) < SHORT
        yield f"{head} {body}" if is_short else f"{head} ..."
    else:
        text = _one_line(source, node)
        yield from textwrap.wrap(text, MOST_WIDE, subsequent_indent="    ")


def _one_line(source: str, node: ast.stmt) -> str:
    text = " ".join((ast.get_source_segment(source, node) or "").split())
    return text.replace("( ", "(").replace(", )", ")").replace(" )", ")")


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
    """Return the text of a disclosure, with its names in braces as italics."""
    return _PLACE.sub(lambda match: f"*{match[1].replace('_', ' ')}*", carries)


def main() -> None:
    """Write all pages."""
    for path, text in render_pages().items():
        (ROOT / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
