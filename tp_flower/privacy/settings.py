"""The settings of a run's privacy: what is protected, by which mechanism, how much.

In the run config they are the keys ``privacy.*``; `pyproject.toml` documents them with
their defaults. What they ask for is a floor of nobody: a site's own policy decides what
may leave it, and refuses a run that asks for less.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from tp_flower.encoding.choice import Entry, render_entries
from tp_flower.encoding.ranges import parse_ranges, ranges_problem
from tp_flower.errors import SettingsError
from tp_flower.privacy.accounting import ACCOUNTANTS, RDP
from tp_flower.setting_checks import Range, has_type, plain_problem, store_floats

PREFIX: Final = "privacy."
CLEAR: Final = "clear"
LAPLACE, RANDOMISED_RESPONSE = "laplace", "randomised-response"
DP_SGD, STATISTICS = "dp-sgd", "statistics"
SERVER, OUTSIDER = "server", "outsider"

CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "labels": (CLEAR, LAPLACE, RANDOMISED_RESPONSE),
    "features": (CLEAR, DP_SGD, STATISTICS),
    "adversary": (SERVER, OUTSIDER),
    "accountant": ACCOUNTANTS,
}
_OF_SWITCH: Final[Mapping[str, tuple[str, ...]]] = {
    "privacy.labels": ("label_range", "label_classes"),
    "privacy.features": (
        *("epsilon", "clip", "noise_multiplier", "sample_rate", "local_steps"),
        *("target_clip", "adversary"),
    ),
    "privacy.predictions": ("prediction_clip",),
    "privacy.statistics": ("ranges",),
}
"""By the key that turns a mechanism on, what is of that mechanism alone."""

MOST_STEPS: Final = 1_000_000
_CLIPS: Final = Range(1e-12, 1e12)
_RANGES: Final[Mapping[str, Range]] = {
    "label_epsilon": Range(0),
    "label_noise": Range(0),
    "epsilon": Range(0, includes_low=False),
    "delta": Range(0, 1, includes_low=False),
    "clip": _CLIPS,
    "noise_multiplier": Range(0),
    "sample_rate": Range(0, math.nextafter(1.0, 2.0)),
    "local_steps": Range(0, MOST_STEPS + 1),
    "target_clip": _CLIPS,
    "predictions": Range(0),
    "prediction_clip": _CLIPS,
    "statistics": Range(0),
}


@dataclass(frozen=True)
class PrivacySettings:
    """What a run protects; every value checked on construction.

    Attributes:
        labels: ``"clear"``, ``"laplace"`` or ``"randomised-response"``.
        label_epsilon: of a label, local differential privacy; 0: from ``label_noise``.
        label_noise: lambda, the deviation of the Laplace noise (paper, Eq. 25).
        label_range: (low, high) that labels of a regression are clipped to.
        label_classes: the classes, where the label's type does not tell them.
        label_correction: whether the loss and the metrics allow for the known noise.
        features: ``"clear"``, ``"dp-sgd"`` or ``"statistics"`` (linear models, ADMM).
        epsilon: of what the models of a table tell of one of its rows, per run.
        delta: of that, and of ``predictions``.
        clip: C, the norm that a row's gradient (or weighted row) is clipped to.
        noise_multiplier: deviation over clip; 0: from ``epsilon``.
        sample_rate: of ADMM's local steps; 0: chosen.
        local_steps: of DP-SGD per epoch of ADMM; 0: chosen.
        target_clip: of ``"statistics"``: the clip of a row's target.
        predictions: epsilon of all score releases of a run; 0: not covered.
        prediction_clip: B, the norm that a row's scores are clipped to.
        statistics: epsilon of the encoders' statistics; 0: not covered.
        ranges: (table alias, column, "low..high") that features are clipped to for
            private statistics.
        adversary: ``"server"`` (sees all messages) or ``"outsider"`` (the model).
        accountant: ``"rdp"`` or ``"prv"``, for sub-sampled mechanisms.

    Raises:
        SettingsError: a value is refused, or does not fit another one.
    """

    labels: str = CLEAR
    label_epsilon: float = 0.0
    label_noise: float = 0.0
    label_range: tuple[float, ...] = ()
    label_classes: tuple[str, ...] = ()
    label_correction: bool = True
    features: str = CLEAR
    epsilon: float = 1.0
    delta: float = 1e-5
    clip: float = 1.0
    noise_multiplier: float = 0.0
    sample_rate: float = 0.0
    local_steps: int = 0
    target_clip: float = 1.0
    predictions: float = 0.0
    prediction_clip: float = 1.0
    statistics: float = 0.0
    ranges: tuple[Entry, ...] = ()
    adversary: str = SERVER
    accountant: str = RDP

    def __post_init__(self) -> None:
        """Check all values, then store numbers given as int for a float as floats."""
        problems = _find_problems(vars(self))
        if problems:
            raise SettingsError("; ".join(problems))
        store_floats(self)

    @classmethod
    def parsed(cls, config: Mapping[str, object]) -> tuple[Self, list[str]]:
        """Read run-config keys; return the settings, and all that is wrong with them.

        Where something is wrong the settings are the defaults.
        """
        values: dict[str, Any] = {}
        problems = []
        for key, value in config.items():
            name = _FIELDS[key]
            try:
                values[name] = _parse(name, value)
            except ValueError as error:
                problems.append(f"{key}: {error}")
        problems += _find_problems(values)
        return (cls(), problems) if problems else (cls(**values), [])

    def to_dict(self) -> dict[str, object]:
        """Return the settings under their run-config keys, as that file writes them."""
        values = {key: getattr(self, name) for key, name in _FIELDS.items()}
        for name in ("label_range", "label_classes"):
            items = getattr(self, name)
            shown = [f"{v:g}" if isinstance(v, float) else str(v) for v in items]
            values[_key(name)] = ", ".join(shown)
        return {**values, _key("ranges"): render_entries(self.ranges)}

    @property
    def covers_labels(self) -> bool:
        """Whether labels leave with noise only."""
        return self.labels != CLEAR

    @property
    def covers_features(self) -> bool:
        """Whether models (gradients, statistics, parameters) are private."""
        return self.features != CLEAR

    @property
    def covers_predictions(self) -> bool:
        """Whether scores leave with noise only."""
        return self.predictions > 0

    @property
    def covers_statistics(self) -> bool:
        """Whether the encoders' statistics leave with noise only."""
        return self.statistics > 0


def _key(name: str) -> str:
    return PREFIX + name.replace("_", "-")


_FIELDS: Final[Mapping[str, str]] = {
    _key(field.name): field.name for field in dataclasses.fields(PrivacySettings)
}
_TYPES: Final = {f.name: f.type for f in dataclasses.fields(PrivacySettings)}
PRIVACY_KEYS: Final = tuple(_FIELDS)


def _parse(name: str, value: object) -> object:
    """Parse what the run config can only say as a string."""
    if name == "ranges" and isinstance(value, str):
        return parse_ranges(value)
    if name not in ("label_range", "label_classes") or not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if name == "label_classes":
        return tuple(parts)
    try:
        return tuple(float(part) for part in parts)
    except ValueError:
        raise ValueError(f'{value!r} is not a range such as "0, 5"') from None


def _find_problems(values: Mapping[str, Any]) -> list[str]:
    """Return all that is wrong with values by field; fields may be missing."""
    problems = {name: _value_problem(name, values[name]) for name in values}
    found = [f"{_key(name)}: {text}" for name, text in problems.items() if text]
    if found:
        return found
    defaults = {f.name: f.default for f in dataclasses.fields(PrivacySettings)}
    return _relation_problems({**defaults, **values})


def _value_problem(name: str, value: Any) -> str | None:
    if name == "label_range":
        return _range_problem(value)
    if name == "label_classes":
        return _classes_problem(value)
    if name == "ranges":
        return ranges_problem(value)
    return plain_problem(value, _TYPES[name], CHOICES.get(name), _RANGES.get(name))


def _classes_problem(value: Any) -> str | None:
    is_list = isinstance(value, tuple) and all(isinstance(v, str) for v in value)
    if not is_list or len(set(value)) != len(value):
        return f"{value!r} is not a list of different classes"
    return None


def _range_problem(value: Any) -> str | None:
    if value == ():
        return None
    is_pair = isinstance(value, tuple) and len(value) == 2
    if not is_pair or not all(has_type(end, float) for end in value):
        return f"{value!r} is not a pair of numbers, low and high"
    low, high = value
    return None if low < high else f"{low:g} is not below {high:g}"


def _relation_problems(values: Mapping[str, Any]) -> list[str]:
    """Check what only two settings together can get wrong."""
    problems = []
    epsilon, noise = values["label_epsilon"], values["label_noise"]
    if values["labels"] == CLEAR and (epsilon or noise):
        problems.append(
            f"{PREFIX}labels: 'clear' has no noise, but {PREFIX}label-epsilon or "
            f"{PREFIX}label-noise is set: use laplace or randomised-response"
        )
    if values["labels"] == LAPLACE and bool(epsilon) == bool(noise):
        found = "both are" if epsilon else "none is"
        problems.append(
            f"{PREFIX}labels: 'laplace' needs one of {PREFIX}label-epsilon and "
            f"{PREFIX}label-noise, and {found} set"
        )
    if values["labels"] == RANDOMISED_RESPONSE and noise:
        problems.append(
            f"{PREFIX}label-noise: it is of 'laplace'; randomised-response takes "
            f"{PREFIX}label-epsilon"
        )
    elif values["labels"] == RANDOMISED_RESPONSE and not epsilon:
        problems.append(
            f"{PREFIX}labels: 'randomised-response' needs {PREFIX}label-epsilon, "
            "which is not set"
        )
    is_outsider = values["adversary"] == OUTSIDER and values["features"] == DP_SGD
    if is_outsider and not values["predictions"]:
        problems.append(
            f"{PREFIX}adversary: 'outsider' needs {PREFIX}predictions: scores without "
            "noise go into the other tables' models, which an outsider sees as well"
        )
    return problems + _idle_problems(values)


def _idle_problems(values: Mapping[str, Any]) -> list[str]:
    """Find what is set of a mechanism that is off: the run would go in the clear.

    A value that is the default cannot be told from one that nobody set.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(PrivacySettings)}
    return [
        f"{_key(name)}: it is set, but {switch} is {values[_FIELDS[switch]]!r}, which "
        "protects nothing"
        for switch, names in _OF_SWITCH.items()
        if values[_FIELDS[switch]] == defaults[_FIELDS[switch]]
        for name in names
        if values[name] != defaults[name]
    ]
