"""Settings of privacy: what is protected, by which mechanism, how much.

In the run config they are the keys ``privacy.*``. They bind the run, not the sites: a
site's own policy decides what may leave it, and refuses a run that asks for less.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from tp_flower.errors import SettingsError
from tp_flower.methods import (
    ACCOUNTANTS,
    CLEAR,
    DP_SGD,
    LAPLACE,
    NOISY_STATISTICS,
    OUTSIDER,
    RANDOMISED_RESPONSE,
    RDP,
    SERVER,
)
from tp_flower.settings.declare import (
    ListOf,
    OneOf,
    Range,
    Readers,
    declared,
    has_type,
    setting,
    store_floats,
    value_problems,
)

PREFIX: Final = "privacy."
MOST_STEPS: Final = 1_000_000

_CLIP: Final = Range(1e-12, 1e12)
_IDLE: Final = "it is set, but {switch} is {state!r}, which protects nothing"
_LABELS: Final = Readers(switch="labels", refusal=_IDLE)
_FEATURES: Final = Readers(switch="features", refusal=_IDLE)
_PREDICTIONS: Final = Readers(switch="predictions", refusal=_IDLE)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _parse_range(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return tuple(float(part) for part in _parts(value))
    except ValueError:
        raise ValueError(f'{value!r} is not a range such as "0, 5"') from None


def _render_range(ends: tuple[float, ...]) -> str:
    return ", ".join(f"{end:g}" for end in ends)


def _range_problem(value: Any) -> str | None:
    if value == ():
        return None
    is_pair = isinstance(value, tuple) and len(value) == 2
    if not is_pair or not all(has_type(end, float) for end in value):
        return f"{value!r} is not a pair of numbers, low and high"
    low, high = value
    return None if low < high else f"{low:g} is not below {high:g}"


def _parse_classes(value: object) -> object:
    return tuple(_parts(value)) if isinstance(value, str) else value


def _classes_problem(value: Any) -> str | None:
    is_list = isinstance(value, tuple) and all(isinstance(v, str) for v in value)
    if not is_list or len(set(value)) != len(value):
        return f"{value!r} is not a list of different classes"
    return None


@dataclass(frozen=True)
class PrivacySettings:
    """What is protected, and how much (PRIVACY.md); a site may demand more, not less.

    Every value is checked on construction.

    Raises:
        SettingsError: a value is refused, or contradicts another one.
    """

    labels: str = setting(
        CLEAR,
        'Labels: "clear", "randomised-response" (classes), or "laplace" (classes or '
        "numbers).",
        OneOf((CLEAR, LAPLACE, RANDOMISED_RESPONSE)),
    )
    label_epsilon: float = setting(
        0.0,
        "Epsilon of a label (local differential privacy); 0 = from label-noise.",
        Range(0),
    )
    label_noise: float = setting(
        0.0,
        "Deviation of the Laplace noise on a label (Eq. 25); 0 = from label-epsilon.",
        Range(0),
    )
    label_range: tuple[float, ...] = setting(
        (),
        'Range that private labels of a regression are clipped to, "low, high": '
        "declare it without looking at the data.",
        ListOf("low, high", _range_problem, _parse_range, _render_range),
        _LABELS,
    )
    label_classes: tuple[str, ...] = setting(
        (),
        'Classes of a private label that is not true or false, "a, b, c": declare '
        "them without looking at the data.",
        ListOf("classes, comma separated", _classes_problem, _parse_classes, ", ".join),
        _LABELS,
    )
    label_correction: bool = setting(
        True,
        "Train and evaluate with the noise of the labels taken out (without bias).",
    )
    features: str = setting(
        CLEAR,
        'Gradients and models: "clear", "dp-sgd" (any model), or "statistics" (linear '
        "models, ADMM: noisy sufficient statistics).",
        OneOf((CLEAR, DP_SGD, NOISY_STATISTICS)),
    )
    epsilon: float = setting(
        1.0,
        "Epsilon of what a table's models tell of one of its rows, per run.",
        Range(0, includes_low=False),
        _FEATURES,
    )
    delta: float = setting(
        1e-5,
        "Delta of the same, of predictions and of the summaries for a graph.",
        Range(0, 1, includes_low=False),
    )
    clip: float = setting(
        1.0,
        "Norm that a row's gradient (dp-sgd), or its share of the statistics, is "
        "clipped to.",
        _CLIP,
        _FEATURES,
    )
    noise_multiplier: float = setting(
        0.0,
        "Deviation of the noise over the clip; 0 = from epsilon and delta over the "
        "planned steps.",
        Range(0),
        _FEATURES,
    )
    sample_rate: float = setting(
        0.0,
        "DP-SGD in ADMM: probability that a local step takes a row, drawn at the site; "
        "0 = chosen.",
        Range(0, math.nextafter(1.0, 2.0)),
        _FEATURES,
    )
    local_steps: int = setting(
        0,
        "DP-SGD in ADMM: local steps per epoch; 0 = chosen.",
        Range(0, MOST_STEPS + 1),
        _FEATURES,
    )
    target_clip: float = setting(
        1.0, '"statistics": clip of a row\'s target.', _CLIP, _FEATURES
    )
    predictions: float = setting(
        0.0,
        "Epsilon of all scores that a run releases of a row; 0 = scores leave without "
        "noise, and are not covered.",
        Range(0),
    )
    prediction_clip: float = setting(
        1.0,
        "Norm that a row's scores are clipped to where predictions are covered.",
        _CLIP,
        _PREDICTIONS,
    )
    adversary: str = setting(
        SERVER,
        'Whom dp-sgd\'s epsilon of strategy "sgd" is for: "server" (sees every '
        'message) or "outsider" (sees the final model).',
        OneOf((SERVER, OUTSIDER)),
        _FEATURES,
    )
    accountant: str = setting(
        RDP, 'Accountant of sub-sampled noise: "rdp" or "prv".', OneOf(ACCOUNTANTS)
    )

    def __post_init__(self) -> None:
        """Check all values, then store numbers given as int for a float as floats."""
        wrong = value_problems(PRIVACY_SETTINGS, vars(self))
        keys = {item.field: item.key for item in PRIVACY_SETTINGS}
        problems = [f"{keys[name]}: {text}" for name, text in wrong.items()]
        problems = problems or list(_conflicts(self))
        if problems:
            raise PrivacySettingsError(problems)
        store_floats(self)

    @classmethod
    def parsed(cls, config: Mapping[str, object]) -> tuple[Self, list[str]]:
        """Read run-config keys; return the settings, and all that is wrong with them.

        Where something is wrong the settings are the defaults.
        """
        values: dict[str, Any] = {}
        problems = []
        for item in PRIVACY_SETTINGS:
            try:
                if item.key in config:
                    values[item.field] = item.parse(config[item.key])
            except ValueError as error:
                problems.append(f"{item.key}: {error}")
        try:
            settings = cls(**values)
        except PrivacySettingsError as error:
            return cls(), problems + error.problems
        return (cls(), problems) if problems else (settings, [])

    def to_dict(self) -> dict[str, object]:
        """Return the settings under their run-config keys, as that file writes them."""
        return {
            item.key: item.render(getattr(self, item.field))
            for item in PRIVACY_SETTINGS
        }

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


PRIVACY_SETTINGS: Final = declared(PrivacySettings, PREFIX)


class PrivacySettingsError(SettingsError):
    """Privacy settings that are not usable.

    Attributes:
        problems: all that is wrong with them.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def _conflicts(settings: PrivacySettings) -> Iterator[str]:
    """Yield the combinations of privacy settings that contradict each other."""
    for rule in PRIVACY_RULES:
        yield from rule(settings)


def _noise_of_labels(settings: PrivacySettings) -> Iterator[str]:
    epsilon, noise = settings.label_epsilon, settings.label_noise
    if settings.labels == CLEAR and (epsilon or noise):
        yield (
            f"{PREFIX}labels: 'clear' has no noise, but {PREFIX}label-epsilon or "
            f"{PREFIX}label-noise is set: use laplace or randomised-response"
        )
    if settings.labels == LAPLACE and bool(epsilon) == bool(noise):
        state = "both are" if epsilon else "none is"
        yield (
            f"{PREFIX}labels: 'laplace' needs one of {PREFIX}label-epsilon and "
            f"{PREFIX}label-noise, and {state} set"
        )
    if settings.labels == RANDOMISED_RESPONSE and noise:
        yield (
            f"{PREFIX}label-noise: it is of 'laplace'; randomised-response takes "
            f"{PREFIX}label-epsilon"
        )
    elif settings.labels == RANDOMISED_RESPONSE and not epsilon:
        yield (
            f"{PREFIX}labels: 'randomised-response' needs {PREFIX}label-epsilon, "
            "which is not set"
        )


def _outsider_sees_scores(settings: PrivacySettings) -> Iterator[str]:
    is_outsider = settings.adversary == OUTSIDER and settings.features == DP_SGD
    if is_outsider and not settings.predictions:
        yield (
            f"{PREFIX}adversary: 'outsider' needs {PREFIX}predictions: scores without "
            "noise go into the other tables' models, which an outsider sees as well"
        )


def _idle_mechanisms(settings: PrivacySettings) -> Iterator[str]:
    """Refuse what is set of a mechanism that is off: the run would go in the clear.

    A value that is the default cannot be told from one that nobody set.
    """
    switches = {item.field: item for item in PRIVACY_SETTINGS}
    for item in PRIVACY_SETTINGS:
        if not item.readers.switch or getattr(settings, item.field) == item.default:
            continue
        switch = switches[item.readers.switch]
        state = getattr(settings, switch.field)
        if state == switch.default:
            yield f"{item.key}: " + item.readers.refusal.format(
                switch=switch.key, state=state
            )


PRIVACY_RULES: Final = (_noise_of_labels, _outsider_sees_scores, _idle_mechanisms)
