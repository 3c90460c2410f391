"""The round ``prepare``: models and the start of training.

A function with ``yield`` sends :class:`Requests` and receives their :class:`Replies`.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec
import numpy as np

from strategies.run.exchange import Part, PartArrays, Replies, Requests, ask
from strategies.run.replies import refuse
from strategies.setup.encoding import TableEncoding
from strategies.setup.joined_rows import JoinedTables, TableLayout
from strategies.setup.masking import ScoreMasking, mask_scores, unmatched_rows
from strategies.setup.problem import LocalArray, TrainedTable
from tp_flower.arrays import AnyArray, BoolArray
from tp_flower.errors import QueryError
from tp_flower.heads import Head
from tp_flower.learning.models.local_model import LINEAR, NUMPY_KINDS, ModelSpec
from tp_flower.objectives import Objective
from tp_flower.privacy.score_masks import FixedPoint
from tp_flower.privacy.sealed_sums import gram_size
from tp_flower.protocol.fields import SEALED
from tp_flower.protocol.training_messages import (
    Outline,
    PreparedPart,
    PreparePart,
    PrepareRequest,
    PrivacyTerms,
    Union,
    Update,
)
from tp_flower.settings import Settings
from tp_flower.settings.rules import general_methods
from tp_flower.terms.groups import table_group
from tp_flower.terms.run_terms import model_seed

Start = tuple[dict[str, TrainedTable], dict[str, LocalArray], FixedPoint | None]
"""By table, what is trained and its untrained scores; the fixed point of masks."""


@dataclass(frozen=True)
class Preparation:
    """The inputs of ``prepare``.

    The objective is that of all joined training rows, even if only a sample is trained
    on; ``cover`` are the sites' statements to each other.
    """

    joined: JoinedTables
    settings: Settings
    encoders: Mapping[str, TableEncoding]
    objective: Objective
    head: Head
    label_reach: float = 1.0
    cover: dict[str, AnyArray] = field(default_factory=dict)

    @property
    def label_scale(self) -> float:
        """The size of the loss's derivatives, including the noise of the labels."""
        return self.objective.gradient_scale(self.label_reach)

    @property
    def score_unit(self) -> float:
        """The size of scores that masks have room for, by public numbers."""
        columns = sum(item.columns.width for item in self.encoders.values())
        return self.objective.score_unit(columns)

    def masking(self) -> ScoreMasking:
        """Return the masks of the run's scores, if they do not leave in the clear."""
        rows = self.joined
        return mask_scores(
            self.settings,
            len(rows.bound.tables),
            self.score_unit,
            lambda: unmatched_rows(rows.bound, rows.extracted, rows.mapping),
        )

    def spec(self, table: str) -> ModelSpec:
        """Return the local model of a table."""
        kind = LINEAR
        # without informative features, a larger model has nothing to learn
        if self.encoders[table].columns.width:
            kind = self.settings.model_of(table)
        return ModelSpec(
            kind=kind,
            outputs=self.head.width,
            intercept=table == self.joined.bound.label_table,
            hidden_sizes=self.settings.hidden_sizes,
            output_scale=self.objective.output_scale,
            seed=model_seed(self.settings.seed, table),
        )


def prepare(
    preparation: Preparation,
    specs: Mapping[str, ModelSpec],
    updates: Mapping[str, Update],
    batches: PartArrays,
    outline: Outline,
) -> Generator[Requests, Replies, Start]:
    """Send models and rows; return the start of training."""
    joined = preparation.joined
    settings = preparation.settings
    check_shards(joined.layouts, settings)
    masking = preparation.masking()
    # masks cancel where all tables send scores: a linear model's are 0
    sends_scores = any(
        spec.kind not in NUMPY_KINDS and updates[table] is not Update.GIVEN
        for table, spec in specs.items()
    )
    unions = _unions(preparation, updates)
    parts: dict[int, PreparePart] = {}
    for table, layout in joined.layouts.items():
        counts = joined.trained_rows(table)
        encoder = preparation.encoders[table].sealed
        model = msgspec.to_builtins(specs[table])
        scale = preparation.label_scale
        # a torch model's parameters have no unit, its penalty has that of the loss
        unit = 1.0
        if specs[table].kind not in NUMPY_KINDS:
            unit = specs[table].output_scale
        for number, fields in layout.set_up_fields().items():
            parts[number] = PreparePart(
                encoder=encoder,
                model=model,
                update=updates[table],
                joined_rows=joined.train.joined_rows,
                l2=settings.l2 * unit**2,
                device=settings.device,
                label_scale=scale,
                mean_multiplicity=float(counts.mean()) if len(counts) else 1.0,
                **fields,
                **batches.get(number, {}),
                union=unions.get(table),
                unmatched=masking.unmatched.get(number, {}),
                cover=preparation.cover,
            )
    request = PrepareRequest(
        privacy=PrivacyTerms.of(settings.privacy),
        outline=outline,
        masking=masking.terms,
        sends_scores=sends_scores,
        parts=parts,
    )
    replies = yield ask(request, joined.parts)
    tables: dict[str, TrainedTable] = {}
    initial: dict[str, LocalArray] = {}
    for name, layout in joined.layouts.items():
        prepared = _read_table(
            layout, specs[name], updates[name], replies, unions.get(name)
        )
        prepared = replace(
            prepared,
            is_masked=masking.point is not None,
            takes_effects=all(
                replies.body(part, PreparedPart).takes_effects for part in layout.parts
            ),
            takes_factors=all(
                replies.body(part, PreparedPart).takes_factors for part in layout.parts
            ),
        )
        has_first = sends_scores and (prepared.is_masked or not prepared.is_linear)
        initial[name] = (
            prepared.gather_scores(replies) if has_first else prepared.no_scores()
        )
        tables[name] = prepared
    return tables, initial, masking.point


def check_shards(layouts: Mapping[str, TableLayout], settings: Settings) -> None:
    """Refuse a table in several shards if the method does not say how they train."""
    if settings.method.updates:
        return
    for name, layout in layouts.items():
        if len(layout.parts) > 1:
            raise QueryError(
                f"table {name!r} is in {len(layout.parts)} shards, and strategy "
                f"{settings.method_name!r} trains none together: use "
                f"{general_methods()}"
            )


def _unions(
    preparation: Preparation, updates: Mapping[str, Update]
) -> dict[str, Union]:
    """Return, by table, the shards whose arrays are summed."""
    is_sealed = preparation.settings.privacy.unions == SEALED
    extracted = preparation.joined.extracted
    unions = {}
    for name, layout in preparation.joined.layouts.items():
        if updates[name] in (Update.LOCAL, Update.GIVEN):
            continue
        summed = summed_parts(layout, updates[name])
        shards = None
        # to list all shards for each of them would make the square of their number
        if summed != layout.parts:
            shards = {str(p.number): extracted.public_keys[p.node] for p in summed}
        group = table_group(extracted.proposal, name) if is_sealed else None
        unions[name] = Union(group=group, shards=shards)
    return unions


def summed_parts(layout: TableLayout, update: Update) -> tuple[Part, ...]:
    """Return the shards whose arrays are summed.

    A shard without rows to train on does not enter the mean of a consensus; it only
    takes its result.
    """
    trained = tuple(
        part
        for part, rows in zip(layout.parts, layout.rows, strict=True)
        if rows.trained
    )
    if trained and update is Update.CONSENSUS:
        return trained
    return layout.parts


class ModelShape(Protocol):
    """What a site says of a model that it has prepared."""

    @property
    def features(self) -> int:
        """The encoded columns."""

    @property
    def penalised(self) -> AnyArray:
        """Which parameters are penalised, (p,)."""


def common_shape(
    parts: Sequence[Part], bodies: Sequence[ModelShape]
) -> tuple[int, BoolArray]:
    """Return the encoded columns d and the penalised parameters (p,) of all shards."""
    site = parts[0].site
    first = bodies[0]
    for part, body in zip(parts, bodies, strict=True):
        if body.features != first.features:
            raise refuse(part, f"a different number of features than {site!r}")
        if body.penalised.shape != first.penalised.shape:
            raise refuse(part, f"a different number of parameters than {site!r}")
    return first.features, first.penalised.astype(np.bool_)


def _read_table(
    layout: TableLayout,
    spec: ModelSpec,
    update: Update,
    replies: Replies,
    union: Union | None,
) -> TrainedTable:
    """Return a table that its sites have prepared for training."""
    bodies = [replies.body(part, PreparedPart) for part in layout.parts]
    features, penalised = common_shape(layout.parts, bodies)
    is_linear = spec.kind == "linear"
    table = TrainedTable(
        name=layout.name,
        parts=layout.parts,
        rows=layout.rows,
        update=update,
        model=spec.kind,
        features=features,
        outputs=spec.outputs,
        has_intercept=spec.intercept,
        # the largest eigenvalue of a sum is at most the sum of the largest
        largest_curvature=sum(body.largest_curvature for body in bodies if is_linear),
        mean_curvature=tuple(body.mean_curvature for body in bodies),
        penalised=penalised,
        gradient_noise=math.hypot(*(body.gradient_noise or 0.0 for body in bodies)),
        gram_deviation=math.hypot(*(body.gram_deviation or 0.0 for body in bodies)),
        summed=summed_parts(layout, update),
        is_sealed=union is not None and union.group is not None,
    )
    if update is not Update.GRAM:
        return table
    return replace(table, gram=table.sum_shares(replies, gram_size(table.width)))
