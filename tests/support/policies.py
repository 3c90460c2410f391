"""Policies of tables in tests that are about one of their rules."""

import tomllib
from collections.abc import Iterable

from tests.support.files import toml_lines

OPEN = 'policy = "open"\n'
_EACH = ("columns", "labels", "filters", "keys")


def lenient(columns: Iterable[str], rules: str = "") -> str:
    """Return a policy of these rules, which allows what they do not mention.

    Columns in a list are those of ``columns`` where the rules have them, else all.
    """
    written = tomllib.loads(rules)
    hidden = {name.lower() for name in written.get("join-only", ())}
    listed = written.get("columns", list(columns))
    allowed = [name for name in listed if name.lower() not in hidden]
    defaults = {
        **dict.fromkeys(_EACH, allowed),
        "expressions": True,
        "min-rows": 1,
        "min-count": 1,
        "scores-per-rank": "any",
        "cover": 0,
        "queries-per-day": 10**6,
        "models": ["linear", "mlp", "trees", "centres"],
    }
    if "epsilon" in written:
        defaults["epsilon-per-run"] = written["epsilon"]
    missing = {key: defaults[key] for key in defaults if key not in written}
    return toml_lines(missing) + rules
