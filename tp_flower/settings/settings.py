"""The settings of a run: Flower's run config, checked once and frozen.

A key of the run config is a field with dashes for underscores; those of
:class:`PrivacySettings` have the prefix ``privacy.``.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from tp_flower.errors import SettingsError
from tp_flower.features.choice import KEY_PREFIX, Entry, entry_of_key, merge_entries
from tp_flower.methods import (
    ADMM,
    BY_DATA,
    BY_FEATURES,
    CORESET,
    METHODS,
    NOISY_STATISTICS,
    PERSONAL,
    SGD,
    Method,
)
from tp_flower.settings.declare import (
    Check,
    declared,
    failed,
    parse_values,
    render_values,
    store_floats,
    value_problems,
)
from tp_flower.settings.privacy import PRIVACY_SETTINGS, PrivacySettings
from tp_flower.settings.run import (
    ABSENCES,
    AUTO,
    CLASSIFICATION,
    EXPLAIN,
    JOINED,
    REGRESSION,
    STALE,
    TRAIN,
    DataSettings,
    RunSettings,
    SiteSettings,
)
from tp_flower.settings.training import (
    EXACT,
    GRAM,
    IMPORTANCE,
    LAST,
    LINEAR,
    LOGISTIC,
    MLP,
    SAGA,
    SOFTMAX,
    SQUARED,
    UNIFORM,
    AdmmSettings,
    CoresetSettings,
    ModelSettings,
    PersonalisedSettings,
    SgdSettings,
    named_coordinates,
)


@dataclass(frozen=True)
class SettingValues(
    DataSettings,
    RunSettings,
    SiteSettings,
    ModelSettings,
    AdmmSettings,
    SgdSettings,
    CoresetSettings,
    PersonalisedSettings,
):
    """Values of all settings, each of which is allowed by itself."""

    privacy: PrivacySettings = field(default_factory=PrivacySettings)

    @property
    def method(self) -> Method:
        """The method that the strategy names."""
        return METHODS[self.strategy]

    @property
    def family(self) -> str:
        """Whose messages the strategy uses: "admm", "sgd", "coreset" or "personal"."""
        return self.method.family

    @property
    def epochs(self) -> int:
        """The number of epochs, with 0 resolved to the strategy's default."""
        return self.num_epochs or self.method.epochs

    @property
    def coreset_rows(self) -> int:
        """The joined rows that are drawn to train on; 0 where all are trained on."""
        return self.coreset_size or self.method.coreset_size

    @property
    def other_model(self) -> str:
        """The first model that is not linear; "" if all are."""
        models = (self.model, *(model for _, model in self.models))
        return next((model for model in models if model != LINEAR), "")

    def model_of(self, table: str) -> str:
        """Return the model of one table, named by its alias in the query."""
        # identifiers are compared as DuckDB does: without case
        models = {alias.lower(): model for alias, model in self.models}
        return models.get(table.lower(), self.model)


GROUPS: Final[tuple[type[Any], ...]] = SettingValues.__bases__
"""Groups whose keys have no prefix, in the order of the run config."""

PLAIN_SETTINGS: Final = tuple(item for group in GROUPS for item in declared(group))
"""Settings of these groups."""

SETTINGS: Final = (*PLAIN_SETTINGS, *PRIVACY_SETTINGS)
KEYS: Final = tuple(item.key for item in SETTINGS)
"""Keys of the run config, in its order."""

TASK_LOSSES: Final = {
    REGRESSION: (AUTO, SQUARED),
    CLASSIFICATION: (AUTO, LOGISTIC, SOFTMAX),
}


def conflicts(values: SettingValues) -> list[str]:
    """List the combinations of settings that contradict each other."""
    checks = (
        *_conflicts_of_models(values),
        *_conflicts_of_privacy(values),
        *_conflicts_of_coresets(values),
        *(_conflicts_of_personalised(values) if values.family == PERSONAL else ()),
        *_conflicts_of_modes(values),
    )
    return _unread(values) + failed(checks)


def _unread(values: SettingValues) -> list[str]:
    """Refuse settings that the strategy or the mode does not read.

    Those whose readers give no reason to refuse them are ignored.
    """
    strategy, mode = values.strategy, values.mode
    problems = []
    for item in PLAIN_SETTINGS:
        value, readers = getattr(values, item.field), item.readers
        is_read = value == item.default or readers.include(strategy, mode)
        if readers.refusal and not is_read:
            reason = readers.refusal.format(value=value, strategy=strategy, mode=mode)
            problems.append(f"{item.key}: {reason}")
    return problems


def _conflicts_of_models(values: SettingValues) -> tuple[Check, ...]:
    losses = TASK_LOSSES.get(values.task, ())
    solvers = (AUTO, *values.method.solvers)
    return (
        Check(
            losses and values.loss not in losses,
            f"loss: {values.loss!r} does not fit task {values.task!r}: use "
            f"{', '.join(losses)}",
        ),
        Check(
            values.lou == GRAM and values.family == ADMM and values.other_model,
            f"lou: 'gram' needs linear models, but {values.other_model!r} is set: "
            "use auto or consensus",
        ),
        Check(
            values.method.is_full_batch and values.batch_size,
            f"batch-size: {values.batch_size!r} does not go with strategy "
            f"{values.strategy!r}, whose one batch has all joined rows: leave it 0, or "
            "use sgd",
        ),
        Check(
            values.coreset_solver not in solvers,
            f"coreset-solver: {values.coreset_solver!r} does not go with strategy "
            f"{values.strategy!r}: use {', '.join(solvers)}",
        ),
        Check(
            values.l1 and values.coreset_solver == SAGA,
            f"l1: solver {SAGA!r} takes none: use {EXACT!r}, or leave it 0",
        ),
    )


def _conflicts_of_privacy(values: SettingValues) -> tuple[Check, ...]:
    privacy, strategy = values.privacy, values.strategy
    is_exact = privacy.features == NOISY_STATISTICS
    reason = (
        "is for comparisons without it: a row of a table is in many rows of its "
        f"messages. Use {values.family}"
    )
    if values.family == CORESET:
        reason = "sends the rows that it draws as they are. Use admm or sgd"
    by_importance = values.coreset_rows and values.coreset_kind == IMPORTANCE
    weighted = values.row_weight != JOINED
    return (
        *(
            Check(weighted, text)
            for text in weight_problems(values.row_weight, privacy)
        ),
        Check(
            is_exact and values.family != ADMM,
            "privacy.features: 'statistics' needs strategy 'admm': use dp-sgd",
        ),
        Check(
            is_exact and values.other_model,
            "privacy.features: 'statistics' needs linear models: use dp-sgd",
        ),
        *(
            Check(
                not values.method.sends_a_row_once,
                f"privacy.{kind}: strategy {strategy!r} {reason}",
            )
            for kind in privacy.covered("features", "predictions")
        ),
        *(
            Check(
                by_importance,
                f"coreset-kind: {IMPORTANCE!r} does not go with privacy.{kind}: which "
                "rows are drawn, and what they weigh, is computed from rows without "
                f"noise; use {UNIFORM!r}, which reads none",
            )
            for kind in privacy.covered("features", "predictions", "labels")
        ),
    )


def weight_problems(weight: str, privacy: PrivacySettings) -> list[str]:
    """List the mechanisms that do not go with weights of joined rows.

    Clips, noise and accounts are for rows that count as often as they are joined.
    """
    return [
        f"row-weight: {weight!r} does not go with privacy.{kind}, whose noise is for "
        "rows that count as often as they are joined: leave one of them out"
        for kind in privacy.covered("features", "predictions")
    ]


def _conflicts_of_coresets(values: SettingValues) -> tuple[Check, ...]:
    is_solved, strategy = values.family == CORESET, values.strategy
    return (
        Check(
            is_solved and values.other_model,
            f"model: {values.other_model!r} does not go with strategy "
            f"{strategy!r}, which has a model of its own: leave it 'linear'",
        ),
        Check(
            is_solved and values.num_epochs > 1,
            f"num-epochs: strategy {strategy!r} solves once, not {values.num_epochs} "
            "times: leave it 0",
        ),
        Check(
            is_solved and values.task == CLASSIFICATION,
            f"task: {CLASSIFICATION!r} does not go with strategy {strategy!r}: use "
            "admm or sgd, with a coreset-size",
        ),
    )


def _conflicts_of_personalised(values: SettingValues) -> tuple[Check, ...]:
    models = {model for _, model in values.models} or {values.model}
    return (
        Check(
            values.mode == EXPLAIN,
            f"mode: {EXPLAIN!r} is about joins, which strategy {values.strategy!r} has "
            "none of",
        ),
        *(
            Check(
                True,
                f"privacy.{kind}: strategy {values.strategy!r} goes without: labels "
                "and rows stay at the sites, and gradients and metrics leave as they "
                "are (graph-epsilon puts noise on the graph's summaries)",
            )
            for kind in values.privacy.covered("features", "labels", "predictions")
        ),
        Check(
            values.personal == LAST and models != {MLP},
            "personal: 'last' is the last layer of model 'mlp'",
        ),
        Check(
            named_coordinates(values.personal) and models != {LINEAR},
            "personal: a list of features needs model 'linear'",
        ),
        Check(
            values.update_clusters and not values.update_penalty,
            "update-clusters: is of encoded updates: set update-penalty above 0",
        ),
        Check(
            values.graph_epsilon and values.graph not in (BY_DATA, BY_FEATURES),
            f"graph-epsilon: noise is for the summaries of graph {BY_DATA!r} and "
            f"{BY_FEATURES!r}, not for {values.graph!r}",
        ),
    )


def _conflicts_of_modes(values: SettingValues) -> tuple[Check, ...]:
    mode, on_missing = values.mode, values.on_missing
    return (
        Check(
            on_missing not in ABSENCES[mode],
            f"on-missing: {on_missing!r} does not go with mode {mode!r}: use "
            f"{', '.join(ABSENCES[mode])}",
        ),
        Check(
            on_missing == STALE and values.family in (SGD, CORESET),
            f"on-missing: {STALE!r} needs the last scores of all rows, which strategy "
            f"{values.strategy!r} does not have at the server: use admm, or stop",
        ),
        Check(
            "@" in values.model_name and mode in (TRAIN, EXPLAIN),
            f"model-name: a version is of a model that was trained; mode {mode!r} "
            "takes a name alone, and makes the version",
        ),
    )


@dataclass(frozen=True)
class Settings(SettingValues):
    """The settings of a run; every value is checked on construction.

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
        """Return the settings with some fields replaced, all checked again."""
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
        return render_values(PLAIN_SETTINGS, self) | self.privacy.to_dict()


def _parse_config(
    config: Mapping[str, object],
) -> tuple[dict[str, Any], list[str]]:
    """Return the values by field, those of key groups put together, and problems."""
    keyed = [key for key in config if key.startswith(KEY_PREFIX)]
    problems = [_unknown(key) for key in config if key not in (*KEYS, *keyed)]
    values, unreadable = parse_values(PLAIN_SETTINGS, config)
    problems += unreadable
    encoders: list[Entry] = []
    for key in keyed:
        try:
            encoders.append(entry_of_key(key, config[key]))
        except ValueError as error:
            problems.append(f"{key}: {error}")
    listed = values.get("encoders", ())
    if encoders and isinstance(listed, tuple):
        values["encoders"] = merge_entries(listed, encoders)
    values["privacy"], private_problems = PrivacySettings.parsed(config)
    return values, problems + private_problems


def _find_problems(values: Mapping[str, Any]) -> list[str]:
    """Return all that is wrong with values by field; fields may be missing."""
    wrong = value_problems(PLAIN_SETTINGS, values)
    privacy = values.get("privacy", PrivacySettings())
    if not isinstance(privacy, PrivacySettings):
        wrong["privacy"] = f"privacy: {privacy!r} is not a PrivacySettings"
    # conflicts are judged only among values that are fine alone
    fine = {name: value for name, value in values.items() if name not in wrong}
    return [*wrong.values(), *conflicts(SettingValues(**fine))]


def _settings_error(problems: list[str]) -> SettingsError:
    head = "1 setting is" if len(problems) == 1 else f"{len(problems)} settings are"
    return SettingsError(f"{head} not usable:\n  - " + "\n  - ".join(problems))


def _unknown(key: object) -> str:
    close = difflib.get_close_matches(str(key), KEYS, n=3)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"{key}: unknown setting.{hint} Valid settings: {', '.join(KEYS)}."
