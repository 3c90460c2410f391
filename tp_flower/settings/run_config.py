"""The run config that a user writes: a TOML file, overrides of it, or keywords."""

import json
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Final

from tp_flower.errors import SettingsError
from tp_flower.settings.privacy import PrivacySettings
from tp_flower.settings.settings import Settings, all_settings

_KEYWORD_PREFIX: Final = PrivacySettings.prefix.replace(".", "-")


def read_run_config(
    file: Path | None, overrides: Sequence[str] = ()
) -> dict[str, object]:
    """Return the settings of a file with those of `key=value` texts, which win.

    The keys of a table have its name as prefix, "privacy.labels". A relative ``tables``
    of the file starts at its folder, one of a text at the working directory.
    """
    folder = Path.cwd()
    config = dict(map(read_override, overrides))
    if file is not None:
        folder = folder if "tables" in config else file.absolute().parent
        content = _read_toml(file)
        _refuse_tables_file(file, content)
        config = {**dict(_flatten(content)), **config}
    if isinstance(tables := config.get("tables"), str) and tables:
        config["tables"] = str(folder / Path(tables).expanduser())
    return config


def read_override(text: str) -> tuple[str, object]:
    """Return the key and the value of a text `key=value`, else raise SettingsError.

    The value is TOML; a bare word, and any value of a setting that is text, is a
    string.

    >>> read_override("l2=1e-3"), read_override("strategy=boost")
    (('l2', 0.001), ('strategy', 'boost'))
    >>> read_override("model-name=2026"), read_override('sql="SELECT 1"')
    (('model-name', '2026'), ('sql', 'SELECT 1'))
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (key and equals):
        raise SettingsError(
            f"--set {text!r}: write key=value, such as --set strategy=boost"
        )
    try:
        (parsed,) = tomllib.loads(f"value = {value}").values()
    except ValueError:
        return key, value
    types = {item.key: item.type for item in all_settings()}
    is_text = types.get(key) is str or not isinstance(parsed, bool | int | float)
    return key, value if is_text and not isinstance(parsed, str) else parsed


def config_of_keywords(keywords: Mapping[str, object]) -> dict[str, object]:
    """Return the run config of keyword arguments, whose names have underscores.

    Those of privacy begin with ``privacy_``. A list is a tuple, a path its text.

    >>> config_of_keywords({"num_epochs": 3, "privacy_label_epsilon": 2.0})
    {'num-epochs': 3, 'privacy.label-epsilon': 2.0}
    """
    config = {}
    for name, value in keywords.items():
        key = name.replace("_", "-")
        if key.startswith(_KEYWORD_PREFIX):
            key = PrivacySettings.prefix + key.removeprefix(_KEYWORD_PREFIX)
        config[key] = _config_value(value)
    return config


def _config_value(value: object) -> object:
    if isinstance(value, PathLike):
        return str(value)
    return tuple(value) if isinstance(value, list) else value


def changed_settings(values: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that differ from their defaults, or have none."""
    defaults = Settings().to_dict()
    return {
        k: value
        for k, value in values.items()
        if k not in defaults or defaults[k] != value
    }


def run_config_text(values: Mapping[str, object]) -> str:
    """Return a file of settings, for `tp-flower` and for Flower.

    >>> print(run_config_text({"l2": 0.1, "progress": False}), end="")
    l2 = 0.1
    progress = false
    """
    # JSON writes texts, numbers and booleans as TOML does
    lines = (
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n"
        for key, value in values.items()
    )
    return "".join(lines)


def _read_toml(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"the settings file {file} cannot be read: {error}"
        ) from error


def _refuse_tables_file(file: Path, content: Mapping[str, object]) -> None:
    """Refuse a tables file that is taken for a file of settings."""
    if isinstance(content.get("tables"), Mapping):
        name = json.dumps(str(file), ensure_ascii=False)
        raise SettingsError(
            f"{file} is a tables file, not a file of settings: write one with tables = "
            f"{name} and "
            'sql = "SELECT ...", or leave the file out and add --set tables='
            f"{shlex.quote(str(file))} --set 'sql=SELECT ...'"
        )


def _flatten(
    config: Mapping[str, object], prefix: str = ""
) -> Iterator[tuple[str, object]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
