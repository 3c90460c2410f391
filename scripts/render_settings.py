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
from collections.abc import Iterator
from pathlib import Path
from typing import Final

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
        parts += [f"{_comment(_title(group))}\n", *_config_lines(group), ""]
    private = _comment(_title(PrivacySettings))
    parts += [private, PRIVACY_TABLE, *_config_lines(PrivacySettings)]
    return "\n".join(parts) + "\n"


def replace_config(pyproject: str) -> str:
    """Return the text of pyproject.toml with its settings replaced by the declared."""
    head, _, rest = pyproject.partition(f"{TABLE}\n")
    _, _, tail = rest.partition(END)
    return head + render_config() + END + tail


def render_reference() -> str:
    """Return the reference page, in Markdown."""
    return "\n".join([HEAD, *map(_section, [*GROUPS, PrivacySettings])])


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


def _section(group: type) -> str:
    lines = [f"## {_title(group).rstrip('.')}", ""]
    lines += ["| setting | default | allowed | read by | |", "|---|---|---|---|---|"]
    for setting in declared(group):
        allowed = "true, false" if setting.type is bool else setting.allowed
        cells = (
            f"`{setting.key}`",
            f"`{_default(setting)}`",
            "any" if allowed is None else str(allowed),
            readers_of(setting),
            setting.doc,
        )
        # a cell shows what stands in backticks unchanged
        escaped = (
            re.sub(r"`[^`]*`|([<*|])", lambda m: f"\\{m[1]}" if m[1] else m[0], cell)
            for cell in cells
        )
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rewrite both files."""
    text = PYPROJECT.read_text(encoding="utf-8")
    PYPROJECT.write_text(replace_config(text), encoding="utf-8")
    REFERENCE.write_text(render_reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
