"""What a site does for the graph: train alone, and sum up its rows or its model."""

from typing import Final

import numpy as np

from client_apps.handlers.personalised.participants import PersonalPart, personal_parts
from client_apps.handlers.personalised.prepare import SUMMARY
from client_apps.rounds.site import Site
from tp_flower.arrays import FloatArray
from tp_flower.errors import SiteError
from tp_flower.learning.accelerated import descend
from tp_flower.learning.models.encoded_rows import on_host
from tp_flower.learning.models.local_model import LinearModel
from tp_flower.personalised.site_summaries import (
    EMBEDDING_BOUND,
    RandomFeatures,
    mean_moments,
    moments_bound,
    noisy_mean,
)
from tp_flower.protocol import (
    SiteSummary,
    SummariseReply,
    SummariseRequest,
)
from tp_flower.randomness import Stream, generator
from tp_flower.settings import BY_DATA, BY_FEATURES, BY_MODELS

ALONE_TOLERANCE: Final = 1e-7
MOST_STEPS: Final = 3000
LEAST_CURVATURE: Final = 1e-30
MOST_TORCH_STEPS: Final = 300
"""An MLP's steps alone are about as many as its rounds with others."""
PAIRS: Final = 128
"""Of random features: a summary is twice as many numbers."""


def summarise(site: Site, request: SummariseRequest) -> SummariseReply:
    """Reply with the metrics of the model of the site alone, and what a graph needs."""
    parts: dict[int, SiteSummary] = {}
    for part in personal_parts(site, request.base):
        kind = _kind(part) if request.summaries else ""
        is_trained = request.alone or kind == BY_MODELS
        alone = _alone(part) if is_trained else part.start
        summary = None
        if kind:
            found = alone if kind == BY_MODELS else _summary(site, part, kind, request)
            summary = found.astype(np.float32)
        local = part.metrics(alone) if request.alone else None
        parts[part.number] = SiteSummary(local=local, summary=summary)
    return SummariseReply(parts)


def _kind(part: PersonalPart) -> str:
    """Return what was planned to leave of a part.

    Raises:
        SiteError: nothing was.
    """
    kind = str(part.summary["kind"])
    if kind not in (BY_DATA, BY_FEATURES, BY_MODELS):
        raise SiteError("malformed request: no summary was planned in this run")
    return kind


def _alone(part: PersonalPart) -> FloatArray:
    """Return the minimiser of the site's own objective, (p,)."""
    own = part.objective
    is_linear = isinstance(own.model, LinearModel)
    return descend(
        own.gradient,
        part.start,
        1.0 / max(part.curvature, LEAST_CURVATURE),
        tolerance=ALONE_TOLERANCE,
        most_steps=MOST_STEPS if is_linear else MOST_TORCH_STEPS,
    )


def _summary(
    site: Site, part: PersonalPart, kind: str, request: SummariseRequest
) -> FloatArray:
    """Return the summary of a part's trained rows, with the noise that is planned."""
    own, multiplier = part.objective, float(part.summary["multiplier"])
    features = np.asarray(on_host(own.features))
    if kind == BY_DATA:
        labels = _label_columns(part, request.label_scale)
        rows = np.column_stack([features, labels])
        rng = generator(request.seed, Stream.SUMMARIES)
        mean = RandomFeatures.draw(rows.shape[1], PAIRS, rng).mean(rows)
        bound = EMBEDDING_BOUND
    else:
        clip = float(np.sqrt(max(features.shape[1], 1))) if multiplier else np.inf
        mean = mean_moments(features, clip)
        bound = moments_bound(clip) if multiplier else 0.0
    if not multiplier:
        return mean
    site.uses.append((part.number, SUMMARY, 0))
    return noisy_mean(mean, bound, len(own.labels), multiplier, site.noise)


def _label_columns(part: PersonalPart, scale: float) -> FloatArray:
    """Return the labels as columns like standardised features, (n, 1 or classes)."""
    own = part.objective
    labels = own.labels[:, None]
    if own.loss.name == "squared":
        labels = (labels - own.base[0]) / scale
    elif own.loss.outputs == 1:
        labels = 2.0 * labels - 1.0
    else:
        labels = 2.0 * (labels == np.arange(own.loss.outputs)) - 1.0
    return np.asarray(labels, np.float64)
