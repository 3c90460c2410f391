"""The settings of a run: Flower's run config, checked once and frozen.

A key of the run config is a field with dashes for underscores; those of
:class:`PrivacySettings` have the prefix ``privacy.``.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
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
from tp_flower.settings.declare import Setting, declared, store_floats, value_problems
from tp_flower.settings.personalised import (
    LAST,
    PersonalisedSettings,
    named_coordinates,
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
    SgdSettings,
)

GROUPS: Final = (
    DataSettings,
    RunSettings,
    SiteSettings,
    ModelSettings,
    AdmmSettings,
    SgdSettings,
    CoresetSettings,
    PersonalisedSettings,
)
"""Groups whose keys have no prefix, in the order of the run config."""

PLAIN_SETTINGS: Final[tuple[Setting, ...]] = tuple(
    item for group in GROUPS for item in declared(group)
)
"""Settings of these groups."""

SETTINGS: Final = (*PLAIN_SETTINGS, *PRIVACY_SETTINGS)
KEYS: Final = tuple(item.key for item in SETTINGS)
"""Keys of the run config, in its order."""


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

    def model_of(self, table: str) -> str:
        """Return the model of one table, named by its alias in the query."""
        # identifiers are compared as DuckDB does: without case
        models = {alias.lower(): model for alias, model in self.models}
        return models.get(table.lower(), self.model)


Problems = Iterator[str]

TASK_LOSSES: Final = {
    REGRESSION: (AUTO, SQUARED),
    CLASSIFICATION: (AUTO, LOGISTIC, SOFTMAX),
}


def conflicts(values: SettingValues) -> list[str]:
    """Return the combinations of settings that contradict each other."""
    return [problem for rule in RULES for problem in rule(values)]


def unread(values: SettingValues) -> Problems:
    """Refuse settings that the strategy or the mode does not read.

    Those whose readers give no reason to refuse them are ignored.
    """
    for item in PLAIN_SETTINGS:
        value, readers = getattr(values, item.field), item.readers
        if (
            readers.refusal
            and value != item.default
            and not readers.include(values.strategy, values.mode)
        ):
            reason = readers.refusal.format(
                value=value, strategy=values.strategy, mode=values.mode
            )
            yield f"{item.key}: {reason}"


def loss_of_another_task(values: SettingValues) -> Problems:
    """Refuse a loss that is not one of the task's."""
    losses = TASK_LOSSES.get(values.task)
    if losses and values.loss not in losses:
        yield (
            f"loss: {values.loss!r} does not fit task {values.task!r}: use "
            f"{', '.join(losses)}"
        )


def gram_of_other_models(values: SettingValues) -> Problems:
    """Refuse Gram matrices of models that are not linear."""
    if values.lou == GRAM and values.family == ADMM:
        for model in _other_models(values)[:1]:
            yield (
                f"lou: 'gram' needs linear models, but {model!r} is asked for: use "
                "auto or consensus"
            )


def full_batch(values: SettingValues) -> Problems:
    """Refuse a batch size where the one batch has all joined rows."""
    if values.method.is_full_batch and values.batch_size:
        yield (
            f"batch-size: {values.batch_size!r} does not go with strategy "
            f"{values.strategy!r}, whose one batch has all joined rows: leave it 0, or "
            "use sgd"
        )


def statistics_of_other_models(values: SettingValues) -> Problems:
    """Refuse noisy sufficient statistics except for linear models in ADMM."""
    if values.privacy.features != NOISY_STATISTICS:
        return
    if values.family != ADMM:
        yield "privacy.features: 'statistics' needs strategy 'admm': use dp-sgd"
    if _other_models(values):
        yield "privacy.features: 'statistics' needs linear models: use dp-sgd"


def weights_under_noise(values: SettingValues) -> Problems:
    """Refuse mechanisms on weighted rows."""
    if values.row_weight != JOINED:
        yield from weight_problems(values.row_weight, values.privacy)


def weight_problems(weight: str, privacy: PrivacySettings) -> list[str]:
    """Return why mechanisms do not go with weights of joined rows.

    Clips, noise and accounts are for rows that count as often as they are joined.

    Args:
        weight: what weighs the rows, for the message.
        privacy: of the run.
    """
    return [
        f"row-weight: {weight!r} does not go with privacy.{key}, whose noise is for "
        "rows that count as often as they are joined: leave one of them out"
        for key in covered(privacy, ("features", "predictions"))
    ]


def uncounted_noise(values: SettingValues) -> Problems:
    """Refuse mechanisms whose cost per row is not known for the method."""
    method = values.method
    if method.sends_a_row_once:
        return
    reason = (
        "is for comparisons without it: a row of a table is in many rows of its "
        f"messages. Use {method.family}"
    )
    if method.solvers:
        reason = "sends the rows that it draws as they are. Use admm or sgd"
    for key in covered(values.privacy, ("features", "predictions")):
        yield f"privacy.{key}: strategy {values.strategy!r} {reason}"


def importance_under_noise(values: SettingValues) -> Problems:
    """Refuse mechanisms that a sample by importance would make void.

    Which rows are drawn, and what they weigh, is computed from the rows in the clear.
    """
    if not values.coreset_rows or values.coreset_kind != IMPORTANCE:
        return
    for key in covered(values.privacy, ("features", "predictions", "labels")):
        yield (
            f"coreset-kind: {IMPORTANCE!r} does not go with privacy.{key}: which rows "
            "are drawn, and what they weigh, is computed from rows without noise; use "
            f"{UNIFORM!r}, which reads none"
        )


def solved_at_the_server(values: SettingValues) -> Problems:
    """Refuse models, epochs and tasks that a solver at the server does not have."""
    if not values.method.solvers:
        return
    for model in _other_models(values)[:1]:
        yield (
            f"model: {model!r} does not go with strategy {values.strategy!r}, which "
            "has a model of its own: leave it 'linear'"
        )
    if values.num_epochs > 1:
        yield (
            f"num-epochs: strategy {values.strategy!r} solves once, not "
            f"{values.num_epochs} times: leave it 0"
        )
    if values.task == CLASSIFICATION:
        yield (
            f"task: {CLASSIFICATION!r} does not go with strategy {values.strategy!r}: "
            "use admm or sgd, with a coreset-size"
        )


def solver_of_another_method(values: SettingValues) -> Problems:
    """Refuse a solver that is not one of the method's, and one without the penalty."""
    solvers = (AUTO, *values.method.solvers)
    if values.coreset_solver not in solvers:
        yield (
            f"coreset-solver: {values.coreset_solver!r} does not go with strategy "
            f"{values.strategy!r}: use {', '.join(solvers)}"
        )
    elif values.l1 and values.coreset_solver == SAGA:
        yield f"l1: solver {SAGA!r} takes none: use {EXACT!r}, or leave it 0"


def personalised_joins(values: SettingValues) -> Problems:
    """Refuse what has no meaning where labels and rows stay at the sites."""
    if values.family != PERSONAL:
        return
    if values.mode == EXPLAIN:
        yield (
            f"mode: {EXPLAIN!r} is about joins, which strategy {values.strategy!r} has "
            "none of"
        )
    kinds = ("features", "labels", "predictions")
    for key in covered(values.privacy, kinds):
        yield (
            f"privacy.{key}: strategy {values.strategy!r} goes without: labels and "
            "rows stay at the sites, and gradients and metrics leave as they are "
            "(graph-epsilon puts noise on the graph's summaries)"
        )


def personal_coordinates(values: SettingValues) -> Problems:
    """Refuse coordinates that the models do not have."""
    if values.family != PERSONAL:
        return
    models = {model for _, model in values.models} or {values.model}
    if values.personal == LAST and models != {MLP}:
        yield "personal: 'last' is the last layer of model 'mlp'"
    if named_coordinates(values.personal) and models != {LINEAR}:
        yield "personal: a list of features needs model 'linear'"


def clusters_of_updates(values: SettingValues) -> Problems:
    """Refuse clusters of updates that are not encoded."""
    if values.family != PERSONAL:
        return
    if values.update_clusters and not values.update_penalty:
        yield "update-clusters: is of encoded updates: set update-penalty above 0"


def noise_on_the_graph(values: SettingValues) -> Problems:
    """Refuse noise on a graph that is not made of noisy summaries."""
    if values.family != PERSONAL:
        return
    if values.graph_epsilon and values.graph not in (BY_DATA, BY_FEATURES):
        yield (
            f"graph-epsilon: noise is for the summaries of graph {BY_DATA!r} and "
            f"{BY_FEATURES!r}, not for {values.graph!r}"
        )


def absences(values: SettingValues) -> Problems:
    """Refuse to go on without a site where nothing can stand for it."""
    allowed = ABSENCES[values.mode]
    if values.on_missing not in allowed:
        yield (
            f"on-missing: {values.on_missing!r} does not go with mode {values.mode!r}: "
            f"use {', '.join(allowed)}"
        )
    if values.on_missing == STALE and values.family in (SGD, CORESET):
        yield (
            f"on-missing: {STALE!r} needs the last scores of all rows, which strategy "
            f"{values.strategy!r} does not have at the server: use admm, or stop"
        )


def version_of_a_new_model(values: SettingValues) -> Problems:
    """Refuse a version where training makes one."""
    if "@" in values.model_name and values.mode in (TRAIN, EXPLAIN):
        yield (
            f"model-name: a version is of a model that was trained; mode "
            f"{values.mode!r} takes a name alone, and makes the version"
        )


RULES: Final = (
    unread,
    loss_of_another_task,
    gram_of_other_models,
    weights_under_noise,
    statistics_of_other_models,
    full_batch,
    solved_at_the_server,
    uncounted_noise,
    solver_of_another_method,
    importance_under_noise,
    personalised_joins,
    personal_coordinates,
    clusters_of_updates,
    noise_on_the_graph,
    absences,
    version_of_a_new_model,
)


def covered(privacy: PrivacySettings, kinds: Iterable[str]) -> tuple[str, ...]:
    """Return those of some kinds of releases that a mechanism covers.

    Args:
        privacy: of the run.
        kinds: "labels", "features" or "predictions": settings of privacy.
    """
    is_covered = {
        "labels": privacy.covers_labels,
        "features": privacy.covers_features,
        "predictions": privacy.covers_predictions,
    }
    return tuple(kind for kind in kinds if is_covered[kind])


def _other_models(values: SettingValues) -> list[str]:
    """Return the models that are not linear, the usual one first."""
    models = (values.model, *(model for _, model in values.models))
    return [model for model in models if model != LINEAR]


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
