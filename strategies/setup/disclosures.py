"""Who will learn what in a run: what decides it, from the set-up of the run."""

from collections.abc import Mapping

from strategies.disclosures import Audience
from strategies.run.sites import Inventory
from strategies.setup.joined_rows import SplitRows
from tp_flower.features.encoder import TableEncoder
from tp_flower.methods import ADMM, CORESET, SGD
from tp_flower.privacy.plan import CENTRES, SAMPLED_ROWS
from tp_flower.protocol import Update
from tp_flower.settings import DISTDIM, IMPORTANCE, Settings


def audience_of(
    joined: SplitRows,
    settings: Settings,
    inventory: Inventory,
    updates: Mapping[str, Update],
    encoders: Mapping[str, TableEncoder],
) -> Audience:
    """Return what decides who learns what.

    Args:
        joined: the rows of the query.
        settings: of the run.
        inventory: of the sites.
        updates: by table, how its shards are trained together; none where every shard
            trains a model of its own.
        encoders: by table.
    """
    bound, parts = joined.bound, joined.extracted.parts
    sharded = [name for name, own in parts.items() if len(own) > 1]
    return Audience(
        label_table=bound.label_table,
        family=settings.family,
        sharded=sharded,
        gram=[name for name in sharded if updates.get(name) is Update.GRAM],
        grouped=[
            name
            for name in sharded
            if any(own.subquery is not None for own in bound.fragments_of(name))
        ],
        is_linear=all(settings.model_of(name) == "linear" for name in parts),
        is_simulated=all(node.is_simulated for node in inventory.nodes.values()),
        privacy=settings.privacy,
        # all sites have the same, or the run has been refused
        keys=next(iter(inventory.nodes.values())).keys,
        weight=joined.weighting.column,
        is_weighted=joined.weighting.train is not None,
        is_expanded=settings.method.is_expanded,
        is_measured=is_measured(settings),
        sends=sent_of_rows(settings),
        has_label=not settings.method.is_clustering,
        fitted=[name for name, encoder in encoders.items() if encoder.fitted],
        is_stale=settings.family == SGD and bool(sharded and settings.staleness),
        has_inner_rounds=settings.family == ADMM and settings.inner_rounds > 1,
    )


def is_measured(settings: Settings) -> bool:
    """Return whether a coreset is drawn by the sensitivities of the rows."""
    return bool(settings.coreset_rows) and settings.coreset_kind == IMPORTANCE


def sent_of_rows(settings: Settings) -> str:
    """Return what of sampled rows leaves the sites; "" where they train themselves."""
    if settings.family != CORESET:
        return ""
    return CENTRES if settings.coreset_solver == DISTDIM else SAMPLED_ROWS
