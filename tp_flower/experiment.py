"""The settings of a run: Flower's run config, checked once and frozen.

Keys and defaults are documented in `pyproject.toml` under `[tool.flwr.app.config]`.
A key there is a field here with dashes for underscores; a test keeps both equal.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from tp_flower.encoding.choice import (
    KEY_PREFIX,
    Entry,
    entries_problem,
    entry_of_key,
    merge_entries,
    parse_entries,
    render_entries,
)
from tp_flower.errors import SettingsError
from tp_flower.joins.mapping import MAX_JOINED_ROWS
from tp_flower.joins.row_weights import JOINED, weight_problem
from tp_flower.methods import METHODS, Method
from tp_flower.personal_settings import graph_problem, personal_problem
from tp_flower.privacy.settings import PRIVACY_KEYS, PrivacySettings
from tp_flower.run_modes import (
    SERVER,
    STOP,
    TRAIN,
    model_name_problem,
    row_key_problem,
    track_problem,
)
from tp_flower.setting_checks import has_type, plain_problem, store_floats
from tp_flower.setting_relations import relation_problems
from tp_flower.setting_values import CHOICES, RANGES

BUILT_IN_MODELS = ("linear", "mlp")

_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_MODEL_FORMS = '"linear", "mlp" or "package.module:factory"'


@dataclass(frozen=True)
class Settings:
    """What to train, on what, and how; every value checked on construction.

    0, "" or "auto" stand for "chosen by the program" where `pyproject.toml` says so.
    An int is accepted for a float, a bool is never a number. In Python, `hidden_sizes`
    is a tuple of widths, `models` one of (table alias, model) pairs and `encoders` one
    of (table alias, column, encoder); in the run config they are strings ("16,8",
    "flights=mlp, planes=linear", "flights.month=cyclic(12)"). The run config may also
    have keys `encode.<table>.<column>`, which are the same as entries of `encoders`.

    Raises:
        SettingsError: a value has the wrong type, is outside its allowed set or does
            not fit another one. The message lists all such problems.

    >>> Settings(strategy="sgd").epochs
    10
    >>> Settings.from_run_config({"hidden-sizes": "32,8"}).hidden_sizes
    (32, 8)
    """

    sql: str = ""
    task: str = "auto"
    tables: str = ""
    strategy: str = "admm"
    mode: str = TRAIN
    resume: str = ""
    model_name: str = "default"
    row_key: str = ""
    predictions_at: str = SERVER
    num_epochs: int = 0
    model: str = "linear"
    models: tuple[tuple[str, str], ...] = ()
    hidden_sizes: tuple[int, ...] = (16,)
    l2: float = 1e-4
    loss: str = "auto"
    admm_form: str = "sharing"
    rho: float = 0.0
    over_relaxation: float = 0.0
    anderson_memory: int = 5
    lou: str = "auto"
    inner_rounds: int = 1
    local_epochs: int = 0
    tolerance: float = 0.0
    batch_size: int = 0
    learning_rate: float = 0.0
    momentum: float = 0.9
    decay: float = 1.0
    staleness: int = 0
    test_fraction: float = 0.2
    row_weight: str = JOINED
    coreset_size: int = 0
    coreset_kind: str = "importance"
    coreset_solver: str = "auto"
    clusters: int = 10
    l1: float = 0.0
    seed: int = 0
    device: str = "auto"
    site_timeout: float = 600.0
    on_missing: str = STOP
    max_stale: int = 3
    min_sites: int = 0
    wait_seconds: float = 60.0
    max_categories: int = 256
    encoders: tuple[Entry, ...] = ()
    max_joined_rows: int = MAX_JOINED_ROWS
    output_dir: str = ""
    progress: bool = True
    track: str = ""
    personal: str = "*"
    graph: str = "models"
    graph_penalty: float = 0.01
    graph_norm: str = "2"
    graph_weights: str = "equal"
    graph_neighbours: int = 5
    graph_epsilon: float = 0.0
    update_penalty: float = 0.0
    update_clusters: int = 0
    baselines: bool = True
    privacy: PrivacySettings = field(default_factory=PrivacySettings)

    def __post_init__(self) -> None:
        """Check all values, then store numbers given as int for a float as floats."""
        values = {_key(f.name): getattr(self, f.name) for f in _fields()}
        problems = _find_problems(values)
        if problems:
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
        fields: dict[str, Any] = {_field_name(key): values[key] for key in values}
        return cls(**fields)

    def with_fields(self, **fields: object) -> Self:
        """Return the settings with some fields replaced, all checked again.

        Raises:
            SettingsError: a field is unknown or its value is refused.
        """
        own = {field.name for field in _fields()}
        unknown = [_unknown(_key(name)) for name in fields if name not in own]
        if unknown:
            raise _settings_error(unknown)
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]

    @property
    def epochs(self) -> int:
        """The number of epochs, with 0 resolved to the strategy's default."""
        return self.num_epochs or self.method.epochs

    @property
    def method(self) -> Method:
        """What the strategy has in common with others."""
        return METHODS[self.strategy]

    @property
    def family(self) -> str:
        """Whose messages the strategy uses: "admm", "sgd" or "personal"."""
        return self.method.family

    @property
    def coreset_rows(self) -> int:
        """The joined rows that are drawn to train on; 0 where all are trained on."""
        return self.coreset_size or self.method.coreset_size

    def model_of(self, table: str) -> str:
        """Return the model of one table, named by its alias in the query."""
        # identifiers are compared as DuckDB does: without case
        named = {alias.lower(): model for alias, model in self.models}
        return named.get(table.lower(), self.model)

    def to_dict(self) -> dict[str, object]:
        """Return the settings under their run-config keys, as that file writes them.

        `Settings.from_run_config(settings.to_dict()) == settings`.
        """
        values = {_key(f.name): getattr(self, f.name) for f in _fields()}
        values["hidden-sizes"] = ",".join(map(str, self.hidden_sizes))
        values["models"] = ", ".join(f"{alias}={name}" for alias, name in self.models)
        values["encoders"] = render_entries(self.encoders)
        del values["privacy"]
        return values | self.privacy.to_dict()


def _fields() -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(Settings)


def _key(field_name: str) -> str:
    return field_name.replace("_", "-")


def _field_name(key: str) -> str:
    return key.replace("-", "_")


KEYS: tuple[str, ...] = (
    *(_key(field.name) for field in _fields() if field.name != "privacy"),
    *PRIVACY_KEYS,
)
_TYPES: Mapping[str, object] = {_key(field.name): field.type for field in _fields()}


def _settings_error(problems: list[str]) -> SettingsError:
    head = "1 setting is" if len(problems) == 1 else f"{len(problems)} settings are"
    return SettingsError(f"{head} not usable:\n  - " + "\n  - ".join(problems))


def _unknown(key: object) -> str:
    close = difflib.get_close_matches(str(key), KEYS, n=3)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"{key}: unknown setting.{hint} Valid settings: {', '.join(KEYS)}."


# --- parsing: what the run config can only say as a string ---------------------


def _parse_config(
    config: Mapping[str, object],
) -> tuple[dict[str, object], list[str]]:
    """Return the values by key, with the groups of keys put together, and problems."""
    values: dict[str, object] = {}
    keyed: list[Entry] = []
    private: dict[str, object] = {}
    problems: list[str] = []
    for key, value in config.items():
        try:
            if key in PRIVACY_KEYS:
                private[key] = value
            elif key in KEYS:
                values[key] = _PARSERS.get(key, _unchanged)(value)
            elif key.startswith(KEY_PREFIX):
                keyed.append(entry_of_key(key, value))
            else:
                problems.append(_unknown(key))
        except ValueError as error:
            problems.append(f"{key}: {error}")
    listed = values.get("encoders", ())
    if keyed and isinstance(listed, tuple):
        values["encoders"] = merge_entries(listed, keyed)
    values["privacy"], found = PrivacySettings.parsed(private)
    return values, problems + found


def _unchanged(value: object) -> object:
    return value


def _parse_hidden_sizes(value: object) -> object:
    """Parse "16,8"; a lone int is taken too, since `-c hidden-sizes=16` sends one."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if not isinstance(value, str):
        return value
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        message = f'{value!r} is not a comma-separated list of widths such as "16,8"'
        raise ValueError(message) from None


def _parse_models(value: object) -> object:
    """Parse "flights=mlp, planes=linear"; "" is no pair."""
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",") if part.strip()]
    if any(not (alias.strip() and model.strip()) for alias, _, model in pairs):
        message = f'{value!r} is not a list such as "flights=mlp, planes=linear"'
        raise ValueError(message)
    return tuple((alias.strip(), model.strip()) for alias, _, model in pairs)


def _parse_encoders(value: object) -> object:
    """Parse "flights.month=cyclic(12); planes.model=one-hot(20)"."""
    return parse_entries(value) if isinstance(value, str) else value


_PARSERS: Mapping[str, Callable[[object], object]] = {
    "encoders": _parse_encoders,
    "hidden-sizes": _parse_hidden_sizes,
    "models": _parse_models,
}


# --- checks: each returns the problems it sees ---------------------------------


def _find_problems(values: Mapping[str, object]) -> list[str]:
    """Return all that is wrong with values by key; keys may be missing."""
    problems = {key: _value_problem(key, values[key]) for key in values}
    found = [f"{key}: {text}" for key, text in problems.items() if text]
    # relations between settings are judged only among values that are fine alone
    fine = {key: values[key] for key, text in problems.items() if not text}
    return found + relation_problems(fine)


def _value_problem(key: str, value: object) -> str | None:
    if key == "hidden-sizes":
        return _hidden_sizes_problem(value)
    if key == "models":
        return _models_problem(value)
    if key == "encoders":
        return entries_problem(value)
    if key == "privacy":
        is_fine = isinstance(value, PrivacySettings)
        return None if is_fine else f"{value!r} is not a PrivacySettings"
    if isinstance(value, str) and key in _TEXT_PROBLEMS:
        return _TEXT_PROBLEMS[key](value)
    return plain_problem(value, _TYPES[key], CHOICES.get(key), RANGES.get(key))


def _hidden_sizes_problem(value: object) -> str | None:
    widths = value if isinstance(value, tuple) else ()
    if not widths or not all(has_type(width, int) and width > 0 for width in widths):
        return f"{value!r} is not a list of widths of at least 1"
    return None


def _models_problem(value: object) -> str | None:
    if not isinstance(value, tuple) or any(len(pair) != 2 for pair in value):
        return f"{value!r} is not a list of table=model pairs"
    aliases = [alias.lower() for alias, _ in value]
    twice = sorted({alias for alias in aliases if aliases.count(alias) > 1})
    if twice:
        return f"names {', '.join(twice)} more than once"
    wrong = [_model_problem(model) for _, model in value]
    return next((problem for problem in wrong if problem), None)


def _model_problem(model: object) -> str | None:
    known = model in BUILT_IN_MODELS
    if known or (isinstance(model, str) and _FACTORY.fullmatch(model)):
        return None
    return f"{model!r} is not a model: it must be {_MODEL_FORMS}"


_TEXT_PROBLEMS: Mapping[str, Callable[[str], str | None]] = {
    "model": _model_problem,
    "graph": graph_problem,
    "model-name": model_name_problem,
    "personal": personal_problem,
    "row-key": row_key_problem,
    "row-weight": weight_problem,
    "track": track_problem,
}
