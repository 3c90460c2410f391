"""Settings of privacy: what is protected, by which mechanism, how much.

In the run config they are the keys ``privacy.*``. They bind the run, not the sites: a
site's own policy decides what may leave it, and refuses a run that protects less.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

from tp_flower.protocol import fields
from tp_flower.protocol.training_messages import MOST_STEPS
from tp_flower.settings import declare

_CLIP: Final = declare.Range(1e-12, 1e12)
_IDLE: Final = "it is set, but {switch} is {state!r}, which protects nothing"
_LABELS: Final = declare.Readers(switches=("labels",), refusal=_IDLE)
_EITHER: Final = declare.Readers(switches=("labels", "features"), refusal=_IDLE)
_FEATURES: Final = declare.Readers(switches=("features",), refusal=_IDLE)
_PREDICTIONS: Final = declare.Readers(switches=("predictions",), refusal=_IDLE)

_RANGE: Final = declare.list_of(
    lambda end: float(str(end)),
    'a range, low below high, such as "0, 5"',
    lambda ends: (
        not ends or (len(ends) == 2 and -math.inf < ends[0] < ends[1] < math.inf)
    ),
)
_CLASSES: Final = declare.list_of(
    str, "a list of different classes", lambda names: len(set(names)) == len(names)
)


@dataclass(frozen=True)
class PrivacySettings:
    """Privacy: mechanisms and budgets (PRIVACY.md); a site may demand more, not less.

    Every value is checked on construction; SettingsError lists the refused ones.
    """

    prefix: ClassVar = "privacy."

    labels: str = declare.setting(
        fields.CLEAR,
        'Labels: "clear", "randomised-response" (classes), or "laplace" (classes or '
        "numbers).",
        declare.OneOf((fields.CLEAR, fields.LAPLACE, fields.RANDOMISED_RESPONSE)),
    )
    label_epsilon: float = declare.setting(
        0.0,
        "Epsilon of a label (local differential privacy); 0 = from label-noise.",
        declare.Range(0),
    )
    label_noise: float = declare.setting(
        0.0,
        "Standard deviation of label noise (Laplace, Eq. 25); 0 = from label-epsilon.",
        declare.Range(0),
    )
    label_range: tuple[float, ...] = declare.setting(
        (),
        'Range that private labels of a regression are clipped to, "low, high", '
        "also in noisy moments: declare it without looking at the data.",
        declare.Form("low, high", _RANGE),
        _EITHER,
    )
    label_classes: tuple[str, ...] = declare.setting(
        (),
        'Classes of a private label that is not true or false, "a, b, c": declare '
        "them without looking at the data.",
        declare.Form("classes, comma separated", _CLASSES),
        _LABELS,
    )
    label_correction: bool = declare.setting(
        True, "Correct training and metrics for the noise on the labels (without bias)."
    )
    features: str = declare.setting(
        fields.CLEAR,
        'Gradients and models: "clear", "dp-sgd" (any model), or "statistics" (linear '
        "models: noisy sufficient statistics, by ADMM or moments). It protects models; "
        "features have an epsilon by moments, or if predictions are covered, too, and "
        "only with declared encoders.",
        declare.OneOf((fields.CLEAR, fields.DP_SGD, fields.NOISY_STATISTICS)),
    )
    epsilon: float = declare.setting(
        1.0,
        "Epsilon of a table's models in a run, per row or per unit of its policy.",
        declare.Range(0, includes_low=False),
        _FEATURES,
    )
    delta: float = declare.setting(
        1e-5,
        "Delta of privacy.epsilon, of predictions and of the summaries for a graph.",
        declare.Range(0, 1, includes_low=False),
    )
    clip: float = declare.setting(
        1.0,
        "Norm that a row's gradient (dp-sgd), or its share of the statistics, is "
        "clipped to.",
        _CLIP,
        _FEATURES,
    )
    noise_multiplier: float = declare.setting(
        0.0,
        "Standard deviation of the noise, divided by the clip; 0 = from epsilon, delta "
        "and the planned steps.",
        declare.Range(0),
        _FEATURES,
    )
    sample_rate: float = declare.setting(
        0.0,
        "DP-SGD in ADMM: probability that a local step takes a row, drawn at the "
        "site; 0 = chosen.",
        declare.Range(0, math.nextafter(1.0, 2.0)),
        _FEATURES,
    )
    local_steps: int = declare.setting(
        0,
        "DP-SGD in ADMM: local steps per epoch; 0 = chosen.",
        declare.Range(0, MOST_STEPS + 1),
        _FEATURES,
    )
    target_clip: float = declare.setting(
        1.0, '"statistics": clip of a row\'s target.', _CLIP, _FEATURES
    )
    scores: str = declare.setting(
        fields.MASKED,
        'Scores: "masked" (the server sees their sum over the tables of each joined '
        'row), or "clear".',
        declare.OneOf((fields.MASKED, fields.CLEAR)),
    )
    unions: str = declare.setting(
        fields.SEALED,
        'What the shards of a table add up: "sealed" (its shards read the sums, the '
        'server nothing), or "clear" (the server reads what each of them adds).',
        declare.OneOf((fields.SEALED, fields.CLEAR)),
    )
    predictions: float = declare.setting(
        0.0,
        "Epsilon of all scores that a run releases about a row; 0 = scores leave "
        "without noise, and features have no epsilon.",
        declare.Range(0),
    )
    prediction_clip: float = declare.setting(
        1.0,
        "Norm that a row's scores are clipped to where predictions are covered.",
        _CLIP,
        _PREDICTIONS,
    )

    def __post_init__(self) -> None:
        values, problems = declare.read_values(PRIVACY_SETTINGS, vars(self))
        declare.store(self, values)
        if problems := problems or [*_conflicts(self), *_unused_settings(self)]:
            raise declare.UnusableSettingsError(problems)

    def covered(self, *kinds: str) -> list[str]:
        """Return which of "labels", "features" and "predictions" have a mechanism."""
        return [kind for kind in kinds if getattr(self, f"covers_{kind}")]

    @property
    def covers_labels(self) -> bool:
        """Whether labels leave only with noise."""
        return self.labels != fields.CLEAR

    @property
    def covers_features(self) -> bool:
        """Whether models (gradients, statistics, parameters) are private."""
        return self.features != fields.CLEAR

    @property
    def covers_predictions(self) -> bool:
        """Whether scores leave only with noise."""
        return self.predictions > 0


PRIVACY_SETTINGS: Final = declare.declared(PrivacySettings)


def _conflicts(settings: PrivacySettings) -> Iterator[str]:
    """Refuse noise of labels that is missing, given twice or of another mechanism."""
    epsilon = settings.label_epsilon
    noise = settings.label_noise
    if settings.labels == fields.CLEAR and (epsilon or noise):
        yield (
            "privacy.labels: 'clear' has no noise, but privacy.label-epsilon or "
            "privacy.label-noise is set: use laplace or randomised-response"
        )
    if settings.labels == fields.LAPLACE and bool(epsilon) == bool(noise):
        yield (
            "privacy.labels: 'laplace' needs either privacy.label-epsilon or "
            f"privacy.label-noise; {'both are' if epsilon else 'neither is'} set"
        )
    if settings.labels == fields.RANDOMISED_RESPONSE and noise:
        yield (
            "privacy.label-noise: is for 'laplace'; randomised-response takes "
            "privacy.label-epsilon"
        )
    elif settings.labels == fields.RANDOMISED_RESPONSE and not epsilon:
        yield (
            "privacy.labels: 'randomised-response' needs privacy.label-epsilon, which "
            "is not set"
        )


def _unused_settings(settings: PrivacySettings) -> Iterator[str]:
    """Yield errors for settings of a mechanism that is off: nothing would be covered.

    A value equal to the default cannot be told from one that nobody set.
    """
    switches = {item.field: item for item in PRIVACY_SETTINGS}
    for item in PRIVACY_SETTINGS:
        names = item.readers.switches
        if not names or getattr(settings, item.field) == item.default:
            continue
        if all(getattr(settings, n) == switches[n].default for n in names):
            switch = switches[names[0]]
            refusal = item.readers.refusal.format(
                switch=switch.key, state=switch.default
            )
            yield f"{item.key}: {refusal}"
