"""Settings of the sites: how many there must be, and how long to wait for them."""

from dataclasses import dataclass
from typing import Final

from tp_flower.settings.allowed import OneOf, Range
from tp_flower.settings.declare import setting
from tp_flower.settings.run import EVALUATE, EXPLAIN, PREDICT, TRAIN

STOP: Final = "stop"
STALE: Final = "stale"
MEAN: Final = "mean"

ABSENCES: Final = {
    TRAIN: (STOP, STALE),
    EXPLAIN: (STOP,),
    PREDICT: (STOP, MEAN),
    EVALUATE: (STOP, MEAN),
}
"""By mode, the values of ``on-missing``."""


@dataclass(frozen=True)
class SiteSettings:
    """The sites: how many there must be, and how long to wait for them."""

    site_timeout: float = setting(
        600.0,
        "Seconds to wait for a site in a round; it is asked again meanwhile. Above 70, "
        "a crashed site is reported as such.",
        Range(0, includes_low=False),
    )
    on_missing: str = setting(
        STOP,
        'What to do about a site that does not answer in time: "stop" (a checkpoint is '
        'kept), "stale" (ADMM goes on with its last scores), or, to predict or '
        'evaluate, "mean" (the mean contribution of its table; such rows are marked).',
        OneOf(STOP, STALE, MEAN),
    )
    max_stale: int = setting(
        3, '"stale": epochs in a row that a site may be missing.', Range(1)
    )
    min_sites: int = setting(
        0,
        "SuperNodes that must be online; 0 = as many as it takes to host all tables of "
        "the query.",
        Range(0),
    )
    wait_seconds: float = setting(60.0, "Seconds to wait for them.", Range(0))
