"""The settings of a run: Flower's run config, checked once and frozen.

A key of the run config is a field with dashes for underscores; those of
:class:`PrivacySettings` have the prefix ``privacy.``.
"""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from tp_flower import methods
from tp_flower.features.choice import KEY_PREFIX, entry_of_key
from tp_flower.learning.models.local_model import LINEAR
from tp_flower.methods.boost.messages import TREES
from tp_flower.methods.personalised.messages import BY_DATA, BY_FEATURES
from tp_flower.objectives import names_of_losses, takes_numbers
from tp_flower.protocol.fields import NOISY_STATISTICS
from tp_flower.settings import declare, run, training
from tp_flower.settings.privacy import PRIVACY_SETTINGS, PrivacySettings
from tp_flower.splits import SplitRule


@dataclass(frozen=True)
class SettingValues(
    run.DataSettings,
    run.RunSettings,
    run.SiteSettings,
    training.ModelSettings,
    training.AdmmSettings,
    training.SgdSettings,
    training.BoostSettings,
    training.CoresetSettings,
    training.PersonalisedSettings,
):
    """Values of all settings, each of which is allowed by itself."""

    privacy: PrivacySettings = field(default_factory=PrivacySettings)

    @property
    def method_name(self) -> str:
        """The strategy, with "auto" resolved.

        That is "cg", unless a model is not linear, noise covers what sites send, the
        run is on a coreset, or a setting of ADMM is set.
        """
        if self.strategy != run.AUTO:
            return self.strategy
        noise = self.privacy.covered("features", "predictions")
        is_tuned = any(
            getattr(self, item.field) != item.default
            for item in declare.declared(training.AdmmSettings)
        )
        # of a coreset's run, only ADMM scores held-out rows once
        return (
            "admm"
            if self.other_model or noise or is_tuned or self.coreset_size
            else "cg"
        )

    @property
    def method(self) -> methods.Method:
        """The method that the strategy names."""
        return methods.METHODS[self.method_name]

    @property
    def family(self) -> str:
        """Whose messages the strategy uses, such as "admm" or "sgd"."""
        return self.method.family

    @property
    def epochs(self) -> int:
        """The number of epochs, at most, with 0 resolved to the strategy's default."""
        is_unchecked = self.method.only_model == TREES and not self.validation_share
        few = (
            self.method.few_epochs
            if is_unchecked or self.is_noisy or self.coreset_size
            else 0
        )
        return self.num_epochs or few or self.method.epochs

    @property
    def is_noisy(self) -> bool:
        """Whether models or scores leave the sites with noise."""
        return self.privacy.covers_features or self.privacy.covers_predictions

    @property
    def validation_share(self) -> float:
        """The share of rows that validates, with "auto" resolved."""
        if self.validation_fraction != run.AUTO:
            return float(self.validation_fraction)
        is_plain = not (self.is_noisy or self.coreset_size)
        overfits = self.method.only_model == TREES or bool(self.other_model)
        return 0.1 if is_plain and overfits and self.method_name in run.FITTING else 0.0

    @property
    def patience_epochs(self) -> int:
        """The patience, with 0 resolved: some where validation rows are automatic."""
        is_chosen = self.validation_fraction == run.AUTO and self.validation_share > 0.0
        return self.patience or (self.method.patience if is_chosen else 0)

    @property
    def split(self) -> SplitRule:
        """How joined rows are held out."""
        return SplitRule.read(self.test_split)

    @property
    def split_name(self) -> str:
        """The name of the split, for metrics of held-out rows; "" for all rows."""
        if self.method_name == methods.CLUSTERING:
            return ""
        return self.split.describe(self.test_fraction, self.sample)

    @property
    def training_sample(self) -> int:
        """The number of joined rows to draw for training; 0 to train on all."""
        return self.coreset_size or self.method.coreset_size

    @property
    def other_model(self) -> str:
        """The first model that is not linear; "" if all are."""
        models = (self.model, *(model for _, model in self.models))
        return next((model for model in models if model != LINEAR), "")

    def model_of(self, table: str) -> str:
        """Return the model of one table, named by its alias in the query."""
        # as in DuckDB, identifiers are compared without case
        return {alias.lower(): model for alias, model in self.models}.get(
            table.lower(), self.model
        )


GROUPS: Final[tuple[type[Any], ...]] = SettingValues.__bases__
"""Groups whose keys have no prefix, in the order of the run config."""

PLAIN_SETTINGS: Final = tuple(
    item for group in GROUPS for item in declare.declared(group)
)
"""Settings of these groups."""

SETTINGS: Final = (*PLAIN_SETTINGS, *PRIVACY_SETTINGS)
KEYS: Final = tuple(item.key for item in SETTINGS)  # of the run config, in its order


def conflicts(values: SettingValues) -> Iterator[str]:
    """Yield the combinations of settings that contradict each other."""
    yield from _unread(values)
    yield from _conflicts_of_splits(values)
    yield from _conflicts_of_models(values)
    yield from _conflicts_of_boosting(values)
    yield from _conflicts_of_privacy(values)
    if values.method.solvers:
        yield from _conflicts_of_coresets(values)
    if values.method.only_model:
        yield from _conflicts_of_noiseless(values)
    if values.method_name not in methods.JOINING:
        yield from _conflicts_of_personalised(values)
    if "@" in values.model_name and values.mode in (run.TRAIN, run.EXPLAIN):
        yield (
            f"model-name: mode {values.mode!r} takes a name without '@version', which "
            "training assigns"
        )


def _unread(values: SettingValues) -> Iterator[str]:
    """Refuse settings that nobody reads, if their readers give a reason."""
    strategy, mode = values.method_name, values.mode
    for item in PLAIN_SETTINGS:
        value, readers = getattr(values, item.field), item.readers
        if readers.refusal and not (
            value == item.default or readers.include(strategy, mode)
        ):
            reason = readers.refusal.format(value=value, strategy=strategy, mode=mode)
            yield f"{item.key}: {reason}"


def _conflicts_of_splits(values: SettingValues) -> Iterator[str]:
    if values.split.columns and not (values.test_fraction or values.validation_share):
        yield (
            f"test-split: {values.test_split!r} needs a test-fraction or a "
            "validation-fraction above 0"
        )
    if values.patience and not values.validation_share:
        yield (
            f"patience: {values.patience} epochs without a lower validation loss need "
            "a validation-fraction above 0"
        )


def _conflicts_of_models(values: SettingValues) -> Iterator[str]:
    has_numbers = values.task == run.REGRESSION
    losses = [n for n in names_of_losses() if takes_numbers(n) == has_numbers]
    if run.AUTO not in (values.task, values.loss) and values.loss not in losses:
        yield (
            f"loss: {values.loss!r} does not fit task {values.task!r}: use "
            f"{', '.join((run.AUTO, *losses))}"
        )
    choices = (run.AUTO, *training.BY_FAMILY.get(values.family, ()))
    if len(choices) > 1 and values.lou not in choices:
        yield (
            f"lou: {values.lou!r} does not go with strategy {values.method_name!r}: "
            f"use {', '.join(choices)}"
        )
    if (
        values.lou == training.GRAM
        and values.method.solves_tables
        and values.other_model
    ):
        yield (
            f"lou: 'gram' needs linear models, but {values.other_model!r} is set: "
            "use auto or consensus"
        )
    if values.method.is_full_batch and values.batch_size:
        yield (
            f"batch-size: {values.batch_size!r} does not go with strategy "
            f"{values.method_name!r}, whose one batch has all joined rows: leave it 0, "
            "or use sgd"
        )
    solvers = (run.AUTO, *values.method.solvers)
    if values.coreset_solver not in solvers:
        yield (
            f"coreset-solver: {values.coreset_solver!r} does not go with strategy "
            f"{values.method_name!r}: use {', '.join(solvers)}"
        )
    if values.l1 and values.coreset_solver == training.SAGA:
        yield "l1: solver 'saga' takes none: use 'exact', or leave it 0"


def _conflicts_of_boosting(values: SettingValues) -> Iterator[str]:
    if values.boost_from and not values.validation_share:
        yield (
            "boost-from: trees that go on from a model need rows that validate, which "
            "say when "
            'trees no longer help: leave validation-fraction "auto", or above 0'
        )
    if values.boost_from and values.coreset_size:
        yield (
            f"coreset-size: {values.coreset_size} does not go with boost-from, whose "
            "scores are for all joined rows: leave it 0"
        )


def _conflicts_of_privacy(values: SettingValues) -> Iterator[str]:
    privacy, strategy = values.privacy, values.method_name
    if values.row_weight != run.JOINED:
        yield from weight_problems(values.row_weight, privacy)
    solves_tables = values.method.solves_tables
    is_exact = solves_tables and not values.other_model
    if privacy.features == NOISY_STATISTICS and not is_exact:
        missing = "linear models" if solves_tables else "strategy 'admm'"
        yield f"privacy.features: 'statistics' needs {missing}: use dp-sgd"
    if not values.method.sends_a_row_once:
        reason = "sends the rows that it draws in the clear. Use admm or sgd"
        for kind in privacy.covered("features", "predictions"):
            yield f"privacy.{kind}: strategy {strategy!r} {reason}"
    if values.training_sample and values.coreset_kind == training.IMPORTANCE:
        for kind in privacy.covered("features", "predictions", "labels"):
            yield (
                f"coreset-kind: 'importance' does not go with privacy.{kind}: which "
                "rows are drawn, and what they weigh, is computed from rows without "
                f"noise; use 'uniform', which reads none"
            )


def weight_problems(weight: str, privacy: PrivacySettings) -> list[str]:
    """List the mechanisms that cannot be combined with weights of joined rows.

    Clips, noise and accounts assume rows that count once per joined row.
    """
    return [
        f"row-weight: {weight!r} does not go with privacy.{kind}, whose noise is for "
        "rows that count once per joined row: leave one of them out"
        for kind in privacy.covered("features", "predictions")
    ]


def _conflicts_of_coresets(values: SettingValues) -> Iterator[str]:
    strategy = values.method_name
    if values.other_model:
        yield (
            f"model: {values.other_model!r} does not go with strategy "
            f"{strategy!r}, which has a model of its own: leave it 'linear'"
        )
    if values.num_epochs > 1:
        yield (
            f"num-epochs: strategy {strategy!r} solves once, not {values.num_epochs} "
            "times: leave it 0"
        )
    if values.task == run.CLASSIFICATION:
        yield (
            f"task: 'classification' does not go with strategy {strategy!r}: use "
            "admm or sgd, with a coreset-size"
        )


def _conflicts_of_noiseless(values: SettingValues) -> Iterator[str]:
    if values.other_model:
        yield (
            f"model: {values.other_model!r} does not go with strategy "
            f"{values.method_name!r}, which trains its own kind: use admm or sgd"
        )
    for kind in values.privacy.covered("features", "predictions"):
        yield (
            f"privacy.{kind}: strategy {values.method_name!r} plans no noise for what "
            "its sites send: use admm or sgd"
        )


def _conflicts_of_personalised(values: SettingValues) -> Iterator[str]:
    strategy = values.method_name
    if values.mode == run.EXPLAIN:
        yield f"mode: 'explain' explains joins; strategy {strategy!r} has none"
    for kind in values.privacy.covered("features", "labels", "predictions"):
        yield (
            f"privacy.{kind}: strategy {strategy!r} does not use it: labels and rows "
            "stay at the sites; gradients and metrics leave without noise "
            "(graph-epsilon puts noise on the graph's summaries)"
        )
    models = {model for _, model in values.models} or {values.model}
    if values.personal == training.LAST and models != {training.MLP}:
        yield "personal: 'last' is the last layer of model 'mlp'"
    if training.named_coordinates(values.personal) and models != {LINEAR}:
        yield "personal: a list of features needs model 'linear'"
    if values.graph_epsilon and values.graph not in (
        BY_DATA,
        BY_FEATURES,
    ):
        yield (
            "graph-epsilon: noise is for the summaries of graph "
            f"{BY_DATA!r} and {BY_FEATURES!r}, not for {values.graph!r}"
        )


@dataclass(frozen=True)
class Settings(SettingValues):
    """The settings of a run; SettingsError lists all values that are refused.

    0, "" or "auto" mean "chosen by the program" if `docs/reference/settings.md` says
    so. The run config may also have keys `encode.<table>.<column>`, which are
    equivalent to entries of `encoders`.

    >>> Settings(strategy="sgd").epochs
    30
    >>> Settings.from_run_config({"hidden-sizes": "32,8"}).hidden_sizes
    (32, 8)
    """

    def __post_init__(self) -> None:
        values, problems = declare.read_fields(PLAIN_SETTINGS, self)
        if isinstance(private := vars(self)["privacy"], PrivacySettings):
            values["privacy"] = private
        else:
            problems.append(
                f"privacy: {private!r} is not a PrivacySettings: write "
                "privacy=PrivacySettings(...), from tp_flower.settings"
            )
        # conflicts are only judged between values that are allowed by themselves
        problems += conflicts(SettingValues(**values))  # type: ignore[arg-type]
        if problems:
            raise declare.UnusableSettingsError(problems)
        declare.store(self, values)

    @classmethod
    def from_run_config(cls, config: Mapping[str, object]) -> Self:
        """Read the settings from a run config; SettingsError lists all its problems."""
        keyed = [key for key in config if key.startswith(KEY_PREFIX)]
        problems = [_unknown(key) for key in config if key not in (*KEYS, *keyed)]
        fields = declare.fields_of(PLAIN_SETTINGS, config)
        try:
            if entries := [entry_of_key(key, config[key]) for key in keyed]:
                fields["encoders"] = (fields.get("encoders", ""), *entries)
        except ValueError as error:
            problems.append(str(error))
        try:
            private = declare.fields_of(PRIVACY_SETTINGS, config)
            fields["privacy"] = PrivacySettings(**private)  # type: ignore[arg-type]
        except declare.UnusableSettingsError as error:
            problems += error.problems
        try:
            settings = cls(**fields)  # type: ignore[arg-type]
        except declare.UnusableSettingsError as error:
            raise declare.UnusableSettingsError([*problems, *error.problems]) from None
        if problems:
            raise declare.UnusableSettingsError(problems)
        return settings

    def with_fields(self, **fields: object) -> Self:
        """Return the settings with some fields replaced, all checked again."""
        names = {entry.name for entry in dataclasses.fields(self)}
        if unknown := [name.replace("_", "-") for name in fields if name not in names]:
            raise declare.UnusableSettingsError(list(map(_unknown, unknown)))
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, object]:
        """Return the run config that `from_run_config` reads back."""
        private = declare.render_values(PRIVACY_SETTINGS, self.privacy)
        return declare.render_values(PLAIN_SETTINGS, self) | private

    def proposed(self) -> dict[str, object]:
        """Return the part of the run config that the owners of tables approve."""
        # an explanation of "auto" is of the strategy that would train
        config = self.to_dict() | {"strategy": self.method_name}
        return {
            item.key: config[item.key] for item in SETTINGS if not item.is_operational
        }


SYNONYMS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("test-size", "test-share", "holdout"), "test-fraction"),
    "train-size": "test-fraction, the share that is not trained on",
    **dict.fromkeys(
        (
            "validation-size",
            "val-size",
            "validation-split",
            "val-split",
            "eval-fraction",
        ),
        "validation-fraction",
    ),
    **dict.fromkeys(
        (
            "epochs",
            "n-epochs",
            "max-iter",
            "n-iter",
            "iterations",
            "rounds",
            "num-rounds",
        ),
        "num-epochs",
    ),
    **dict.fromkeys(
        ("n-estimators", "num-trees", "num-boost-round", "num-iterations"),
        "num-epochs and trees-per-round, of strategy boost",
    ),
    **dict.fromkeys(
        ("max-depth", "num-leaves", "max-leaves", "max-leaf-nodes"),
        "leaves, of strategy boost",
    ),
    **dict.fromkeys(
        ("min-child-samples", "min-samples-leaf", "min-data-in-leaf"),
        "min-rows-per-leaf",
    ),
    **dict.fromkeys(
        ("lr", "eta", "step-size", "eta0"), "learning-rate, or tree-rate of boost"
    ),
    **dict.fromkeys(
        ("alpha", "lambda", "reg-lambda", "weight-decay", "c", "ridge"), "l2"
    ),
    **dict.fromkeys(("reg-alpha", "lasso", "l1-ratio"), "l1"),
    **dict.fromkeys(("batch", "minibatch-size", "per-device-batch-size"), "batch-size"),
    **dict.fromkeys(("random-state", "random-seed"), "seed"),
    **dict.fromkeys(
        ("early-stopping", "early-stopping-rounds", "n-iter-no-change"), "patience"
    ),
    **dict.fromkeys(
        ("hidden-layer-sizes", "hidden-layers", "hidden-units"), "hidden-sizes"
    ),
    **dict.fromkeys(("objective", "criterion"), "loss"),
    **dict.fromkeys(("algorithm", "method", "optimizer", "solver"), "strategy"),
    "query": "sql",
    "tol": "tolerance",
    **dict.fromkeys(
        ("label", "target"), "sql, whose query names the label: SELECT x AS label"
    ),
}
"""The settings that other libraries know under these names."""


def _unknown(key: object) -> str:
    name = str(key).lower().replace("_", "-")
    if name in SYNONYMS:
        return f"{key}: unknown setting. It is {SYNONYMS[name]} here."
    private = {item.key.replace(".", "-"): item for item in PRIVACY_SETTINGS}
    if item := private.get(name.replace(".", "-")):
        # an argument of Python: a file and --set write this key
        return (
            f"{key}: in Python, write privacy=PrivacySettings({item.field}=...), from "
            f"tp_flower.settings; in a file or with --set it is {item.key}."
        )
    if close := difflib.get_close_matches(str(key), KEYS, n=3):
        return f"{key}: unknown setting. Did you mean {' or '.join(close)}?"
    return f"{key}: unknown setting. Valid settings: {', '.join(KEYS)}."
