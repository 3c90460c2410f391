"""Epsilons by subject: a row's features, its table's model, its scores, its label.

A mechanism covers one kind of release. What the kinds together tell of a row's features
is bounded only if nothing without noise depends on them::

    features  every release that depends on features has noise, the model was trained
              with noise in the same run, the encoder was declared, and no feature is a
              key: given the keys and counts alone
    models    what a row adds to its table's model, given the messages that its site
              received and the encoder: for whoever reads the model, not for whoever
              reads the scores
    scores    a row's scores, given the model
    labels    each label by itself, whatever else is known

=========================================  ========  ======
what leaves                                features  models
=========================================  ========  ======
noisy models, masked or clear scores       none      number
noisy scores, models without noise         none      none
noisy models and scores, fitted encoder    none      number
noisy models and scores, declared encoder  number    number
noisy scores of an earlier run's model     none      ""
noisy second moments, declared encoder     number    ""
=========================================  ========  ======
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from msgspec.structs import replace

from tp_flower.privacy import plan
from tp_flower.privacy.accounting import epsilon
from tp_flower.privacy.mechanisms import (
    GIVEN_ENCODER,
    GIVEN_FILTERS,
    GIVEN_KEYS,
    GIVEN_MESSAGES,
    GIVEN_NOISELESS_MODEL,
    GIVEN_SAVED_MODEL,
    SCORE_SUMS,
    SCORES_TELL,
    Mechanism,
)

FEATURES = "features"
MODELS = "models"
SCORES = "scores"
LABELS = "labels"
NONE: Final = "none"

_OTHERS: Final = "others"
KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    FEATURES: (
        *("statistics", "features", "ranks", "metrics", "trees", "cutoffs"),
        *("shard-keys", "partials"),
        *("weights", "offsets", "times"),
        *("sensitivities", "drawn-rows", "masked-sensitivities", "bins", "regions"),
        *(plan.SAMPLED_ROWS, plan.CENTRES, plan.SECOND_MOMENTS, plan.WEIGHTED_MOMENTS),
        *(plan.CATEGORIES, "site-moments", "moment-metrics", "inspection"),
    ),
    MODELS: (
        *(plan.GRAM, plan.MOMENTS, plan.PARAMETERS, plan.MODEL, plan.GRADIENTS),
        *(plan.CURVATURE, plan.PRODUCTS, plan.COEFFICIENTS, "summaries"),
    ),
    SCORES: (plan.SCORES, plan.BATCH_SCORES),
    LABELS: ("labels", "label-sums", "label-magnitude"),
    # unmatched scores lack a mask, not the noise that scores have; factors are numbers
    # of the server's, by which it knows keys again
    _OTHERS: ("keys", "counts", "unmatched", "factors"),
}
"""The kinds of releases, by what they tell of."""
_SUBJECTS: Final = {kind: subject for subject, kinds in KINDS.items() for kind in kinds}

_CONDITIONS: Final[Mapping[str, str]] = {
    GIVEN_MESSAGES: "no noise covers scores",
    GIVEN_FILTERS: "filters read what noise covers",
    GIVEN_KEYS: "keys tell features that are joined on",
    GIVEN_ENCODER: "the encoder is fitted to the rows without noise",
    GIVEN_NOISELESS_MODEL: "the model is trained without noise",
    GIVEN_SAVED_MODEL: "the model comes from an earlier run",
}
"""By condition in the scope of a covered release, why features have no epsilon."""


class Released(NamedTuple):
    """Releases of one kind from one source.

    ``mechanism`` is None if nothing covers them.
    """

    what: str
    scope: str
    mechanism: Mechanism | None
    times: int = 1

    @property
    def subject(self) -> str:
        """The subject of the releases.

        A kind that is unknown to this version may tell of features.
        """
        return _SUBJECTS.get(self.what, FEATURES)


@dataclass(frozen=True)
class Epsilons:
    """Epsilons of all that a source has released, by what they are true of.

    Each is a number, ``inf`` without a bound; or "none"; or "" if nothing of the kind
    left. ``features`` may be "none: " and the reason.
    """

    features: float | str
    models: float | str
    scores: float | str
    labels: float | str


def epsilons(released: Iterable[Released], delta: float) -> Epsilons:
    """Return the epsilons of all that one source has released.

    >>> from tp_flower.privacy.mechanisms import PureDp
    >>> masked = Released("scores", SCORE_SUMS, None)
    >>> found = epsilons([Released("labels", "", PureDp(2.0)), masked], 1e-5)
    >>> found.labels, found.features
    (2.0, 'none: sums of scores tell of the features')
    """
    releases_by_subject: dict[str, list[Released]] = {subject: [] for subject in KINDS}
    for release in released:
        releases_by_subject[release.subject].append(release)

    def spent(releases: list[Released]) -> float | str:
        if not releases:
            return ""
        if _list_uncovered(releases):
            return NONE
        return compose(releases, delta)

    feature_releases = [
        release
        for name in (FEATURES, MODELS, SCORES)
        for release in releases_by_subject[name]
    ]
    reason = _reason(feature_releases)
    return Epsilons(
        features=f"{NONE}: {reason}" if reason else spent(feature_releases),
        models=spent(releases_by_subject[MODELS]),
        scores=spent(releases_by_subject[SCORES]),
        labels=spent(releases_by_subject[LABELS]),
    )


def compose(released: Iterable[Released], delta: float) -> float:
    """Return the epsilon of the covered releases together: what a budget bounds."""
    spent = [
        replace(one.mechanism, count=one.mechanism.count * one.times)
        for one in released
        if one.mechanism is not None
    ]
    return epsilon(spent, delta)


def _list_uncovered(released: Iterable[Released]) -> list[Released]:
    return [one for one in released if one.mechanism is None]


def _reason(released: list[Released]) -> str:
    """Return why features have no epsilon; "" if all that depends on them has noise."""
    uncovered = _list_uncovered(released)
    scopes = {one.scope for one in uncovered}
    if SCORES_TELL in scopes:
        return SCORES_TELL.removeprefix(f"{NONE}: ")
    if SCORE_SUMS in scopes:
        return "sums of scores tell of the features"
    if uncovered:
        return (
            f"no noise covers {', '.join(dict.fromkeys(one.what for one in uncovered))}"
        )
    conditions = (
        reason
        for condition, reason in _CONDITIONS.items()
        if any(condition in one.scope for one in released)
    )
    return next(conditions, "")
