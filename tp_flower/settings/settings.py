"""The settings of a run: Flower's run config, checked once and frozen.

A key of the run config is a field with dashes for underscores; those of
:class:`PrivacySettings` have the prefix ``privacy.``.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tp_flower.errors import SettingsError
from tp_flower.features.choice import KEY_PREFIX, Entry, entry_of_key, merge_entries
from tp_flower.settings.conflicts import conflicts
from tp_flower.settings.declare import store_floats, value_problems
from tp_flower.settings.privacy import PRIVACY_SETTINGS, PrivacySettings
from tp_flower.settings.values import KEYS, PLAIN_SETTINGS, SettingValues


@dataclass(frozen=True)
class Settings(SettingValues):
    """What to train, on what, and how; every value checked on construction.

    0, "" or "auto" stand for "chosen by the program" where `docs/reference/settings.md`
    says so. An int is accepted for a float, a bool is never a number. In Python,
    `hidden_sizes` is a tuple of widths, `models` one of (table alias, model) pairs and
    `encoders` one of (table alias, column, encoder); in the run config they are strings
    ("16,8", "flights=mlp, planes=linear", "flights.month=cyclic(12)"). The run config
    may also have keys `encode.<table>.<column>`, which are the same as entries of
    `encoders`.

    Raises:
        SettingsError: a value has the wrong type, is outside its allowed set or
            contradicts another one. The message lists all such problems.

    >>> Settings(strategy="sgd").epochs
    10
    >>> Settings.from_run_config({"hidden-sizes": "32,8"}).hidden_sizes
    (32, 8)
    """

    def __post_init__(self) -> None:
        """Check all values, then store numbers given as int for a float as floats."""
        if problems := _find_problems(vars(self)):
            raise _settings_error(problems)
        store_floats(self)

    @classmethod
    def from_run_config(cls, config: Mapping[str, object]) -> Self:
        """Read the settings from a run config; a missing key takes its default.

        Raises:
            SettingsError: a key is unknown (the message gives close matches and the
                valid keys) or a value is refused; all problems are listed at once.
        """
        values, problems = _parse_config(config)
        problems += _find_problems(values)
        if problems:
            raise _settings_error(problems)
        return cls(**values)

    def with_fields(self, **fields: object) -> Self:
        """Return the settings with some fields replaced, all checked again.

        Raises:
            SettingsError: a field is unknown or its value is refused.
        """
        names = {entry.name for entry in dataclasses.fields(self)}
        unknown = [
            _unknown(name.replace("_", "-")) for name in fields if name not in names
        ]
        if unknown:
            raise _settings_error(unknown)
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, object]:
        """Return the settings under their run-config keys, as that file writes them.

        `Settings.from_run_config(settings.to_dict()) == settings`.
        """
        values = {
            item.key: item.render(getattr(self, item.field)) for item in PLAIN_SETTINGS
        }
        return values | self.privacy.to_dict()


def _parse_config(
    config: Mapping[str, object],
) -> tuple[dict[str, Any], list[str]]:
    """Return the values by field, those of key groups put together, and problems."""
    plain = {item.key: item for item in PLAIN_SETTINGS}
    private_keys = {item.key for item in PRIVACY_SETTINGS}
    values: dict[str, Any] = {}
    encoders: list[Entry] = []
    problems: list[str] = []
    for key, value in config.items():
        try:
            if key in plain:
                values[plain[key].field] = plain[key].parse(value)
            elif key.startswith(KEY_PREFIX):
                encoders.append(entry_of_key(key, value))
            elif key not in private_keys:
                problems.append(_unknown(key))
        except ValueError as error:
            problems.append(f"{key}: {error}")
    listed = values.get("encoders", ())
    if encoders and isinstance(listed, tuple):
        values["encoders"] = merge_entries(listed, encoders)
    private = {key: config[key] for key in config if key in private_keys}
    values["privacy"], private_problems = PrivacySettings.parsed(private)
    return values, problems + private_problems


def _find_problems(values: Mapping[str, Any]) -> list[str]:
    """Return all that is wrong with values by field; fields may be missing."""
    wrong = value_problems(PLAIN_SETTINGS, values)
    privacy = values.get("privacy", PrivacySettings())
    if not isinstance(privacy, PrivacySettings):
        wrong["privacy"] = f"{privacy!r} is not a PrivacySettings"
    problems = [f"{name.replace('_', '-')}: {text}" for name, text in wrong.items()]
    # conflicts are judged only among values that are fine alone
    fine = {name: value for name, value in values.items() if name not in wrong}
    return problems + conflicts(SettingValues(**fine))


def _settings_error(problems: list[str]) -> SettingsError:
    head = "1 setting is" if len(problems) == 1 else f"{len(problems)} settings are"
    return SettingsError(f"{head} not usable:\n  - " + "\n  - ".join(problems))


def _unknown(key: object) -> str:
    close = difflib.get_close_matches(str(key), KEYS, n=3)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"{key}: unknown setting.{hint} Valid settings: {', '.join(KEYS)}."
