"""The manifest of the model that a run has trained."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from strategies.inference import manifest
from strategies.run.exchange import Part
from strategies.setup.columns import Columns, bind_columns
from strategies.setup.problem import PreparedRun
from strategies.training.strategy import TrainingStrategy
from tp_flower.heads import Contribution
from tp_flower.learning.joint_trees import SHARE
from tp_flower.learning.models.local_model import NUMPY_KINDS
from tp_flower.model_names import software
from tp_flower.objectives import Response
from tp_flower.objectives.survival import SurvivalResponse
from tp_flower.query import BoundQuery


def make_manifest(strategy: TrainingStrategy) -> manifest.Manifest:
    """Return the manifest of a successful run."""
    problem = strategy.training_problem
    report = strategy.report
    if problem is None or not strategy.is_finished:
        raise RuntimeError("there is no model before the run has ended")
    bound, columns = bind_columns(strategy.bind, strategy.inventory)
    tables = tuple(_model_tables(strategy, problem, bound, columns))
    joint = strategy.method.joint
    return manifest.Manifest(
        name=strategy.model.name,
        model_version=strategy.model.version,
        created=report.started,
        status=report.status,
        query=report.query,
        settings=dict(report.settings),
        label_table=bound.label_table,
        label=manifest.label_text(bound.fragments_of(bound.label_table)),
        offset=manifest.offset_text(bound.fragments_of(bound.label_table)),
        head=problem.head.name,
        loss=problem.response.loss,
        classes=problem.classes,
        label_kind=problem.response.kind,
        base_score=tuple(problem.base_score.tolist()),
        has_base=problem.has_base,
        score_unit=problem.score_unit,
        divided=strategy.outcome.divided.table if strategy.outcome.divided else "",
        tables=tables,
        train=manifest.finite_metrics(report.final_train),
        test=manifest.finite_metrics(report.final_test),
        joined_rows=report.joined_rows_train,
        held_out=strategy.held_out_digest,
        tested=strategy.tested_digest,
        trees=joint.trees.text if joint else "",
        tables_share=SHARE if joint else 1.0,
        **_survival_fields(strategy.response),
        versions=software(
            has_torch=not {table.kind for table in tables} <= NUMPY_KINDS.keys()
        ),
    )


def _survival_fields(response: Response | None) -> dict[str, Any]:
    """Return the manifest's fields on times of events; none of other labels."""
    if not isinstance(response, SurvivalResponse):
        return {}
    return {
        "baselines": tuple(
            manifest.ModelBaseline(
                times=each.times,
                hazards=each.hazards,
                stratum=each.stratum,
                is_thinned=each.is_thinned,
            )
            for each in response.baselines
        ),
        "survival_times": response.times,
    }


def _model_tables(
    strategy: TrainingStrategy,
    problem: PreparedRun,
    bound: BoundQuery,
    columns: Columns,
) -> Iterator[manifest.ModelTable]:
    """Yield the entry of every table of the query."""
    outcome = strategy.outcome
    joint = strategy.method.joint
    shards = strategy.inventory.by_place

    first_regions: Mapping[int, int] = {}
    if outcome.divided is not None:
        first_regions = outcome.divided.first

    def part_of(part: Part) -> manifest.ModelPart:
        # found again by site, table and shard: node numbers change
        shard = shards[part.node, part.shard]
        digest = outcome.digests.get(part.number, "")
        return manifest.ModelPart(
            part.number,
            part.site,
            shard.table,
            shard.index,
            digest,
            first_regions.get(part.number, 0),
        )

    for name, table in problem.tables.items():
        fragments = bound.fragments_of(name)
        hosted = [part.name for part in fragments]
        # of a table with a site that was gone at the end, none
        contribution = outcome.contributions.get(
            name, Contribution(np.zeros(table.outputs), 0.0)
        )
        yield manifest.ModelTable(
            table=name,
            name=problem.names[name],
            columns={table: dict(columns.schemas[table]) for table in hosted},
            formats={table: columns.formats_of(table) for table in hosted},
            features=manifest.feature_texts(fragments),
            kind=table.model,
            encoded=problem.encoders[name],
            parts=tuple(map(part_of, table.parts)),
            mean_score=tuple(contribution.mean_score.tolist()),
            share=contribution.share,
            factors=outcome.factors.get(name, 0),
            bins=joint.most.get(name, 0) if joint else 0,
            bin_columns=joint.columns.get(name, 0) if joint else 0,
        )
