"""The manifest of a model that a run has trained."""

from strategies.inference.feature_texts import feature_texts, label_text
from strategies.inference.manifest import Manifest, ModelPart, ModelTable, finite
from strategies.run.exchange import Part
from strategies.run.sites import Inventory
from strategies.setup.joined_rows import bind
from strategies.training.base import RelationalStrategy
from strategies.training.outcome import Outcome
from tp_flower.learning.models.centres import CENTRES
from tp_flower.learning.models.local_model import NUMPY_KINDS
from tp_flower.settings import Settings
from tp_flower.software import software


def make_manifest(strategy: RelationalStrategy) -> Manifest:
    """Return the manifest of a run that went well.

    Raises:
        RuntimeError: the run has not come to its end.
    """
    federation, report, outcome = strategy.federation, strategy.report, strategy.outcome
    if federation is None or not strategy.is_finished:
        raise RuntimeError("there is no model before the run has ended")
    inventory = strategy.inventory
    schemas = inventory.schemas()
    bound = bind(strategy.query, schemas, strategy.settings)
    fragments = {name: bound.fragments_of(name) for name in federation.tables}
    kinds = {
        name: _kind(strategy.settings, name, is_linear=table.is_linear)
        for name, table in federation.tables.items()
    }
    tables = tuple(
        ModelTable(
            table=name,
            name=federation.names[name],
            columns={own.name: schemas[own.name] for own in fragments[name]},
            features=feature_texts(fragments[name]),
            kind=kinds[name],
            encoder=federation.encoders[name],
            parts=tuple(_part(part, inventory, outcome) for part in table.parts),
            mean_score=outcome.contributions[name].mean_score,
            share=outcome.contributions[name].share,
        )
        for name, table in federation.tables.items()
    )
    return Manifest(
        model=strategy.model,
        created=report.started,
        status=report.status,
        query=report.query,
        settings=report.settings,
        label_table=bound.label_table,
        label=label_text(fragments[bound.label_table]) or "",
        loss=federation.loss.name,
        classes=federation.classes,
        base_score=federation.base_score,
        tables=tables,
        train=finite(report.final_train),
        test=finite(report.final_test),
        joined_rows=report.joined_rows_train,
        versions=software(has_torch=not set(kinds.values()) <= NUMPY_KINDS),
    )


def _kind(settings: Settings, table: str, *, is_linear: bool) -> str:
    """Return what kind of model a table has."""
    if settings.method.is_clustering:
        return CENTRES
    return "linear" if is_linear else settings.model_of(table)


def _part(part: Part, inventory: Inventory, outcome: Outcome) -> ModelPart:
    """Return how a part is found again: by site, table and shard, not by node."""
    (shard,) = (
        own
        for own in inventory.shards
        if (own.node, own.position) == (part.node, part.shard)
    )
    digest = outcome.digests.get(part.number, "")
    return ModelPart(part.number, part.site, shard.table, shard.index, digest)
