"""The parts of a proposed query that each shard runs: keys, label, noise and split.

The server makes its requests by :func:`extract_parts`, and a site compares them with
it.
"""

from dataclasses import asdict
from typing import Any

import numpy as np
from msgspec.structs import replace

from tp_flower import splits
from tp_flower.arrays import BoolArray
from tp_flower.errors import SettingsError
from tp_flower.folds import FoldArray, folds_at_random
from tp_flower.objectives import takes_numbers
from tp_flower.privacy.label_mechanisms import LabelPlan, epsilon_of_noise
from tp_flower.protocol.fields import LAPLACE
from tp_flower.protocol.proposal import Proposal, ProposedPart
from tp_flower.protocol.setup_messages import ExtractPart, LabelTerms, SplitTerms
from tp_flower.randomness import Stream, generator
from tp_flower.settings import Settings
from tp_flower.settings.declare import AUTO, items_of
from tp_flower.settings.run import EXPLAIN, PREDICTING, REGRESSION, TRAIN
from tp_flower.terms.groups import key_groups
from tp_flower.terms.partials import parts_with_groups


def extract_parts(proposal: Proposal, settings: Settings) -> dict[int, ExtractPart]:
    """Return the requests for the parts' rows, as far as the proposal says them.

    How texts are read, and the types of columns without a value, follow from what the
    shards have said of themselves: it has the rest.
    """
    groups = key_groups(proposal)
    grouped = set().union(*parts_with_groups(proposal, settings))
    return {
        number: replace(
            _extract_part(proposal, settings, part),
            groups=number in grouped,
            key_groups=groups[part.table],
        )
        for number, part in proposal.parts.items()
    }


def _extract_part(
    proposal: Proposal, settings: Settings, part: ProposedPart
) -> ExtractPart:
    """Return the request for a part that follows from the proposal."""
    fields: dict[str, Any] = {}
    if part.fragment.get("label") is not None:
        if plan := label_plan(settings):
            fields["label_privacy"] = LabelTerms(**asdict(plan))
        fields["local_label"] = local_label(settings)
    if part.table == proposal.label_table and settings.mode in PREDICTING:
        fields["row_key"] = row_key(settings)
    if part.table == proposal.split_table and not settings.metrics_by:
        fields["split"] = split_terms(settings, len(proposal.shards_of(part.table)))
    return ExtractPart(
        shard=part.shard, fragment=part.fragment, groups=False, key_groups=[], **fields
    )


def row_key(settings: Settings) -> list[str]:
    """Return the names of the columns that identify a predicted row."""
    return [column.split(".")[-1] for column in items_of(settings.row_key)]


def local_label(settings: Settings) -> str | None:
    """Return the task of a run whose labels stay at the sites; None if they leave."""
    if settings.mode not in (TRAIN, EXPLAIN) or not settings.method.keeps_labels:
        return None
    # sites do not show the values of a label that stays a number
    if needs_numbers(settings):
        return REGRESSION
    return settings.task


def shares_label_scale(proposal: Proposal, settings: Settings) -> bool:
    """Return whether several shards add up sums of their labels in one fixed point.

    With noise, labels are clipped to a range that has been declared.
    """
    is_padded = settings.pads_sums and settings.method.keeps_labels
    is_padded = is_padded and not settings.privacy.covers_features
    return is_padded and len(proposal.shards_of(proposal.label_table)) > 1


def label_plan(settings: Settings) -> LabelPlan | None:
    """Return the noise that the sites add to labels, None for labels in the clear."""
    privacy = settings.privacy
    task = settings.task
    if not privacy.covers_labels:
        return None
    limits = privacy.label_range
    classes = privacy.label_classes
    if limits and (classes or task == "classification"):
        other = "task = 'classification'"
        if classes:
            other = "privacy.label-classes"
        raise SettingsError(f"privacy.label-range is for regression: not with {other}")
    if (limits or task == "regression") and privacy.labels != LAPLACE:
        raise SettingsError(
            f"privacy.labels: {privacy.labels!r} is for classes; use {LAPLACE!r}"
        )
    if task == "regression" and (classes or not limits):
        state = "it is not set"
        if classes:
            state = "not privacy.label-classes"
        raise SettingsError(
            "private labels of a regression need privacy.label-range, the lowest and "
            f"highest value that labels are clipped to; {state}"
        )
    epsilon = privacy.label_epsilon or epsilon_of_noise(privacy.label_noise, limits)
    return LabelPlan(privacy.labels, epsilon, classes, limits)


def needs_numbers(settings: Settings) -> str:
    """Return the setting by which numbers, even if few, stay numbers; "" if none."""
    if settings.method.solvers:
        return "the strategy"
    if settings.loss != AUTO and takes_numbers(settings.loss):
        return f"loss = {settings.loss!r}"
    return ""


def split_terms(settings: Settings, shards: int) -> SplitTerms:
    """Return how the shards of a table decide, or tell, what is held out."""
    last = splits.BY_ORDER if shards == 1 else splits.BY_VALUE
    shares = split_shares(settings)
    return SplitTerms(
        by=splits.BY_HASH if settings.split.kind == splits.GROUP else last,
        seed=settings.seed,
        test=shares.test,
        validation=shares.validation,
        folds=settings.folds if settings.split.kind == splits.GROUP else 0,
    )


def sampled_rows(rows: int, settings: Settings) -> BoolArray:
    """Return which rows of the label's table take part, (n,): a sample, or all."""
    if settings.sample == 1.0:
        return np.ones(rows, np.bool_)
    return splits.split_rows(
        rows, settings.sample, generator(settings.seed, Stream.SAMPLE)
    )


def random_subset(taking_part: BoolArray, settings: Settings) -> splits.SubsetArray:
    """Return the subset of each row of a table that is split at random, (n,)."""
    rng = generator(settings.seed, Stream.SPLIT)
    return splits.split_at_random(taking_part, split_shares(settings), rng)


def random_folds(taking_part: BoolArray, settings: Settings) -> FoldArray:
    """Return the fold of each row of a table that is split at random, (n,)."""
    rng = generator(settings.seed, Stream.FOLDS)
    return folds_at_random(taking_part, settings.folds, rng)


def split_shares(settings: Settings) -> splits.Shares:
    """Return the shares of rows that are tested on, and that validate."""
    return splits.Shares(settings.test_fraction, settings.validation_share)
