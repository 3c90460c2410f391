"""The settings of a run: Flower's run config, checked once and frozen.

A key of the run config is a field with dashes for underscores; those of
:class:`PrivacySettings` have the prefix ``privacy.``. The settings that belong to a
method are in its room, and :meth:`Settings.of` returns them.
"""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Final, Self, TypeVar

from tp_flower.features.choice import KEY_PREFIX, entry_of_key
from tp_flower.learning.models.local_model import LINEAR
from tp_flower.methods.method import METHODS, Method
from tp_flower.objectives import family_named, names_of_losses, takes_numbers
from tp_flower.protocol.fields import MASKED, NOISY_STATISTICS
from tp_flower.settings import declare, run, search, training
from tp_flower.settings.privacy import PRIVACY_SETTINGS, PrivacySettings
from tp_flower.settings.rules import (
    Rules,
    general_methods,
    is_read,
    names_of,
    rules_at,
    rules_of,
)
from tp_flower.splits import SplitRule

_Group = TypeVar("_Group")
COVERED: Final = ("features", "predictions", "labels")  # what epsilons may be of


@dataclass(frozen=True, init=False, eq=False)
class Settings(
    run.DataSettings,
    run.RunSettings,
    run.SiteSettings,
    training.ModelSettings,
    training.LocalSettings,
    training.SampleSettings,
    search.SearchSettings,
):
    """The settings of a run; SettingsError lists all values that are refused.

    0, "" or "auto" mean "chosen by the program" if `docs/reference/settings.md` says
    so. The run config may also have keys `encode.<table>.<column>`, which are
    equivalent to entries of `encoders`.

    >>> Settings(strategy="sgd").epochs
    30
    >>> Settings.from_run_config({"hidden-sizes": "32,8"}).hidden_sizes
    (32, 8)

    Attributes:
        of_methods: the fields that belong to a method.
    """

    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    of_methods: Mapping[str, object] = field(default_factory=dict)

    def __init__(
        self,
        *,
        privacy: PrivacySettings | None = None,
        of_methods: Mapping[str, object] | None = None,
        **values: object,
    ) -> None:
        items = plain_settings()
        values = {**(of_methods or {}), **values}
        if unknown := values.keys() - {item.field for item in items}:
            raise TypeError(f"Settings has no argument {min(unknown)!r}")
        fields, problems = declare.read_values(items, values)
        shared = {entry.name for entry in dataclasses.fields(self)}
        fields["of_methods"] = {n: v for n, v in fields.items() if n not in shared}
        fields["privacy"] = PrivacySettings() if privacy is None else privacy
        if not isinstance(fields["privacy"], PrivacySettings):
            problems.append(
                f"privacy: {privacy!r} is not a PrivacySettings: write "
                "privacy=PrivacySettings(...), from tp_flower.settings"
            )
            fields["privacy"] = PrivacySettings()
        # conflicts are only judged between values that are allowed by themselves
        declare.store(self, {**{item.field: item.default for item in items}, **fields})
        if problems := [*problems, *conflicts(self)]:
            raise declare.UnusableSettingsError(problems)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(tuple(self.to_dict().items()))

    def of(self, group: type[_Group]) -> _Group:
        """Return the settings of a method's group."""
        return group(**{name: vars(self)[name] for name in names_of(group)})

    @cached_property
    def method_name(self) -> str:
        """The strategy, with "auto" resolved to the method that the settings suit."""
        if self.strategy != declare.AUTO:
            return self.strategy
        return max(METHODS, key=lambda name: rules_of(METHODS[name]).preference(self))

    @property
    def method(self) -> Method:
        """The method that the strategy names."""
        return METHODS[self.method_name]

    @property
    def rules(self) -> Rules:
        """What that method adds to the settings."""
        return rules_of(self.method)

    @property
    def memory_bytes(self) -> float:
        """The bytes that the server may take for joined rows."""
        return run.bytes_of(self.memory)

    @property
    def start(self) -> str:
        """The saved model that training starts from; "" for none."""
        return str(vars(self).get(self.method.starts_from, ""))

    @property
    def epochs(self) -> int:
        """The number of epochs, at most, with 0 resolved to the strategy's default."""
        is_unchecked = self.method.overfits and not self.validation_share
        few = 0
        if is_unchecked or self.is_noisy or self.is_sampled:
            few = self.method.few_epochs
        return self.num_epochs or few or self.method.epochs

    @property
    def has_join_secrets(self) -> bool:
        """Whether the sites of a join's two sides share a secret of the join."""
        return self.privacy.scores == MASKED or self.pads_sums

    @property
    def pads_sums(self) -> bool:
        """Whether sums by join key leave, under pads that the two sides share."""
        return self.mode == run.TRAIN and self.rules.pads_sums(self)

    @property
    def has_label_secrets(self) -> bool:
        """Whether each table's sites share a secret with those of the label's."""
        return self.mode == run.TRAIN and self.rules.seals_to_label(self)

    @property
    def is_noisy(self) -> bool:
        """Whether models or scores leave the sites with noise."""
        return self.privacy.covers_features or self.privacy.covers_predictions

    @property
    def validation_share(self) -> float:
        """The share of rows that validates, with "auto" resolved."""
        if self.validation_fraction != declare.AUTO:
            return float(self.validation_fraction)
        overfits = (
            self.method.overfits
            or bool(self.other_model)
            or bool(self.effect_tables or self.factor_tables or self.most_bins)
        )
        is_read = "validation_fraction" in self.rules.reads
        if overfits and is_read and not (self.is_noisy or self.is_sampled):
            return 0.1
        return 0.0

    @property
    def asked_tolerance(self) -> float:
        """The tolerance that is set, of a method that has one; else 0."""
        return self.tolerance if "tolerance" in self.rules.reads else 0.0

    @property
    def asked_workers(self) -> int | str:
        """The workers that are asked for, of a run that computes on joined rows."""
        is_used = self.mode in (run.TRAIN, run.PREDICT, run.EVALUATE)
        return self.server_workers if is_used and self._takes_workers else 0

    @property
    def has_idle_workers(self) -> bool:
        """Whether workers are asked for that the method has no joined rows for."""
        return bool(self.server_workers) and not self._takes_workers

    @property
    def _takes_workers(self) -> bool:
        return "server_workers" in self.rules.reads

    @property
    def effect_tables(self) -> tuple[str, ...]:
        """The tables that are to have effects of their keys, by alias; () if none is.

        With "auto" it may be any.
        """
        if self.effects in (declare.AUTO, training.NONE):
            return ()
        return tuple(declare.items_of(self.effects))

    @property
    def fits_effects(self) -> bool:
        """Whether keys of tables may get effects: rows validate, nothing has noise."""
        return (
            "effects" in self.rules.reads
            and self.effects != training.NONE
            and self.validation_share > 0.0
            and not self.privacy.covered(*COVERED)
        )

    @property
    def factor_tables(self) -> tuple[str, ...]:
        """The two tables that are to have factors of their keys, by alias, or ().

        With "auto" it may be any two.
        """
        if self.factors in (declare.AUTO, training.NONE):
            return ()
        return tuple(declare.items_of(self.factors.partition(":")[0]))

    @property
    def factor_width(self) -> int:
        """How many factors a key is to have; 0 to choose by rows that validate."""
        return int(self.factors.partition(":")[2] or 0)

    @property
    def fits_factors(self) -> bool:
        """Whether keys of two tables may get factors, as they may get effects.

        With "auto" only where effects are not chosen either.
        """
        is_wanted = self.factors == self.effects == declare.AUTO
        return (
            "factors" in self.rules.reads
            and (is_wanted or bool(self.factor_tables))
            and self.validation_share > 0.0
            and not self.privacy.covered(*COVERED)
        )

    @property
    def most_bins(self) -> int:
        """The bins of a column, at most; 0 where policies name them, or for none."""
        return self.bins if isinstance(self.bins, int) else 0

    @property
    def asks_bins(self) -> bool:
        """Whether sites may send bin numbers: rows validate, nothing has noise."""
        return (
            "bins" in self.rules.reads
            and self.bins != training.NONE
            and self.validation_share > 0.0
            and not self.privacy.covered(*COVERED)
        )

    @property
    def inspects(self) -> bool:
        """Whether sites are told scores and labels, to inspect a model by."""
        return bool(self.importances or self.metrics_by)

    @property
    def fits_key_numbers(self) -> bool:
        """Whether keys of tables may get effects or factors."""
        return self.fits_effects or self.fits_factors

    def bins_of(self, named: int) -> int:
        """Return the bins of a table whose policy names a number; 0 for none."""
        if self.bins == declare.AUTO:
            return named
        return self.most_bins

    @property
    def patience_epochs(self) -> int:
        """The patience, with 0 resolved: some where validation rows are automatic."""
        is_chosen = (
            self.validation_fraction == declare.AUTO and self.validation_share > 0.0
        )
        return self.patience or (self.method.patience if is_chosen else 0)

    @property
    def split(self) -> SplitRule:
        """How joined rows are held out."""
        return SplitRule.read(self.test_split)

    @property
    def split_name(self) -> str:
        """The name of the split, for metrics of held-out rows; "" for all rows."""
        if not self.method.holds_out:
            return ""
        return self.split.describe(self.test_fraction, self.sample)

    @property
    def training_sample(self) -> int:
        """The number of joined rows to draw for training; 0 to train on all."""
        return self.rows_to_draw(self.method.sampled_rows)

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

    @classmethod
    def from_run_config(cls, config: Mapping[str, object]) -> Self:
        """Read the settings from a run config; SettingsError lists all its problems."""
        keyed = [key for key in config if key.startswith(KEY_PREFIX)]
        valid = {*keys(), *keyed}
        problems = [_unknown(key) for key in config if key not in valid]
        fields = declare.fields_of(plain_settings(), config)
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
        names = {"privacy", *(item.field for item in plain_settings())}
        if unknown := [name.replace("_", "-") for name in fields if name not in names]:
            raise declare.UnusableSettingsError(list(map(_unknown, unknown)))
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, object]:
        """Return the run config that `from_run_config` reads back."""
        private = declare.render_values(PRIVACY_SETTINGS, self.privacy)
        return declare.render_values(plain_settings(), self) | private

    def proposed(self) -> dict[str, object]:
        """Return the part of the run config that the owners of tables approve."""
        # an explanation of "auto" is of the strategy that would train
        config = self.to_dict() | {"strategy": self.method_name}
        return {
            item.key: config[item.key]
            for item in all_settings()
            if not item.is_operational
        }


_SHARED: Final = Settings.__bases__
_FIRST: Final = 4  # of the shared groups; methods say where the others are


def groups() -> tuple[type[Any], ...]:
    """Return the groups whose keys have no prefix, in the order of the run config."""
    return _groups_by(tuple(method.rules for method in METHODS.values()))


def plain_settings() -> tuple[declare.Setting, ...]:
    """Return the settings of these groups."""
    return _settings_of(groups())


# sites read a run's settings anew in every process and message
@cache
def _groups_by(rules: tuple[str, ...]) -> tuple[type[Any], ...]:
    method_groups = (
        group for reference in rules for group in rules_at(reference).groups
    )
    return tuple(dict.fromkeys((*_SHARED[:_FIRST], *method_groups, *_SHARED)))


@cache
def _settings_of(groups: tuple[type[Any], ...]) -> tuple[declare.Setting, ...]:
    return tuple(item for group in groups for item in declare.declared(group))


def all_settings() -> tuple[declare.Setting, ...]:
    """Return all settings, in the order of the run config."""
    return (*plain_settings(), *PRIVACY_SETTINGS)


def keys() -> tuple[str, ...]:
    """Return the keys of the run config, in its order."""
    return tuple(item.key for item in all_settings())


def conflicts(values: Settings) -> Iterator[str]:
    """Yield the combinations of settings that contradict each other."""
    yield from _unread(values)
    if values.cutoff_grid and values.sealed_cutoffs:
        yield (
            f"cutoff-grid: {values.cutoff_grid!r} does not go with sealed-cutoffs: "
            'write cutoff-grid = "" for cutoffs as they are, or sealed-cutoffs = false '
            "for those of the grid"
        )
    yield from _conflicts_of_splits(values)
    yield from _conflicts_of_models(values)
    yield from values.rules.conflicts(values)
    yield from _conflicts_of_privacy(values)
    yield from training.sample_conflicts(values)
    yield from search.search_conflicts(values)
    if not values.method.plans_noise:
        yield from _conflicts_of_noiseless(values)
    if "@" in values.model_name and values.mode in (run.TRAIN, run.EXPLAIN):
        yield (
            f"model-name: mode {values.mode!r} takes a name without '@version', which "
            "training assigns"
        )


def _unread(values: Settings) -> Iterator[str]:
    """Refuse settings that nobody reads, if their readers give a reason."""
    strategy = values.method_name
    mode = values.mode
    for item in plain_settings():
        value = vars(values)[item.field]
        readers = item.readers
        if readers.refusal and not (
            value == item.default or is_read(item, strategy, mode)
        ):
            instead = values.rules.instead.get(item.field, "it would have no effect")
            reason = readers.refusal.format(
                value=value, strategy=strategy, mode=mode, instead=instead
            )
            yield f"{item.key}: {reason}"


def _conflicts_of_splits(values: Settings) -> Iterator[str]:
    """Refuse a split or a patience that no rows are held out for."""
    held_out = values.test_fraction or values.validation_share or values.folds
    if values.split.columns and not held_out:
        yield (
            f"test-split: {values.test_split!r} needs a test-fraction or a "
            "validation-fraction above 0"
        )
    if values.effect_tables and not values.fits_effects:
        yield from _conflicts_of_keys(values, "effects")
    if values.factor_tables and not values.fits_factors:
        yield from _conflicts_of_keys(values, "factors")
    if values.most_bins and not values.asks_bins:
        yield from _conflicts_of_bins(values)
    if values.inspects:
        yield from _conflicts_of_inspection(values)
    if values.patience and not values.validation_share:
        yield (
            f"patience: {values.patience} epochs without a lower validation loss need "
            "a validation-fraction above 0"
        )


def _conflicts_of_keys(values: Settings, setting: str) -> Iterator[str]:
    """Refuse effects or factors that no rows judge, or that no epsilon covers."""
    wanted = vars(values)[setting]
    for kind in values.privacy.covered(*COVERED):
        yield (
            f"{setting}: {wanted!r} does not go with privacy.{kind}: sums of the loss "
            'by key have no noise; use "none"'
        )
        return
    if setting in values.rules.reads:
        yield (
            f"{setting}: {wanted!r} need rows that judge them: leave "
            'validation-fraction "auto", or above 0'
        )


def _conflicts_of_bins(values: Settings) -> Iterator[str]:
    """Refuse bins that no rows judge, and those beside any epsilon."""
    for kind in values.privacy.covered(*COVERED):
        yield (
            f"bins: {values.bins} does not go with privacy.{kind}: bin numbers of rows "
            'have no noise; use "none"'
        )
        return
    if "bins" in values.rules.reads:
        yield (
            f"bins: {values.bins} needs rows that judge the trees: leave "
            'validation-fraction "auto", or above 0'
        )


def _conflicts_of_inspection(values: Settings) -> Iterator[str]:
    """Refuse importances, or metrics of groups, beside any epsilon."""
    named = {"importances": values.importances, "metrics-by": values.metrics_by}
    name, value = next(item for item in named.items() if item[1])
    for kind in values.privacy.covered(*COVERED):
        yield (
            f"{name}: {value!r} does not go with privacy.{kind}: what sites work out "
            "for it has no noise; leave it out"
        )


def _conflicts_of_models(values: Settings) -> Iterator[str]:
    """Refuse a loss that does not fit the task, and a union of another method."""
    has_numbers = values.task == run.REGRESSION
    losses = [n for n in names_of_losses() if takes_numbers(n) == has_numbers]
    is_given = declare.AUTO not in (values.task, values.loss)
    if is_given and takes_numbers(values.loss) != has_numbers:
        yield (
            f"loss: {values.loss!r} does not fit task {values.task!r}: use "
            f"{', '.join((declare.AUTO, *losses))}"
        )
    if values.loss != declare.AUTO:
        yield from problems_of_loss(values.loss, values)
    choices = (declare.AUTO, *values.method.unions)
    if len(choices) > 1 and values.lou not in choices:
        yield (
            f"lou: {values.lou!r} does not go with strategy {values.method_name!r}: "
            f"use {', '.join(choices)}"
        )


def problems_of_loss(name: str, values: Settings) -> Iterator[str]:
    """Yield why a run cannot train by a loss: its method, its noise, its sample."""
    family = family_named(name)
    able = [name for name, method in METHODS.items() if method.takes_loss(family)]
    if not values.method.takes_loss(family):
        yield (
            f"loss: strategy {values.method_name!r} does not train by {family.name!r}; "
            f"{', '.join(able)} do"
        )
    if not family.is_separable:
        yield from _problems_of_joint_loss(family.name, values)
    if values.privacy.covers_labels and family.noise_kind is None:
        corrected = [
            name
            for name in names_of_losses()
            if family_named(name).noise_kind is not None
        ]
        yield (
            f"privacy.labels: loss {family.name!r} is not corrected for noise on "
            f"labels; {', '.join(corrected)} are"
        )


def _problems_of_joint_loss(name: str, values: Settings) -> Iterator[str]:
    """Yield why a run cannot train by a loss of rows that depends on other rows."""
    for kind in values.privacy.covered("features", "predictions"):
        yield (
            f"privacy.{kind}: loss {name!r} compares rows with each other, and noise "
            'is for the share of one row: leave it "none", or use another loss'
        )
    yield from training.problems_of_drawn_rows(name, values)


def _conflicts_of_privacy(values: Settings) -> Iterator[str]:
    """Refuse mechanisms that the method or the weights of rows do not allow."""
    privacy = values.privacy
    strategy = values.method_name
    # the noise of padded sums is for the weights that rows have
    if values.row_weight != run.JOINED and not values.rules.pads_sums(values):
        yield from weight_problems(values.row_weight, privacy)
    solves_tables = values.method.solves_tables
    is_exact = solves_tables and not values.other_model
    if privacy.features == NOISY_STATISTICS and not is_exact:
        solving = next(name for name, m in METHODS.items() if m.solves_tables)
        missing = "linear models"
        if not solves_tables:
            missing = f"strategy {solving!r}"
        yield f"privacy.features: 'statistics' needs {missing}: use dp-sgd"
    if not values.method.sends_a_row_once:
        reason = f"sends the rows that it draws in the clear. Use {general_methods()}"
        for kind in privacy.covered("features", "predictions"):
            yield f"privacy.{kind}: strategy {strategy!r} {reason}"


def weight_problems(weight: str, privacy: PrivacySettings) -> list[str]:
    """List the mechanisms that cannot be combined with weights of joined rows.

    Clips, noise and accounts assume rows that count once per joined row.
    """
    return [
        f"row-weight: {weight!r} does not go with privacy.{kind}, whose noise is for "
        "rows that count once per joined row: leave one of them out"
        for kind in privacy.covered("features", "predictions")
    ]


def _conflicts_of_noiseless(values: Settings) -> Iterator[str]:
    """Refuse models and mechanisms for a method that plans no noise."""
    if values.other_model and values.method.only_model:
        yield (
            f"model: {values.other_model!r} does not go with strategy "
            f"{values.method_name!r}, which trains its own kind: use "
            f"{general_methods()}"
        )
    for kind in values.privacy.covered("features", "predictions"):
        yield (
            f"privacy.{kind}: strategy {values.method_name!r} plans no noise for what "
            f"its sites send: use {general_methods()}"
        )


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
    **dict.fromkeys(("lr", "eta", "step-size", "eta0"), "learning-rate"),
    **dict.fromkeys(
        ("alpha", "lambda", "reg-lambda", "weight-decay", "c", "ridge"), "l2"
    ),
    **dict.fromkeys(("batch", "minibatch-size", "per-device-batch-size"), "batch-size"),
    **dict.fromkeys(("random-state", "random-seed"), "seed"),
    **dict.fromkeys(
        ("early-stopping", "early-stopping-rounds", "n-iter-no-change"), "patience"
    ),
    **dict.fromkeys(
        ("hidden-layer-sizes", "hidden-layers", "hidden-units"), "hidden-sizes"
    ),
    **dict.fromkeys(("objective", "criterion", "family"), "loss"),
    **dict.fromkeys(("algorithm", "method", "optimizer", "solver"), "strategy"),
    "query": "sql",
    "tol": "tolerance",
    **dict.fromkeys(
        ("label", "target"), "sql, whose query names the label: SELECT x AS label"
    ),
}
"""The settings that other libraries know under these names."""


def synonyms() -> dict[str, str]:
    """Return the settings that other libraries know under these names, methods' too."""
    meanings = dict(SYNONYMS)
    for method in METHODS.values():
        for name, meaning in rules_of(method).synonyms.items():
            shared = meanings.get(name)
            meanings[name] = f"{shared}, or {meaning}" if shared else meaning
    return meanings


def _unknown(key: object) -> str:
    """Return the text about a key that is no setting, with what may be meant."""
    name = str(key).lower().replace("_", "-")
    if name in (meanings := synonyms()):
        return f"{key}: unknown setting. It is {meanings[name]} here."
    private = {item.key.replace(".", "-"): item for item in PRIVACY_SETTINGS}
    if item := private.get(name.replace(".", "-")):
        # an argument of Python: a file and --set write this key
        return (
            f"{key}: in Python, write privacy=PrivacySettings({item.field}=...), from "
            f"tp_flower.settings; in a file or with --set it is {item.key}."
        )
    if close := difflib.get_close_matches(str(key), keys(), n=3):
        return f"{key}: unknown setting. Did you mean {' or '.join(close)}?"
    return f"{key}: unknown setting. Valid settings: {', '.join(keys())}."
