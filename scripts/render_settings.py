"""Write the settings, as they are declared, into pyproject.toml and the reference page.

    python scripts/render_settings.py

Settings are declared in `tp_flower/settings`. The block `[tool.flwr.app.config]` of
`pyproject.toml` and the page `docs/reference/settings.md` are made from there; a test
compares both with what this script would write.
"""

import inspect
import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tp_flower.methods import METHODS
from tp_flower.settings import GROUPS, PrivacySettings
from tp_flower.settings.declare import Setting, declared

ROOT: Final = Path(__file__).resolve().parents[1]
PYPROJECT: Final = ROOT / "pyproject.toml"
REFERENCE: Final = ROOT / "docs" / "reference" / "settings.md"

TABLE: Final = "[tool.flwr.app.config]"
PRIVACY_TABLE: Final = "[tool.flwr.app.config.privacy]"
END: Final = "\n# --- tools"
"""The line of pyproject.toml that follows the settings."""

WIDTH: Final = 127
"""Of a comment in pyproject.toml."""

HEAD: Final = """\
# Settings

Every key of the run config with its default, the values it may have, and the
strategies that read it; written by `scripts/render_settings.py`. Set them with

    flwr run . --stream -c 'strategy="sgd" seed=7'      # no spaces around =
    flwr run . --stream -c /abs/my-run.toml             # one file, same keys

`0`, `""` or `"auto"` stands for "chosen by the program" where the text says so; the
report says what was chosen. An encoder may also be set by a key of its own,
`encode.<table>.<column> = "cyclic(12)"`.
"""


def render_config() -> str:
    """Return the block of pyproject.toml with all settings, comments included."""
    parts = [TABLE]
    for group in GROUPS:
        parts.append(f"{_comment(_title(group))}\n")
        parts.extend(map(_config_lines, declared(group)))
        parts.append("")
    parts.extend([_comment(_title(PrivacySettings)), PRIVACY_TABLE])
    parts.extend(map(_config_lines, declared(PrivacySettings)))
    return "\n".join(parts) + "\n"


def replace_config(pyproject: str) -> str:
    """Return the text of pyproject.toml with its settings replaced by the declared."""
    head, _, rest = pyproject.partition(f"{TABLE}\n")
    _, _, tail = rest.partition(END)
    return head + render_config() + END + tail


def render_reference() -> str:
    """Return the reference page, in Markdown."""
    sections = [_section(_title(group), declared(group)) for group in GROUPS]
    private = declared(PrivacySettings)
    return "\n".join([HEAD, *sections, _section(_title(PrivacySettings), private)])


def toml_value(value: object) -> str:
    """Return a value as TOML writes it.

    >>> toml_value("sgd"), toml_value(True), toml_value(1e-4), toml_value(3)
    ('"sgd"', 'true', '0.0001', '3')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def readers_of(setting: Setting) -> str:
    """Return who reads a setting, in words.

    >>> readers_of(declared(PrivacySettings)[0])
    'all'
    """
    readers, parts = setting.readers, []
    others = [name for name in METHODS if name not in readers.strategies]
    if readers.strategies and len(others) < len(readers.strategies):
        parts.append("all but " + ", ".join(others))
    elif readers.strategies:
        parts.append(", ".join(readers.strategies))
    if readers.modes:
        parts.append("mode " + ", ".join(readers.modes))
    if readers.switch:
        parts.append(f"where `{PrivacySettings.prefix}{readers.switch}` is set")
    return "; ".join(parts) or "all"


def _title(group: type) -> str:
    return (inspect.getdoc(group) or "").splitlines()[0]


def _comment(text: str) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent="# ",
        subsequent_indent="# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _config_lines(setting: Setting) -> str:
    key = setting.key.removeprefix(PrivacySettings.prefix)
    return f"{_comment(setting.doc)}\n{key} = {toml_value(_default(setting))}"


def _default(setting: Setting) -> Any:
    return setting.render(setting.default)


def _section(title: str, settings: Sequence[Setting]) -> str:
    lines = [f"## {title.rstrip('.')}", ""]
    lines += ["| setting | default | allowed | read by | |", "|---|---|---|---|---|"]
    for setting in settings:
        allowed = "true, false" if setting.type is bool else setting.allowed
        cells = (
            f"`{setting.key}`",
            f"`{toml_value(_default(setting))}`",
            "any" if allowed is None else str(allowed),
            readers_of(setting),
            setting.doc,
        )
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    # what stands in backticks is shown unchanged
    return re.sub(r"`[^`]*`|([<*|])", lambda m: f"\\{m[1]}" if m[1] else m[0], text)


def main() -> None:
    """Rewrite both files."""
    text = PYPROJECT.read_text(encoding="utf-8")
    PYPROJECT.write_text(replace_config(text), encoding="utf-8")
    REFERENCE.parent.mkdir(parents=True, exist_ok=True)
    REFERENCE.write_text(render_reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
