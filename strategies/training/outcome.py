"""What a run has come to at its end: digests, coefficients, contributions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from strategies.run.exchange import Part, Replies
from strategies.run.reply_checks import array_of, has_array
from strategies.setup.problem import Federation, Table
from tp_flower.arrays import FloatArray
from tp_flower.errors import ReplyError
from tp_flower.learning.contributions import Contribution, contributions
from tp_flower.model_names import ModelVersion
from tp_flower.protocol import FinishedPart, FinishRequest

INTERCEPT: Final = "(intercept)"


@dataclass(frozen=True)
class Outcome:
    """What a run has come to, besides its metrics.

    Attributes:
        digests: of the parts that sites keep, by number.
        coefficients: (d [+ 1], d_c) by table, of those that may be shown.
        contributions: by table.
    """

    digests: Mapping[int, str] = field(default_factory=dict)
    coefficients: Mapping[str, FloatArray] = field(default_factory=dict)
    contributions: Mapping[str, Contribution] = field(default_factory=dict)


def finish_request(model: ModelVersion) -> FinishRequest:
    """Return what ends a run that went well: the sites keep its models."""
    return FinishRequest(
        keep_models=True, model_name=model.name, model_version=model.version
    )


def read_outcome(
    replies: Replies, federation: Federation, local_scores: Mapping[str, FloatArray]
) -> Outcome:
    """Return what the sites' last replies, and their last scores, come to.

    Args:
        replies: to the message that ends the run.
        federation: the training problem.
        local_scores: (n_i, d_c) of the final models, by table.

    Raises:
        ReplyError: a digest or a coefficient is malformed.
    """
    shown = {
        name: weights
        for name, table in federation.tables.items()
        if (weights := _coefficients(replies, table)) is not None
    }
    return Outcome(
        digests=read_digests(replies, federation.parts),
        coefficients=shown,
        contributions=contributions(
            federation.train, local_scores, federation.weighting.train_rows
        ),
    )


def contribution_facts(outcome: Outcome) -> dict[str, dict[str, object]]:
    """Return what a report says of the tables' contributions."""
    return {
        table: {"share": own.share, "mean-score": own.mean_score.tolist()}
        for table, own in outcome.contributions.items()
    }


def coefficient_facts(
    outcome: Outcome, federation: Federation
) -> dict[str, list[dict[str, object]]]:
    """Return what a report says of the coefficients that sites have shown.

    They are of encoded features, those of a standardised number per deviation. The
    output is a class, where there are several.
    """
    facts = {}
    for table, weights in outcome.coefficients.items():
        names = [*federation.encoders[table].feature_names, INTERCEPT]
        outputs = federation.classes if weights.shape[1] > 1 else ("score",)
        facts[table] = [
            {"feature": feature, "output": output, "value": float(value)}
            for feature, row in zip(names, weights, strict=False)
            for output, value in zip(outputs, row, strict=True)
        ]
    return facts


def read_digests(replies: Replies, parts: Iterable[Part]) -> dict[int, str]:
    """Return the digests that the sites report.

    A site without a state folder has none, nor has one that did not answer.
    """
    digests = {
        number: body.digest
        for number, body in replies.parts.items()
        if isinstance(body, FinishedPart)
    }
    return {part.number: digests.get(part.number) or "" for part in parts}


def _coefficients(replies: Replies, table: Table) -> FloatArray | None:
    """Return a linear model's coefficients, the mean of the shards that show them.

    Shards that agree through statistics or gradients have the same ones.
    """
    shape = (table.features + int(table.has_intercept), table.outputs)
    shown = [
        array_of(replies, part, "coefficients", shape).astype(np.float64)
        for part in table.parts
        if has_array(replies, part, "coefficients")
    ]
    if shown and not table.is_linear:
        raise ReplyError(f"table {table.name}: coefficients of a model that has none")
    return np.mean(shown, axis=0) if shown else None
